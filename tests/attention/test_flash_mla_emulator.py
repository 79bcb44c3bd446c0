"""The stand-in of FlashMLA refuses what the library refuses, ends the process on, or gets wrong."""

import pytest
import torch

from tests.compare import assert_rows_close
from tests.emulators.device import DEVICE
from tests.emulators.flash_mla import (
    ProcessWouldExit,
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from tests.emulators.test_manifest import described, manifest_of

pytestmark = pytest.mark.usefixtures("sm90")

BF16 = torch.bfloat16


def arguments(lengths: list[int], num_queries: int = 1, num_heads: int = 2) -> dict:
    """A call over a cache that is NaN where no sequence reaches, and a table with wild entries."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = [-(-length // 64) for length in lengths]
    cache = torch.full((sum(num_blocks) + 2, 64, 1, 576), torch.nan, dtype=BF16)
    table = torch.full((len(lengths), max(num_blocks) + 2), -(1 << 31), dtype=torch.int32)
    block = 1
    for request, length in enumerate(lengths):
        rows = torch.randn(length, 576, generator=generator).to(BF16)
        for idx, piece in enumerate(rows.split(64) if length else ()):
            cache[block, : len(piece), 0] = piece
            table[request, idx] = block
            block += 1
    shape = (len(lengths), num_queries, num_heads, 576)
    return {
        "q": torch.randn(shape, generator=generator).to(BF16),
        "k_cache": cache,
        "block_table": table,
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
        "head_dim_v": 512,
        "tile_scheduler_metadata": get_mla_metadata()[0],
    }


@pytest.mark.parametrize("num_queries", [1, 3])
def test_it_attends_bottom_right_aligned_and_reads_nothing_else(num_queries: int) -> None:
    lengths = [130, 64, 3]
    given = arguments(lengths, num_queries)
    out, lse = flash_mla_with_kvcache(**given, softmax_scale=0.05, causal=True)
    assert (out.shape, out.dtype) == ((3, num_queries, 2, 512), BF16)
    assert (lse.shape, lse.dtype) == ((3, 2, num_queries), torch.float32)
    for request, length in enumerate(lengths):
        blocks = given["block_table"][request, : -(-length // 64)].long()
        keys = given["k_cache"][blocks].reshape(-1, 576)[:length].double()
        for query in range(num_queries):
            seen = keys[: length - num_queries + query + 1]
            scores = given["q"][request, query].double() @ seen.T * 0.05
            want = scores.softmax(-1) @ seen[:, :512]
            assert_rows_close(out[request, query].double(), want, dtype=BF16)
            sums = scores.logsumexp(-1)[None]
            assert_rows_close(lse[request, :, query].double()[None], sums, rtol=1e-5)


def test_an_empty_sequence_gives_zeros_and_infinity() -> None:
    out, lse = flash_mla_with_kvcache(**arguments([0, 5], 2))
    assert out[0].eq(0).all()
    assert lse[0].eq(torch.inf).all()
    assert out[1].isfinite().all()


def test_the_default_scale_is_that_of_the_head_dim() -> None:
    out, _ = flash_mla_with_kvcache(**arguments([70]))
    want, _ = flash_mla_with_kvcache(**arguments([70]), softmax_scale=576**-0.5)
    assert torch.equal(out, want)


def test_a_schedule_is_bound_to_its_first_use() -> None:
    given = arguments([70, 3])
    flash_mla_with_kvcache(**given)
    flash_mla_with_kvcache(**given)
    longer = given["cache_seqlens"] - 1
    with pytest.raises(RuntimeError, match=r"for lengths \[70, 3\] was used again for .*69, 2"):
        flash_mla_with_kvcache(**{**given, "cache_seqlens": longer})
    with pytest.raises(AssertionError, match="inconsistent with sched_meta"):
        flash_mla_with_kvcache(**given, causal=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q": torch.zeros(1, 1, 2, 576)}, "q of torch.float32"),
        ({"q": torch.zeros(1, 1, 2, 576).half()}, "cache of torch.bfloat16"),
        ({"q": torch.zeros(1, 1, 2, 320, dtype=BF16)}, "values, q of 320"),
        ({"q": torch.zeros(1, 1, 576, 2, dtype=BF16).mT}, "q and cache must be contiguous"),
        ({"k_cache": torch.zeros(4, 128, 1, 576, dtype=BF16)}, "page_block_size must be 64"),
        ({"head_dim_v": 576}, "head_dim_v must be 512"),
        ({"cache_seqlens": torch.tensor([5])}, "lengths torch.int64"),
        ({"cache_seqlens": torch.tensor([5, 6]).int()}, "lengths of shape"),
        ({"cache_seqlens": torch.tensor([999]).int()}, "lengths"),
        ({"block_table": torch.zeros(1, 3).long()}, "block_table of torch.int64"),
        ({"block_table": torch.full((1, 3), 99).int()}, "illegal memory access"),
        ({"is_fp8_kvcache": True}, "no effect"),
    ],
)
def test_arguments_are_checked(change: dict, named: str) -> None:
    with pytest.raises(RuntimeError, match=named):
        flash_mla_with_kvcache(**{**arguments([5]), **change})


def test_what_would_end_the_process_is_no_ordinary_error() -> None:
    small = torch.zeros(1, 1, 2, 512, dtype=BF16), torch.zeros(4, 64, 1, 512, dtype=BF16)
    given = {**arguments([5]), "q": small[0], "k_cache": small[1]}
    with pytest.raises(ProcessWouldExit, match="head dim 512"):
        flash_mla_with_kvcache(**given)
    DEVICE.multi_processor_count = 200
    with pytest.raises(ProcessWouldExit, match="200 SM parts"):
        flash_mla_with_kvcache(**arguments([5]))
    assert not issubclass(ProcessWouldExit, Exception)


def test_other_generations_are_refused() -> None:
    DEVICE.major = 10
    with pytest.raises(RuntimeError, match="only supported on SM90a"):
        flash_mla_with_kvcache(**arguments([5]))


def test_signatures_are_those_of_the_library() -> None:
    manifest = manifest_of("flash_mla")
    for function in (get_mla_metadata, flash_mla_with_kvcache):
        assert described(function) == manifest[function.__name__]
