"""The kernel of prefill, under the interpreter where there is no GPU, against a naive float64
attention: over a poisoned cache, and over memory that is NaN until someone writes it."""

from array import array
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from attention import AttentionBackend, AttentionBatch, create_attention, gpu_prefill, new_tokens
from attention import torch_prefill as prefill_module
from attention.gpu_prefill import Launch, plan_launches
from attention.torch_prefill import plan_prefills
from moe_ep.config import ModelConfig
from tests.attention.cases import (
    Case,
    flash_mla_spec,
    make_case,
    make_spec,
    naive,
    prefill,
    run_prefill,
)
from tests.attention.test_torch_attention import chunk_of
from tests.compare import assert_bits_equal, assert_rows_close
from tests.kernels.cases import DEVICE

DTYPES = [torch.float32, torch.bfloat16]
# Scores stay float32; rounded to bfloat16 are queries, keys, values, probabilities and the result.
LIMITS = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 3e-2, "atol": 1e-3},
}


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small pieces, so that few keys are several, and several launches."""
    monkeypatch.setattr(new_tokens, "uses_kernel", lambda device: True)
    monkeypatch.setattr(prefill_module, "KEY_ROWS", 64)
    monkeypatch.setattr(prefill_module, "QUERY_ROWS", 32)
    monkeypatch.setattr(gpu_prefill, "GROUP_ROWS", 128)
    torch.set_deterministic_debug_mode("warn")  # also fills new memory with NaN
    assert torch.empty(1).isnan().all()
    yield
    torch.set_deterministic_debug_mode("default")


def make_backend(case: Case) -> AttentionBackend:
    return create_attention("triton", case.spec, device=DEVICE)


def assert_answers(case: Case) -> None:
    got = prefill(make_backend(case), case)
    assert_rows_close(got.double(), naive(case), **LIMITS[case.spec.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "lens",
    [
        [(0, 1)],
        [(0, 32)],
        [(0, 150)],
        [(260, 20)],
        [(0, 5), (0, 7), (127, 2), (64, 33), (63, 33), (128, 1)],
    ],
    ids=["one_token", "one_tile", "two_launches", "long_context", "ragged"],
)
def test_prefill(dtype: torch.dtype, lens: list[tuple[int, int]]) -> None:
    assert_answers(make_case(make_spec(dtype, num_heads=2), lens, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["deepseek-v3", "glm-4.7-flash"])
def test_sizes_of_models(monkeypatch: pytest.MonkeyPatch, model: str, dtype: torch.dtype) -> None:
    """Tiles and pieces as they are; one head."""
    monkeypatch.undo()
    monkeypatch.setattr(new_tokens, "uses_kernel", lambda device: True)
    sizes = ModelConfig.from_path(model)
    spec = make_spec(
        dtype,
        num_heads=1,
        kv_lora_rank=sizes.kv_lora_rank,
        qk_nope_head_dim=sizes.qk_nope_head_dim,
        qk_rope_head_dim=sizes.qk_rope_head_dim,
        v_head_dim=sizes.v_head_dim,
    )
    assert_answers(make_case(spec, [(100, 40), (3, 1)], 0))


@pytest.mark.parametrize("sizes", [(1, 48, 8, 4, 8), (3, 80, 24, 24, 40)], ids=["small", "odd"])
def test_other_head_sizes(sizes: tuple[int, int, int, int, int]) -> None:
    num_heads, rank, nope, rope, value = sizes
    spec = make_spec(
        num_heads=num_heads,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
    )
    assert_answers(make_case(spec, [(140, 40)], 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_launches_do_not_show(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """To the bit: a launch goes on where the one before stopped."""
    case = make_case(make_spec(dtype, num_heads=1), [(130, 40), (0, 20), (200, 3)], 0)
    want = prefill(make_backend(case), case)
    for group_rows in (64, 4096):
        monkeypatch.setattr(gpu_prefill, "GROUP_ROWS", group_rows)
        assert_bits_equal(prefill(make_backend(case), case), want)


def check_cuts(case: Case, cuts: list[list[int]]) -> None:
    backend = make_backend(case)
    want = prefill(backend, case)
    for cut in cuts:
        parts = [chunk_of(case, start, end) for start, end in pairwise(cut)]
        assert_bits_equal(torch.cat([prefill(backend, part) for part in parts]), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cuts_between_pieces_do_not_show(dtype: torch.dtype) -> None:
    """To the bit, whatever library makes the products: theirs are the same. Two-batch overlap cuts
    prompts in steps of KEY_ROWS."""
    case = make_case(make_spec(dtype, num_heads=1), [(0, 140)], 0)
    check_cuts(case, [[0, 64, 140], [0, 128, 140]])


@pytest.mark.skipif(
    DEVICE.type == "cuda" or torch.cpu._is_amx_tile_supported(),
    reason="known to hold with AVX-512 and AVX2; not known with AMX, or of a GPU's library",
)
def test_cuts_between_tiles_do_not_show() -> None:
    """As long as a product's rows do not depend on how many there are."""
    case = make_case(make_spec(torch.bfloat16, num_heads=1), [(0, 140)], 0)
    check_cuts(case, [[0, 32, 140], [0, 96, 128, 140]])


def test_cuts_within_a_tile() -> None:
    case = make_case(make_spec(num_heads=1), [(0, 150)], 0)
    want = prefill(make_backend(case), case)
    for start, end in pairwise([0, 41, 42, 150]):
        part = chunk_of(case, start, end)
        assert_rows_close(prefill(make_backend(part), part), want[start:end])


def test_a_request_does_not_see_its_batch_mates() -> None:
    """To the bit where no product is shared."""
    case = make_case(make_spec(num_heads=2), [(128, 64), (64, 64)], 0)
    together = prefill(make_backend(case), case)
    alone = chunk_of(replace(case, latents=case.latents[:1]), 128, 192)
    alone = replace(
        alone,
        q=case.q[:64],
        batch=replace(alone.batch, block_tables=alone.batch.block_tables[:1]),
    )
    assert_bits_equal(prefill(make_backend(case), alone), together[:64])


def test_mixed_batch_and_strided_queries() -> None:
    case = make_case(make_spec(num_heads=2), [(100, 1), (0, 40), (90, 33)], 1)
    backend = make_backend(case)
    plan = backend.plan(case.batch)
    assert (plan.num_decode_tokens, plan.num_tokens) == (1, 74)
    got = run_prefill(backend, case, plan, slice(1, None))
    assert_rows_close(got.double(), naive(case)[1:], rtol=1e-5, atol=1e-6)
    wide = torch.full((74, 4, 48), torch.nan)
    for strided in (wide[:, ::2, :24], wide[:, ::2, ::2]):
        strided.copy_(case.q)
        again = run_prefill(backend, replace(case, q=strided), plan, slice(1, None))
        assert_bits_equal(again, got)


def test_large_scores_do_not_overflow() -> None:
    case = make_case(make_spec(num_heads=2), [(90, 60)], 0)
    case = replace(case, q=case.q * 100)
    got = prefill(make_backend(case), case)
    assert_rows_close(got.double(), naive(case), rtol=1e-3, atol=0.0)


def test_steps_without_prefills() -> None:
    case = make_case(make_spec(), [(3, 1)], 1)
    backend = make_backend(case)
    assert backend.plan(case.batch).prefills == ()
    empty = replace(case.batch, num_decodes=0, query_lens=[], context_lens=[], block_tables=[])
    got = run_prefill(backend, case, backend.plan(empty), slice(0))
    assert got.shape == (0, case.spec.num_heads, case.spec.v_head_dim)


def test_flash_mla_prefills_by_the_same_kernel(sm90: None) -> None:
    case = make_case(flash_mla_spec(2), [(64, 64), (0, 5)], 0)
    got = prefill(create_attention("flash_mla", case.spec, device=DEVICE), case)
    assert_bits_equal(got, prefill(make_backend(case), case))


def hand_made_batch() -> AttentionBatch:
    """A decode, then 40 tokens after 100 and 10 after none."""
    return AttentionBatch(
        num_decodes=1,
        query_lens=[1, 40, 10],
        context_lens=[5, 100, 0],
        block_tables=[array("i", [7]), array("i", [4, 0, 9]), array("i", [2])],
        num_padded_tokens=51,
    )


def test_a_plan_by_hand() -> None:
    first, second = plan_launches(hand_made_batch(), DEVICE)
    # first row, rows, place of position 0, start, stop, is last
    assert first.tiles.tolist() == [[0, 28, 0, 0, 128, 1], [28, 12, 0, 0, 128, 0]]
    assert second.tiles.tolist() == [[28, 12, -128, 128, 140, 1], [40, 10, 12, 0, 10, 1]]
    assert (first.products, second.products) == ((64, 64), (22,))
    assert (first.is_final, second.is_final) == (False, True)
    assert first.cache_rows.tolist() == [*range(256, 320), *range(64)]
    assert second.cache_rows.tolist() == [*range(576, 588), *range(128, 138)]
    assert {first.tiles.dtype, first.cache_rows.dtype} == {torch.int32}


def test_the_longest_tiles_come_first() -> None:
    batch = replace(hand_made_batch(), query_lens=[1, 10, 60], context_lens=[5, 0, 3])
    (launch,) = plan_launches(batch, DEVICE)
    assert [stop - start for *_, start, stop, _ in launch.tiles.tolist()] == [63, 32, 10]
    assert launch.is_final


def test_products_are_those_of_the_torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the sizes that serve; launches of them are four times as large."""
    monkeypatch.undo()
    case = make_case(make_spec(num_heads=1), [(0, 5)] * 10 + [(4000, 1200), (0, 3)], 0)
    launches = plan_launches(case.batch, DEVICE)
    assert [launch.products for launch in launches] == [(50, 1024, 1024, 1024), (1024, 1024, 83)]
    rows = torch.cat([launch.cache_rows for launch in launches]).cpu()
    groups = list(plan_prefills(case.batch, torch.device("cpu")))
    assert_bits_equal(rows.long(), torch.cat([group.cache_rows for group in groups]))
    assert [len(g.cache_rows) for g in groups] == [
        n for launch in launches for n in launch.products
    ]
    assert all(tile.shape == (6,) for launch in launches for tile in launch.tiles)


def test_the_kernel_is_not_used_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    case = make_case(make_spec(), [(3, 40)], 0)
    backend = create_attention("triton", case.spec)
    assert not any(isinstance(group, Launch) for group in backend.plan(case.batch).prefills)
    assert_bits_equal(prefill(backend, case), prefill(create_attention("torch", case.spec), case))


@pytest.mark.parametrize(
    ("sizes", "value_bytes", "expected"),
    [
        ((128, 64, 128), 2, (64, 3, 8)),  # 48 KiB + 3 x 40 of 227: DeepSeek-V3
        ((192, 64, 256), 2, (64, 2, 8)),  # 80 + 2 x 72: GLM-4.7-Flash
        ((128, 64, 128), 4, (32, 2, 16)),  # 96 + 2 x 40
    ],
)
def test_blocks_fit_into_shared_memory(sizes, value_bytes, expected) -> None:
    from attention.triton_prefill import _config

    nope, rope, value = sizes
    spec = make_spec(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value)
    assert _config(spec, 128, value_bytes) == expected
