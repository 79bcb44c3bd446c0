"""Rows to the contiguous layout of the experts and back, without a word from the host.

Positions come from counting, not from atomics: a slot holds its rows in the order of the tokens,
whatever the timing. Sizes that depend on the data are bounded: where the caller knows no better,
there are as many rows as the worst routing would need, and the layout says which are real.

Shape letters: T tokens, K choices per token, S slots, H hidden, M rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moe_ep.dispatch.base import ContiguousLayout
from moe_ep.fp8 import new_columns
from moe_ep.kernels.common import narrow

BLOCK_TOKENS = 256  # tokens that a slot's program counts at a time
BLOCK_COLS = 1024
NOWHERE = -1


@dataclass(frozen=True)
class Places:
    """positions: int32 ``[T, K]``, the row that a choice has, or -1. num_rows: M, real or not."""

    positions: torch.Tensor
    layout: ContiguousLayout
    num_rows: int


def place_contiguous(
    topk_slots: torch.Tensor, *, num_slots: int, alignment: int, num_rows: int | None = None
) -> Places:
    """Give every token a row in each slot that it names; slots one after the other.

    topk_slots: contiguous int64 ``[T, K]``, 0 to S - 1, or -1 for none. A slot that a token names
    twice holds it once. num_rows: of the layout, when the caller knows how many there are.
    """
    num_tokens, num_topk = topk_slots.shape
    positions, counts = _rank_in_slot(topk_slots, num_slots)
    psum = torch.empty(num_slots, dtype=torch.int32, device=topk_slots.device)
    starts = torch.empty_like(psum)
    _starts[(1,)](
        counts, psum, starts, num_slots, alignment, SLOTS=triton.next_power_of_2(num_slots)
    )
    if topk_slots.numel():
        _add_starts[(triton.cdiv(topk_slots.numel(), BLOCK_COLS),)](
            topk_slots, starts, positions, topk_slots.numel(), BLOCK=BLOCK_COLS
        )
    if num_rows is None:
        most = num_tokens * min(num_topk, num_slots)
        num_rows = (most + min(most, num_slots) * (alignment - 1)) // alignment * alignment
    return Places(positions, ContiguousLayout(psum, alignment), num_rows)


def permute(x: torch.Tensor, places: Places, *, is_column_major: bool = False) -> torch.Tensor:
    """Copy each row of x ``[T, H]`` to its places in ``[M, H]``; other rows stay unset.

    Any dtype; scales are permuted by a second call. is_column_major: the result is one of
    ``moe_ep.fp8.new_columns``. Rows without a place are not read.
    """
    num_tokens, width = x.shape
    shape = (places.num_rows, width)
    if is_column_major:
        out = new_columns(shape, x.dtype, x.device)
    else:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    block = min(BLOCK_COLS, triton.next_power_of_2(width))
    if num_tokens:
        _permute[(num_tokens, triton.cdiv(width, block))](
            _as_bits(x),
            places.positions,
            _as_bits(out),
            width,
            x.stride(0),
            *out.stride(),
            NUM_TOPK=places.positions.shape[1],
            BLOCK=block,
        )
    return out


def unpermute(y: torch.Tensor, places: Places, topk_weights: torch.Tensor | None) -> torch.Tensor:
    """``[T, H]``: the sum over k of weight times y's row at the place of (token, k).

    y: contiguous, laid out as the permuted rows. topk_weights: float32 ``[T, K]``, read where there
    is a place; None: the experts have applied them, all are 1. Sums are float32 in the order of k,
    rounded once to y's dtype; a token without any place gives zeros.
    """
    num_tokens, num_topk = places.positions.shape
    width = y.shape[-1]
    out = torch.empty(num_tokens, width, dtype=y.dtype, device=y.device)
    block = min(BLOCK_COLS, triton.next_power_of_2(width))
    if num_tokens:
        _unpermute[(num_tokens, triton.cdiv(width, block))](
            y, places.positions, topk_weights, out, width, NUM_TOPK=num_topk, BLOCK=block
        )
    return out


def _rank_in_slot(topk_slots: torch.Tensor, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each choice's number among the rows of its slot ``[T, K]``, and rows per slot ``[S]``."""
    num_tokens, num_topk = topk_slots.shape
    ranks = torch.full(topk_slots.shape, NOWHERE, dtype=torch.int32, device=topk_slots.device)
    counts = torch.empty(num_slots, dtype=torch.int32, device=topk_slots.device)
    _rank_tokens[(num_slots,)](
        topk_slots,
        ranks,
        counts,
        num_tokens,
        num_topk,
        TOKENS=BLOCK_TOKENS,
        TOPK=triton.next_power_of_2(num_topk),
    )
    return ranks, counts


def _as_bits(rows: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: a copy must not look at values."""
    return rows.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[rows.element_size()])


@triton.jit
def _rank_tokens(
    topk_slots, ranks, counts, num_tokens, num_topk, TOKENS: tl.constexpr, TOPK: tl.constexpr
):
    slot = tl.program_id(0)
    k = tl.arange(0, TOPK)
    count = tl.zeros((), dtype=tl.int32)
    for first in range(0, num_tokens, TOKENS):
        token = first + tl.arange(0, TOKENS)
        at = token.to(tl.int64)[:, None] * num_topk + k[None, :]
        mask = (token < num_tokens)[:, None] & (k < num_topk)[None, :]
        is_slot = tl.load(topk_slots + at, mask=mask, other=-1) == slot
        is_row = tl.max(is_slot.to(tl.int32), axis=1)
        rank = count + tl.cumsum(is_row, 0) - is_row
        tl.store(ranks + at, tl.broadcast_to(rank[:, None], is_slot.shape), mask=is_slot)
        count += tl.sum(is_row)
    tl.store(counts + slot, count)


@triton.jit
def _starts(counts, psum, starts, num_slots, alignment, SLOTS: tl.constexpr):
    slot = tl.arange(0, SLOTS)
    mask = slot < num_slots
    count = tl.load(counts + slot, mask=mask, other=0)
    aligned = tl.cdiv(count, alignment) * alignment
    start = tl.cumsum(aligned, 0) - aligned
    tl.store(starts + slot, start, mask=mask)
    tl.store(psum + slot, start + count, mask=mask)


@triton.jit
def _add_starts(topk_slots, starts, positions, num_choices, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(topk_slots + at, mask=at < num_choices, other=-1)
    mask = slot >= 0
    start = tl.load(starts + slot, mask=mask, other=0)
    tl.store(positions + at, start + tl.load(positions + at, mask=mask, other=0), mask=mask)


@triton.jit
def _permute(
    x,
    positions,
    out,
    width,
    row_stride,
    out_row_stride,
    out_col_stride,
    NUM_TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    last = tl.full((), -1, dtype=tl.int32)
    for k in tl.static_range(NUM_TOPK):
        last = tl.maximum(last, tl.load(positions + token * NUM_TOPK + k))
    if last >= 0:
        row = tl.load(x + token * row_stride + col, mask=col < width, other=0)
        for k in tl.static_range(NUM_TOPK):
            position = tl.load(positions + token * NUM_TOPK + k).to(tl.int64)
            if position >= 0:
                at = out + position * out_row_stride + col * out_col_stride
                tl.store(at, row, mask=col < width)


@triton.jit
def _unpermute(y, positions, topk_weights, out, width, NUM_TOPK: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(NUM_TOPK):
        at = token * NUM_TOPK + k
        position = tl.load(positions + at).to(tl.int64)
        is_placed = position >= 0
        # Masks, not branches: the loads of all k then wait for memory together.
        mask = col < tl.where(is_placed, width, 0)
        row = tl.load(y + position * width + col, mask=mask, other=0.0)
        weighted = row.to(tl.float32)
        if topk_weights is not None:
            weighted *= tl.load(topk_weights + at, mask=is_placed, other=0.0)
        total += weighted
    tl.store(out + token * width + col, narrow(total, out.dtype.element_ty), mask=col < width)
