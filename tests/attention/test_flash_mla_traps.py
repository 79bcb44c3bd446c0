"""What FlashMLA gets wrong without a word, or ends the process on, unless its user knows.

The numbers are those of the list of traps that the GPU libraries are held against. Each test fails
when its guard is taken out.
"""

import importlib
from dataclasses import replace

import pytest
import torch

from attention import AttentionBackend, AttentionSpec, attention_problem, create_attention
from attention.flash_mla_attention import FlashMlaAttention
from tests.attention.cases import Case, decode, flash_mla_spec, make_case, naive
from tests.compare import assert_rows_close
from tests.emulators.device import DEVICE

pytestmark = pytest.mark.usefixtures("sm90")

SPEC = flash_mla_spec()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """What every call of the library was given: q's shape, the schedule, and keywords."""
    library, seen = importlib.import_module("flash_mla"), []
    real = library.flash_mla_with_kvcache

    def spy(q, cache, table, lengths, head_dim_v, schedule, **kwargs):
        seen.append({"q": q.shape, "table": table, "lengths": lengths, "schedule": schedule})
        return real(q, cache, table, lengths, head_dim_v, schedule, **kwargs)

    monkeypatch.setattr(library, "flash_mla_with_kvcache", spy)
    return seen


def check(backend: AttentionBackend, case: Case) -> None:
    got = decode(backend, case)
    assert_rows_close(got.double(), naive(case), rtol=4e-2, atol=1e-3)


def test_trap_16_schedule_not_reused_across_steps() -> None:
    """The same batch shape with other lengths, which the library would not notice."""
    backend = create_attention("flash_mla", SPEC)
    for lens in ([(70, 1), (3, 1)], [(71, 1), (4, 1)], [(3, 1), (500, 1)]):
        check(backend, make_case(SPEC, lens, 2))


def test_trap_16_schedule_shared_by_the_layers_of_a_step(calls: list[dict]) -> None:
    case = make_case(SPEC, [(70, 1), (3, 1), (8, 3)], 3)
    backend = create_attention("flash_mla", SPEC)
    plan = backend.plan(case.batch)
    q = torch.zeros(5, 4, 576, dtype=torch.bfloat16)
    for _ in range(3):
        backend.decode(q=q, cache=case.cache, plan=plan)
    assert [tuple(call["q"]) for call in calls] == [(2, 1, 4, 576), (1, 3, 4, 576)] * 3
    assert len({id(call["schedule"]) for call in calls}) == 2
    assert calls[0]["schedule"] is calls[2]["schedule"] is calls[4]["schedule"]


def test_trap_16_the_old_interface_is_not_used(calls: list[dict]) -> None:
    """The stand-in refuses arguments to get_mla_metadata, which the library ignores."""
    with pytest.raises(RuntimeError, match="old interface"):
        importlib.import_module("flash_mla").get_mla_metadata(torch.zeros(2), 4, 1)
    case = make_case(SPEC, [(70, 1)], 1)
    check(create_attention("flash_mla", SPEC), case)
    assert type(calls[0]["schedule"]).__name__ == "FlashMLASchedMeta"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"qk_rope_head_dim": 0}, "this model has 512 and 512"),  # ends the process
        ({"kv_lora_rank": 448, "qk_rope_head_dim": 64}, "this model has 512 and 448"),
        ({"kv_lora_rank": 256}, "this model has 320 and 256"),
        ({"kv_lora_rank": 448, "qk_rope_head_dim": 128}, "this model has 576 and 448"),
        ({"dtype": torch.float32}, "in bfloat16 here, not torch.float32"),
        ({"dtype": torch.float16}, "in bfloat16 here, not torch.float16"),
        ({"num_heads": 0}, "num_heads: 0 given"),
    ],
)
def test_trap_17_sizes_are_refused_before_the_library_sees_them(change: dict, named: str) -> None:
    spec: AttentionSpec = replace(SPEC, **change)
    assert named in (FlashMlaAttention.supports(spec) or "")
    with pytest.raises(ValueError, match=named):
        FlashMlaAttention(spec)


def test_trap_17_another_page_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention.flash_mla_attention.BLOCK_SIZE", 128)
    assert FlashMlaAttention.supports(SPEC) == (
        "flash_mla reads pages of 64 tokens, the cache has 128"
    )


@pytest.mark.parametrize(
    ("major", "num_sms", "named"),
    [
        (10, 148, "needs SM90, this device is SM100"),
        (8, 108, "needs SM90, this device is SM80"),
        (9, 162, "would end the process on a device with 162 SMs"),
    ],
)
def test_trap_17_devices_are_refused_before_the_library_sees_them(
    major: int, num_sms: int, named: str
) -> None:
    DEVICE.major, DEVICE.multi_processor_count = major, num_sms
    assert named in (FlashMlaAttention.supports(SPEC) or "")


def test_trap_17_several_queries_see_up_to_their_own_position() -> None:
    """Lengths include the new tokens, whose latents are cached before the call."""
    for lens in ([(64, 4), (0, 4)], [(0, 2), (62, 2)], [(1, 3)]):
        check(create_attention("flash_mla", SPEC), make_case(SPEC, lens, len(lens)))


def test_trap_17_block_tables_hold_blocks_that_exist(calls: list[dict]) -> None:
    case = make_case(SPEC, [(700, 1), (3, 1)], 2)
    for table in case.batch.block_tables:
        table[-1] = 1 << 30  # the spare entry
    check(create_attention("flash_mla", SPEC), case)
    table = calls[0]["table"]
    assert table.dtype is torch.int32
    assert table.shape == (2, 11)
    assert int(table.min()) >= 0
    assert int(table.max()) < len(case.cache)
    assert calls[0]["lengths"].tolist() == [701, 4]


@pytest.mark.parametrize(
    "error",
    [
        ImportError("undefined symbol: CUDAErrorLogCapture"),
        OSError("libcudart.so.13: cannot open shared object file"),
        AssertionError("no CUDA"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_trap_18_a_library_that_fails_to_load_is_a_reason_not_a_crash(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr("attention.flash_mla_attention.importlib.import_module", fail)
    assert attention_problem("flash_mla", SPEC) == f"flash_mla cannot be imported: {error}"
    with pytest.raises(ValueError, match="torch: can be used"):
        create_attention("flash_mla", SPEC)


@pytest.mark.parametrize("error", [AssertionError("not compiled"), RuntimeError("no driver")])
def test_trap_18_a_library_without_a_gpu_is_a_reason_not_a_crash(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(device: object = None) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    assert attention_problem("flash_mla", SPEC) == f"flash_mla needs a GPU: {error}"
