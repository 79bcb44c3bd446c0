"""1x128 quantisation of rows.

Not fused with the all-to-all's own copy: libraries that quantise on the way do not call this.
"""

import torch
import triton
import triton.language as tl

from moe_ep.fp8 import BLOCK, FP8, ScaleFormat, new_scales, num_blocks
from moe_ep.kernels.common import e4m3_block, store_scale

BLOCK_ROWS = 8  # 8 x 128 values on 128 threads: one 16-byte load of BF16 per thread


def scale_strides(scales: torch.Tensor) -> tuple[int, int, int]:
    """(group, row, column) strides of ``[M, columns]`` or ``[S, C, columns]`` scales."""
    group = scales.stride(0) if scales.dim() == 3 else 0
    return group, scales.stride(-2), scales.stride(-1)


def quantize_rows(
    x: torch.Tensor,
    *,
    scale_format: ScaleFormat = ScaleFormat.FLOAT32,
    is_column_major: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``moe_ep.fp8.quantize_rows``, to the bit, for ``[T, H]`` or ``[S, C, H]``.

    Returns contiguous e4m3 and the scales of ``moe_ep.fp8.new_scales``.
    """
    width = x.shape[-1]
    rows = x.reshape(-1, width).contiguous()
    q = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = new_scales(
        tuple(x.shape[:-1]),
        width,
        scale_format=scale_format,
        is_column_major=is_column_major,
        device=x.device,
    )
    grid = (triton.cdiv(len(rows), BLOCK_ROWS), num_visited_blocks(width, scale_format))
    if len(rows):
        _quantize[grid](
            rows,
            q,
            scales,
            len(rows),
            width,
            x.shape[-2],
            *scale_strides(scales),
            ROWS=BLOCK_ROWS,
            BLOCK=BLOCK,
            IS_UE8M0=scale_format is ScaleFormat.UE8M0,
        )
    return q, scales


def num_visited_blocks(width: int, scale_format: ScaleFormat) -> int:
    """Blocks of a row that programs visit: see ``store_scale``."""
    blocks = num_blocks(width)
    return -(-blocks // 4) * 4 if scale_format is ScaleFormat.UE8M0 else blocks


@triton.jit
def _quantize(
    x,
    q,
    scales,
    num_rows,
    width,
    group_rows,
    scale_group_stride,
    scale_row_stride,
    scale_block_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_UE8M0: tl.constexpr,
):
    block = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = block * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    mask = is_row[:, None] & (col < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + col[None, :]
    values, scale = e4m3_block(tl.load(x + at, mask=mask, other=0.0).to(tl.float32), IS_UE8M0)
    tl.store(q + at, values, mask=mask)
    group = (row // group_rows).to(tl.int64)
    scale_at = group * scale_group_stride + (row % group_rows).to(tl.int64) * scale_row_stride
    blocks = tl.cdiv(width, BLOCK)
    store_scale(scales, scale_at, block, scale_block_stride, blocks, scale, is_row, IS_UE8M0)
