"""FlashMLA attention over the strict stand-in, against a naive float64 attention.

The cache is poisoned wherever no request wrote.
"""

from dataclasses import replace

import pytest
import torch

from attention import create_attention
from attention.flash_mla_attention import FlashMlaAttention
from tests.attention.cases import (
    RAGGED,
    Case,
    decode,
    first_decodes,
    flash_mla_spec,
    make_case,
    naive,
    prefill,
    run_prefill,
)
from tests.compare import assert_bits_equal, assert_rows_close

pytestmark = pytest.mark.usefixtures("sm90")

BF16 = torch.bfloat16
RTOL = 4e-2  # as for the torch backend in BF16


def make(lens: list[tuple[int, int]], num_decodes: int, *, num_heads: int = 4) -> Case:
    return make_case(flash_mla_spec(num_heads), lens, num_decodes)


def assert_answers(got: torch.Tensor, case: Case) -> None:
    assert_rows_close(got.double(), naive(case), rtol=RTOL, atol=1e-3)


@pytest.mark.parametrize(
    "lens",
    [
        [(0, 1)],
        [(255, 1)],
        [(256, 1)],
        RAGGED,
        [(300, 3)],
        [(61, 4), (0, 2), (700, 1), (510, 4), (63, 2)],
        [(5, 2), (9, 2), (70, 2)],
    ],
    ids=["first", "block_edge", "next_block", "ragged", "three", "ragged_queries", "uniform"],
)
def test_decode(lens: list[tuple[int, int]]) -> None:
    case = make(lens, len(lens))
    assert_answers(decode(create_attention("flash_mla", case.spec), case), case)


@pytest.mark.parametrize("num_heads", [1, 16, 128])
def test_head_counts(num_heads: int) -> None:
    case = make([(70, 1), (3, 2)], 2, num_heads=num_heads)
    assert_answers(decode(create_attention("flash_mla", case.spec), case), case)


def test_prefill_is_the_torch_path() -> None:
    case = make([(64, 64), (0, 5), (63, 70)], 0)
    got = prefill(create_attention("flash_mla", case.spec), case)
    assert_bits_equal(got, prefill(create_attention("torch", case.spec), case))
    assert_answers(got, case)


def test_both_paths_agree() -> None:
    case = make(RAGGED, len(RAGGED))
    backend = create_attention("flash_mla", case.spec)
    got = decode(backend, case)
    assert_rows_close(got, prefill(backend, case).float(), rtol=RTOL, atol=1e-3)


def test_mixed_batch_runs_each_path_on_its_rows() -> None:
    case = make([(100, 1), (3, 2), (0, 70), (90, 33)], 2)
    backend = create_attention("flash_mla", case.spec)
    plan = backend.plan(case.batch)
    assert (plan.num_decode_tokens, plan.num_tokens) == (3, 106)
    got = run_prefill(backend, case, plan, slice(3, None))
    assert_rows_close(got.double(), naive(case)[3:], rtol=RTOL, atol=1e-3)
    decodes = first_decodes(case, 2)
    assert_answers(decode(backend, decodes), decodes)


def test_queries_of_any_strides() -> None:
    case = make([(70, 2), (3, 1)], 2)
    backend = create_attention("flash_mla", case.spec)
    plan = backend.plan(case.batch)
    q = torch.randn(3, 4, 576, generator=torch.Generator().manual_seed(1)).to(BF16)
    strided = q.transpose(0, 1).contiguous().transpose(0, 1)
    want = backend.decode(q=q, cache=case.cache, plan=plan)
    assert_bits_equal(backend.decode(q=strided, cache=case.cache, plan=plan), want)
    uniform = make([(70, 1), (3, 1), (8, 1)], 3)
    plan = backend.plan(uniform.batch)
    want = backend.decode(q=q, cache=uniform.cache, plan=plan)
    assert_bits_equal(backend.decode(q=strided, cache=uniform.cache, plan=plan), want)


def test_a_step_without_decodes_and_a_step_without_anything() -> None:
    case = make([(3, 4)], 0)
    backend = create_attention("flash_mla", case.spec)
    plan = backend.plan(case.batch)
    assert (plan.num_decode_tokens, plan.calls) == (0, ())
    empty = replace(case.batch, query_lens=[], context_lens=[], block_tables=[])
    plan = backend.plan(empty)
    assert (plan.num_tokens, plan.num_decode_tokens) == (0, 0)
    assert run_prefill(backend, case, plan, slice(0)).shape == (0, 4, 32)


def test_it_is_chosen_by_auto() -> None:
    case = make([(3, 1)], 1)
    assert type(create_attention("auto", case.spec)) is FlashMlaAttention
