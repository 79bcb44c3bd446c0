"""Both paths of the torch backend against a naive float64 attention, over a poisoned cache."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from attention import create_attention
from attention import torch_decode as decode_module
from attention import torch_prefill as prefill_module
from tests.attention.cases import (
    RAGGED,
    Case,
    decode,
    first_decodes,
    make_case,
    make_spec,
    naive,
    prefill,
    run_prefill,
)
from tests.compare import assert_bits_equal, assert_rows_close

pytestmark = pytest.mark.usefixtures("bf16_products")

DTYPES = [torch.float32, torch.bfloat16]
# A bfloat16 score is rounded to 2^-9 of itself and the scores here reach about 10, which moves a
# probability by 2%; rounded keys, values and probabilities add to it.
RTOL = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def assert_answers(got: torch.Tensor, case: Case) -> None:
    assert_rows_close(got.double(), naive(case), rtol=RTOL[case.spec.dtype], atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "lens",
    [
        [(255, 1)],
        [(256, 1)],
        [(2000, 1)],
        RAGGED,
        [(300, 3)],
        [(61, 4), (0, 2), (700, 1), (510, 4)],
    ],
    ids=["one", "block_edge", "long", "ragged", "three_queries", "ragged_queries"],
)
def test_decode(dtype: torch.dtype, lens: list[tuple[int, int]]) -> None:
    case = make_case(make_spec(dtype), lens, len(lens))
    backend = create_attention("torch", case.spec)
    assert_answers(decode(backend, case), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "lens",
    [[(0, 1)], [(0, 128)], [(0, 1300)], [(1100, 130)], [(64, 64), (0, 5), (63, 70), (1024, 1)]],
    ids=["one_token", "one_tile", "two_key_pieces", "long_context", "ragged"],
)
def test_prefill(dtype: torch.dtype, lens: list[tuple[int, int]]) -> None:
    case = make_case(make_spec(dtype), lens, 0)
    assert_answers(prefill(create_attention("torch", case.spec), case), case)


@pytest.mark.parametrize("sizes", [(1, 128, 64, 1), (16, 512, 128, 64)], ids=["one_head", "v3"])
def test_other_head_sizes(sizes: tuple[int, int, int, int]) -> None:
    num_heads, rank, nope, rope = sizes
    spec = make_spec(
        num_heads=num_heads,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=nope // 2,
    )
    case = make_case(spec, [(70, 1), (3, 1)], 2)
    backend = create_attention("torch", spec)
    assert_answers(decode(backend, case), case)
    assert_answers(prefill(backend, case), case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_paths_agree(dtype: torch.dtype) -> None:
    case = make_case(make_spec(dtype), RAGGED, len(RAGGED))
    backend = create_attention("torch", case.spec)
    got = decode(backend, case)
    assert_rows_close(got, prefill(backend, case).float(), rtol=RTOL[dtype], atol=1e-3)


def test_mixed_batch_runs_each_path_on_its_rows() -> None:
    lens = [(100, 1), (3, 1), (0, 70), (90, 33)]
    case = make_case(make_spec(), lens, 2)
    backend = create_attention("torch", case.spec)
    plan = backend.plan(case.batch)
    assert (plan.num_decode_tokens, plan.num_tokens) == (2, 105)
    got = run_prefill(backend, case, plan, slice(2, None))
    assert_rows_close(got.double(), naive(case)[2:], rtol=1e-5, atol=1e-6)
    absorbed = torch.randn(2, case.spec.num_heads, case.spec.latent_dim)
    assert backend.decode(q=absorbed, cache=case.cache, plan=plan).isfinite().all()


def test_chunked_prefill_equals_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also across pieces and tiles smaller than their usual size."""
    whole = make_case(make_spec(), [(0, 300)], 0)
    want = prefill(create_attention("torch", whole.spec), whole)
    monkeypatch.setattr(prefill_module, "KEY_ROWS", 64)
    monkeypatch.setattr(prefill_module, "QUERY_ROWS", 32)
    backend = create_attention("torch", whole.spec)
    for start, end in [(0, 100), (100, 101), (101, 229), (229, 300)]:
        part = chunk_of(whole, start, end)
        assert_rows_close(prefill(backend, part), want[start:end])


def chunk_of(case: Case, start: int, end: int) -> Case:
    """Of a case of one request, these new tokens."""
    batch = replace(case.batch, query_lens=[end - start], context_lens=[start], num_padded_tokens=0)
    unseen = [latent[:end] for latent in case.latents]
    return replace(case, batch=batch, q=case.q[start:end], latents=unseen)


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(), reason="known to hold with AVX-512; not known with AMX"
)
def test_chunks_cut_between_tiles_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit in BF16, where each row of a product is one chain of sums; with one piece of keys
    and with several, and with cuts inside a piece."""
    monkeypatch.setattr(prefill_module, "KEY_ROWS", 64)
    monkeypatch.setattr(prefill_module, "QUERY_ROWS", 32)
    whole = make_case(make_spec(torch.bfloat16), [(0, 210)], 0)
    backend = create_attention("torch", whole.spec)
    want = prefill(backend, whole)
    for cut in ([0, 32, 210], [0, 64, 160, 210], [0, 192, 210]):
        parts = [chunk_of(whole, start, end) for start, end in pairwise(cut)]
        assert_bits_equal(torch.cat([prefill(backend, part) for part in parts]), want)


def test_short_prompts_are_rebuilt_together() -> None:
    case = make_case(make_spec(), [(0, 5)] * 10 + [(1000, 40), (0, 3)], 0)
    groups = list(prefill_module.plan_prefills(case.batch, torch.device("cpu")))
    sizes = [[piece.num_keys for piece in group.pieces] for group in groups]
    assert sizes == [[5] * 10, [1024], [16, 3]]
    assert [len(group.cache_rows) for group in groups] == [50, 1024, 19]


@pytest.mark.parametrize(("item_rows", "group_rows"), [(64, 64), (128, 512), (1024, 8192)])
def test_decode_does_not_depend_on_how_it_is_cut(
    monkeypatch: pytest.MonkeyPatch, item_rows: int, group_rows: int
) -> None:
    case = make_case(make_spec(), [*RAGGED, (200, 1)], 10)
    monkeypatch.setattr(decode_module, "ITEM_ROWS", item_rows)
    monkeypatch.setitem(decode_module.GROUP_ROWS, case.spec.dtype, group_rows)
    assert_answers(decode(create_attention("torch", case.spec), case), case)


def test_decode_work_is_proportional_to_the_sum_of_lengths() -> None:
    case = make_case(make_spec(), [(5000, 1), *[(10, 1)] * 20], 21)
    work = decode_module.plan_decode(case.batch, torch.float32, torch.device("cpu"))
    gathered = sum(len(group.cache_rows) for group in work.groups)
    assert gathered <= sum(64 * -(-(context + 1) // 64) for context in case.batch.context_lens)


def test_a_request_does_not_see_its_batch_mates() -> None:
    spec = make_spec()
    case = make_case(spec, [(700, 1), (20, 1)], 2)
    backend = create_attention("torch", spec)
    both = decode(backend, case)
    assert_rows_close(both[:1], decode(backend, first_decodes(case, 1)))
    assert_bits_equal(decode(backend, case), both)


def test_large_scores_do_not_overflow() -> None:
    case = make_case(make_spec(), [(90, 1), (600, 1)], 2)
    case = replace(case, q=case.q * 100)
    backend = create_attention("torch", case.spec)
    assert_rows_close(decode(backend, case).double(), naive(case), rtol=1e-3, atol=0.0)
    assert_rows_close(prefill(backend, case).double(), naive(case), rtol=1e-3, atol=0.0)


def test_strided_inputs() -> None:
    case = make_case(make_spec(), [(70, 40)], 0)
    want = prefill(create_attention("torch", case.spec), case)
    wide = torch.full((40, 8, 48), torch.nan)
    wide[:, ::2, :24] = case.q
    strided = replace(case, q=wide[:, ::2, :24])
    assert_bits_equal(prefill(create_attention("torch", case.spec), strided), want)


def test_no_requests() -> None:
    case = make_case(make_spec(), [(3, 1)], 1)
    backend = create_attention("torch", case.spec)
    empty = replace(case.batch, num_decodes=0, query_lens=[], context_lens=[], block_tables=[])
    plan = backend.plan(empty)
    assert (plan.num_tokens, plan.num_decode_tokens) == (0, 0)
    got = run_prefill(backend, case, plan, slice(0))
    assert got.shape == (0, case.spec.num_heads, case.spec.v_head_dim)
