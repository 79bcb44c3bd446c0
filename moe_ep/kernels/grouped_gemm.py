"""Grouped matrix products: the rows of each slot times the slot's weight, in either layout.

One kernel for all operand types. Programs share out the tiles of all slots among themselves, from
counts that they read on the device: no host sync, no program for rows that nobody has.

Per 128 values of K the product of an FP8 operand starts from zero and is added, scaled, to a
float32 sum: scales change there, and the tensor cores of Hopper keep fewer bits than float32 while
they add up FP8 products.

Shape letters: S slots, M rows (C per slot when masked), N outputs, K inputs.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from moe_ep.dispatch.base import ContiguousLayout, MaskedLayout
from moe_ep.fp8 import BLOCK, FP8
from moe_ep.kernels.common import configs, dot, narrow, num_programs, tuned_for
from moe_ep.kernels.quantize import scale_strides

PROGRAMS_PER_SM = 2  # a program of the larger configs fills half of an SM's shared memory
BF16_BLOCK_K = 64  # 128 bytes of a row, as 128 values of FP8


def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    layout: ContiguousLayout | MaskedLayout,
    a_scales: torch.Tensor | None = None,
    b_scales: torch.Tensor | None = None,
    expected_rows: int | None = None,
) -> torch.Tensor:
    """``a[row] @ b[slot].T`` for every row of the layout; BF16, laid out as the rows.

    a: contiguous ``[M, K]`` or ``[S, C, K]``, BF16, or e4m3 with a_scales float32
        ``[..., ceil(K / 128)]`` of any strides.
    b: contiguous ``[S, N, K]``, BF16, or e4m3 with b_scales float32, contiguous
        ``[S, ceil(N / 128), ceil(K / 128)]``.
    expected_rows: that a slot has on average, where the room for them says nothing; for tuning.
    Rows outside the layout are not read and not written. Raises ValueError for FP8 without scales.
    """
    for name, operand, scales in (("a", a, a_scales), ("b", b, b_scales)):
        if (operand.dtype is FP8) != (scales is not None):
            raise ValueError(f"{name} is {operand.dtype}; FP8, and nothing else, comes with scales")
    num_slots, width, depth = b.shape
    is_masked = isinstance(layout, MaskedLayout)
    is_scaled = a_scales is not None or b_scales is not None
    block_k = BLOCK if is_scaled else BF16_BLOCK_K
    room = a.shape[1] if is_masked else len(a) // num_slots
    out = torch.empty(*a.shape[:-1], width, dtype=torch.bfloat16, device=a.device)
    if not out.numel():
        return out  # no tiles to be tuned on
    _grouped_gemm[(num_programs(a.device, PROGRAMS_PER_SM),)](
        a,
        a_scales,
        b,
        b_scales,
        out,
        layout.counts if isinstance(layout, MaskedLayout) else layout.psum,
        num_slots,
        a.shape[1] if is_masked else 0,
        1 if isinstance(layout, MaskedLayout) else layout.alignment,
        width,
        depth,
        tuned_for(room if expected_rows is None else expected_rows),
        *((0, 0, 0) if a_scales is None else scale_strides(a_scales)),
        IS_MASKED=is_masked,
        SLOTS=triton.next_power_of_2(num_slots),
        BLOCK_K=block_k,
        IS_EVEN_K=depth % block_k == 0,
    )
    return out


def _gpu_configs() -> list[triton.Config]:
    tiles: Sequence[tuple[int, int, int, int]] = (
        (16, 128, 4, 4),
        (32, 128, 4, 4),
        (64, 64, 4, 4),
        (64, 128, 4, 3),
        (64, 128, 4, 4),
        (128, 64, 4, 3),
        (128, 128, 8, 3),
    )
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
        for m, n, warps, stages in tiles
    ]


@triton.jit
def _slot_rows(
    layout, num_slots, capacity, alignment, SLOTS: tl.constexpr, IS_MASKED: tl.constexpr
):
    """First row and number of rows of every slot; two int32 ``[SLOTS]``."""
    slot = tl.arange(0, SLOTS)
    last = tl.load(layout + slot, mask=slot < num_slots, other=0)
    start, count = slot * capacity, last
    if not IS_MASKED:
        is_after = (slot > 0) & (slot < num_slots)
        before = tl.load(layout + slot - 1, mask=is_after, other=0)
        start = tl.cdiv(before, alignment) * alignment
        count = tl.where(slot < num_slots, last - start, 0)
    return start, count


@triton.autotune(
    configs=configs(_gpu_configs(), {"BLOCK_M": 16, "BLOCK_N": 128}),
    key=["width", "depth", "tuned_rows", "IS_MASKED"],
)
@triton.jit
def _grouped_gemm(
    a,
    a_scales,
    b,
    b_scales,
    out,
    layout,
    num_slots,
    capacity,
    alignment,
    width,
    depth,
    tuned_rows,
    scale_group_stride,
    scale_row_stride,
    scale_block_stride,
    IS_MASKED: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tl.static_assert(128 % BLOCK_N == 0, "a tile must lie in one block of weight scales")
    starts, counts = _slot_rows(layout, num_slots, capacity, alignment, SLOTS, IS_MASKED)
    row_tiles = tl.cdiv(counts, BLOCK_M)
    num_cols = tl.cdiv(width, BLOCK_N)
    ends = tl.cumsum(row_tiles, 0) * num_cols
    for tile in range(tl.program_id(0), tl.sum(row_tiles) * num_cols, tl.num_programs(0)):
        # 1. Which slot, and where in it. Row tiles of one column are neighbours: they share b.
        slot = tl.sum((ends <= tile).to(tl.int32))
        is_slot = tl.arange(0, SLOTS) == slot
        slot_tiles = tl.sum(tl.where(is_slot, row_tiles, 0))
        first = tl.sum(tl.where(is_slot, ends, 0)) - slot_tiles * num_cols
        local = (tile - first) % slot_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        col_tile = (tile - first) // slot_tiles
        is_row = local < tl.sum(tl.where(is_slot, counts, 0))
        row = tl.sum(tl.where(is_slot, starts, 0)).to(tl.int64) + local
        # 2. Sum over K.
        col = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_col = col < width
        k = tl.arange(0, BLOCK_K)
        a_at = a + row[:, None] * depth + k[None, :]
        b_at = b + (slot.to(tl.int64) * width + col)[None, :] * depth + k[:, None]
        if a_scales is not None:
            if IS_MASKED:
                a_scale_at = slot.to(tl.int64) * scale_group_stride + local * scale_row_stride
            else:
                a_scale_at = row * scale_row_stride
        if b_scales is not None:
            scale_cols = tl.cdiv(depth, BLOCK_K)
            scale_row = slot * tl.cdiv(width, 128) + col_tile * BLOCK_N // 128
            b_scale_at = b_scales + scale_row * scale_cols
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(tl.cdiv(depth, BLOCK_K)):
            if IS_EVEN_K:
                a_tile = tl.load(a_at, mask=is_row[:, None], other=0.0)
                b_tile = tl.load(b_at, mask=is_col[None, :], other=0.0)
            else:
                is_k = k < depth - step * BLOCK_K
                a_tile = tl.load(a_at, mask=is_row[:, None] & is_k[None, :], other=0.0)
                b_tile = tl.load(b_at, mask=is_col[None, :] & is_k[:, None], other=0.0)
            if a_scales is None and b_scales is None:
                acc = dot(a_tile, b_tile, acc)
            else:
                part = dot(a_tile, b_tile, tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32))
                if b_scales is not None:
                    part *= tl.load(b_scale_at + step)
                if a_scales is not None:
                    at = a_scales + a_scale_at + step * scale_block_stride
                    part *= tl.load(at, mask=is_row, other=0.0)[:, None]
                acc += part
            a_at += BLOCK_K
            b_at += BLOCK_K
        out_at = out + row[:, None] * width + col[None, :]
        tl.store(out_at, narrow(acc, out.dtype.element_ty), mask=is_row[:, None] & is_col[None, :])
