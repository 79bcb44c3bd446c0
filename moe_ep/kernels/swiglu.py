"""SwiGLU between the two grouped products: activation, row weight and 1x128 quantisation in one.

Rows that the layout does not cover are skipped, except those in the gaps between the slots of a
contiguous layout: skipping them would cost a search for the slot, computing them harms nobody.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moe_ep.dispatch.base import ContiguousLayout, MaskedLayout
from moe_ep.fp8 import BLOCK, FP8, ScaleFormat, new_scales
from moe_ep.kernels.common import e4m3_block, narrow, num_programs, store_scale
from moe_ep.kernels.quantize import num_visited_blocks, scale_strides

BLOCK_ROWS = 8
PROGRAMS_PER_SM = 16  # of 128 threads: all that an SM holds


class Hidden(NamedTuple):
    """values: ``[..., I]`` in BF16, or e4m3 with scales as ``moe_ep.fp8.new_scales`` makes them."""

    values: torch.Tensor
    scales: torch.Tensor | None


def swiglu(
    gate_up: torch.Tensor,
    *,
    layout: ContiguousLayout | MaskedLayout,
    intermediate: int,
    row_weights: torch.Tensor | None,
    quantizes: bool,
    scale_format: ScaleFormat = ScaleFormat.FLOAT32,
    is_column_major: bool = False,
) -> Hidden:
    """``silu(gate) * up * row_weight`` in float32, rounded once, for every row of the layout.

    gate_up: contiguous ``[M, 2P]`` or ``[S, C, 2P]`` with P >= intermediate: gate in the first
        ``intermediate`` columns, up in as many from column P; other columns are not read.
    row_weights: float32, one per row.
    quantizes: e4m3 with scales, else the dtype of gate_up. scale_format, is_column_major: see
        ``moe_ep.fp8.new_scales``.
    """
    *leading, double = gate_up.shape
    device = gate_up.device
    values = torch.empty(
        *leading, intermediate, dtype=FP8 if quantizes else gate_up.dtype, device=device
    )
    scales = None
    if quantizes:
        scales = new_scales(
            tuple(leading),
            intermediate,
            scale_format=scale_format,
            is_column_major=is_column_major,
            device=device,
        )
    if isinstance(layout, MaskedLayout):
        counts, groups, group_rows = layout.counts, leading[0], leading[1]
    else:
        counts, groups, group_rows = layout.psum[-1:], 1, leading[0]
    blocks = num_visited_blocks(intermediate, scale_format)
    sharing = triton.cdiv(num_programs(device, PROGRAMS_PER_SM), groups * blocks)
    grid = (blocks, groups, max(1, min(sharing, triton.cdiv(group_rows, BLOCK_ROWS))))
    _swiglu[grid](
        gate_up,
        row_weights,
        values,
        scales,
        counts,
        group_rows,
        intermediate,
        double // 2,
        *((0, 0, 0) if scales is None else scale_strides(scales)),
        ROWS=BLOCK_ROWS,
        BLOCK=BLOCK,
        IS_UE8M0=scale_format is ScaleFormat.UE8M0,
    )
    return Hidden(values, scales)


@triton.jit
def _swiglu(
    gate_up,
    row_weights,
    values,
    scales,
    counts,
    group_rows,
    intermediate,
    half,
    scale_group_stride,
    scale_row_stride,
    scale_block_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_UE8M0: tl.constexpr,
):
    block, group = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + group)
    col = block * BLOCK + tl.arange(0, BLOCK)
    for tile in range(tl.program_id(2), tl.cdiv(count, ROWS), tl.num_programs(2)):
        local = tile * ROWS + tl.arange(0, ROWS)
        is_row = local < count
        row = group.to(tl.int64) * group_rows + local
        mask = is_row[:, None] & (col < intermediate)[None, :]
        source = gate_up + row[:, None] * (2 * half) + col[None, :]
        gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
        hidden = gate / (1.0 + tl.exp(-gate)) * up
        if row_weights is not None:
            hidden *= tl.load(row_weights + row, mask=is_row, other=0.0)[:, None]
        target = values + row[:, None] * intermediate + col[None, :]
        if scales is not None:
            quantized, scale = e4m3_block(hidden, IS_UE8M0)
            tl.store(target, quantized, mask=mask)
            at = group.to(tl.int64) * scale_group_stride + local.to(tl.int64) * scale_row_stride
            blocks = tl.cdiv(intermediate, BLOCK)
            store_scale(scales, at, block, scale_block_stride, blocks, scale, is_row, IS_UE8M0)
        else:
            tl.store(target, narrow(hidden, values.dtype.element_ty), mask=mask)
