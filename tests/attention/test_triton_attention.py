"""Triton attention, under the interpreter where there is no GPU, against a naive float64 one."""

from array import array
from dataclasses import replace

import pytest
import torch

from attention import AttentionBackend, AttentionBatch, attention_problem, create_attention
from attention import decode_items as items_module
from attention.decode_items import plan_items
from attention.triton_attention import TritonAttention
from tests.attention.cases import (
    Case,
    decode,
    decode_absorbed,
    first_decodes,
    make_case,
    make_spec,
    naive,
    run_prefill,
)
from tests.compare import assert_bits_equal, assert_rows_close
from tests.kernels.cases import DEVICE

DTYPES = [torch.float32, torch.bfloat16]
# Scores stay float32 here; what is rounded to bfloat16 are probabilities, queries and the result.
RTOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make_backend(case: Case) -> AttentionBackend:
    return create_attention("triton", case.spec, device=DEVICE)


def assert_answers(got: torch.Tensor, case: Case) -> None:
    assert_rows_close(got.double(), naive(case), rtol=RTOL[case.spec.dtype], atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "lens",
    [
        [(0, 1), (62, 1), (63, 1), (64, 1), (5, 1), (130, 1), (577, 1), (511, 1), (512, 1)],
        [(61, 4), (0, 2), (700, 1), (510, 4)],
    ],
    ids=["ragged", "ragged_queries"],
)
def test_decode(dtype: torch.dtype, lens: list[tuple[int, int]]) -> None:
    case = make_case(make_spec(dtype), lens, len(lens))
    assert_answers(decode(make_backend(case), case), case)


@pytest.mark.parametrize(
    "sizes", [(1, 48, 16, 4), (20, 80, 24, 24), (16, 512, 128, 64)], ids=["one", "odd", "v3"]
)
def test_other_head_sizes(sizes: tuple[int, int, int, int]) -> None:
    """Sizes that are no power of two, fewer and more rows than a tile, and DeepSeek-V3's."""
    num_heads, rank, nope, rope = sizes
    spec = make_spec(
        num_heads=num_heads,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=16,
    )
    case = make_case(spec, [(70, 1), (3, 2)], 2)
    assert_answers(decode(make_backend(case), case), case)


@pytest.mark.parametrize("item_rows", [64, 128])
def test_decode_does_not_depend_on_how_it_is_cut(
    monkeypatch: pytest.MonkeyPatch, item_rows: int
) -> None:
    """Also where an item holds nothing that the first of several queries may see."""
    monkeypatch.setattr(items_module, "ITEM_ROWS", item_rows)
    case = make_case(make_spec(), [(63, 2), (127, 4), (200, 1), (3, 1)], 4)
    assert plan_items(case.batch, DEVICE).is_split
    assert_answers(decode(make_backend(case), case), case)


def test_a_request_does_not_see_its_batch_mates() -> None:
    case = make_case(make_spec(torch.bfloat16), [(600, 1), (20, 2)], 2)
    q = torch.randn(3, case.spec.num_heads, case.spec.latent_dim).bfloat16()
    backend = make_backend(case)
    together = decode_absorbed(backend, case, q)
    assert_bits_equal(together[:1], decode_absorbed(backend, first_decodes(case, 1), q[:1]))


def test_large_scores_do_not_overflow() -> None:
    case = make_case(make_spec(), [(90, 1), (600, 1)], 2)
    case = replace(case, q=case.q * 100)
    assert_rows_close(decode(make_backend(case), case).double(), naive(case), rtol=1e-3, atol=0.0)


def test_prefill_in_a_mixed_batch() -> None:
    case = make_case(make_spec(), [(100, 1), (0, 70), (90, 33)], 1)
    backend = make_backend(case)
    plan = backend.plan(case.batch)
    assert (plan.num_decode_tokens, plan.num_tokens) == (1, 104)
    got = run_prefill(backend, case, plan, slice(1, None))
    assert_rows_close(got.double(), naive(case)[1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("num_items", "tuned_items"), [(1, 16), (16, 16), (17, 64), (65, 256), (1000, 256)]
)
def test_few_and_many_requests_are_tuned_apart(monkeypatch, num_items, tuned_items) -> None:
    from attention import triton_kernels

    kernel, seen = triton_kernels._decode, []
    assert "tuned_items" in kernel.keys
    place = kernel.arg_names.index("tuned_items")

    class Recorded:
        def __getitem__(self, grid):
            return lambda *args, **flags: seen.append(args[place])

    monkeypatch.setattr(triton_kernels, "_decode", Recorded())
    case = make_case(make_spec(), [(3, 1)] * num_items, num_items)
    triton_kernels.decode(
        torch.zeros(num_items, 4, 40), case.cache, plan_items(case.batch, DEVICE), case.spec
    )
    assert seen == [tuned_items]


def test_padding_items_do_nothing() -> None:
    """As a captured graph has them: more items than the step needs, without positions."""
    from attention.triton_kernels import decode as run

    case = make_case(make_spec(), [(30, 1), (70, 1)], 2)
    items = plan_items(case.batch, DEVICE)
    q = torch.randn(2, 4, case.spec.latent_dim).to(DEVICE)
    want = run(q, case.cache.to(DEVICE), items, case.spec)
    grown = {
        name: torch.cat([getattr(items, name), torch.zeros(3, dtype=torch.int32, device=DEVICE)])
        for name in ("item_request", "item_start", "item_stop")
    }
    assert_bits_equal(run(q, case.cache.to(DEVICE), replace(items, **grown), case.spec), want)


def test_items_cover_each_request_and_are_few() -> None:
    lengths = [1, 64, 512, 513, 5000, 16384, 16385, 200_000]
    tables = [array("i", [7]) * -(-length // 64) for length in lengths]
    batch = AttentionBatch(8, [1] * 8, [length - 1 for length in lengths], tables, 8)
    items = plan_items(batch, torch.device("cpu"))
    ends = items.first_item[1:].tolist()
    for request, length in enumerate(lengths):
        mine = slice(items.first_item[request], ends[request])
        starts, stops = items.item_start[mine].tolist(), items.item_stop[mine].tolist()
        assert items.item_request[mine].tolist() == [request] * len(starts)
        assert starts == [0, *stops[:-1]]
        assert stops[-1] == length
        assert all(start % 64 == 0 for start in starts)
        assert len(starts) <= min(32, -(-length // 512))
    assert ends[-1] == len(items.item_request)


def test_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    assert "not torch.float16" in str(attention_problem("triton", make_spec(torch.float16)))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "need a CUDA device" in str(TritonAttention.supports(make_spec()))
