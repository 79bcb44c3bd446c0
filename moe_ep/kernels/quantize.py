"""1x128 quantisation of rows.

Not fused with the all-to-all's own copy: libraries that quantise on the way do not call this.
"""

import torch
import triton
import triton.language as tl

from moe_ep.fp8 import BLOCK, FP8, num_blocks
from moe_ep.kernels.common import e4m3_block

BLOCK_ROWS = 8  # 8 x 128 values on 128 threads: one 16-byte load of BF16 per thread


def new_scales(
    leading: tuple[int, ...], width: int, *, is_column_major: bool, device: torch.device
) -> torch.Tensor:
    """Uninitialised float32 scales ``[*leading, ceil(width / 128)]``.

    is_column_major: stride 1 over the last leading dimension (rows), whose length is rounded up to
    16 bytes, as TMA and DeepGEMM's SM90 kernels want it. Otherwise row-major.
    """
    *groups, rows = leading
    blocks = num_blocks(width)
    if not is_column_major:
        return torch.empty(*leading, blocks, dtype=torch.float32, device=device)
    aligned = -(-rows // 4) * 4
    return torch.empty(*groups, blocks, aligned, dtype=torch.float32, device=device).mT[
        ..., :rows, :
    ]


def scale_strides(scales: torch.Tensor) -> tuple[int, int, int]:
    """(group, row, block) strides of ``[M, blocks]`` or ``[S, C, blocks]`` scales."""
    group = scales.stride(0) if scales.dim() == 3 else 0
    return group, scales.stride(-2), scales.stride(-1)


def quantize_rows(
    x: torch.Tensor, *, is_column_major: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``moe_ep.fp8.quantize_rows``, to the bit, for ``[T, H]`` or ``[S, C, H]``.

    Returns contiguous e4m3 and the scales of ``new_scales``.
    """
    width = x.shape[-1]
    rows = x.reshape(-1, width).contiguous()
    q = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = new_scales(
        tuple(x.shape[:-1]), width, is_column_major=is_column_major, device=x.device
    )
    grid = (triton.cdiv(len(rows), BLOCK_ROWS), num_blocks(width))
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
        )
    return q, scales


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
):
    block = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = block * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    mask = is_row[:, None] & (col < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + col[None, :]
    values, scale = e4m3_block(tl.load(x + at, mask=mask, other=0.0).to(tl.float32))
    tl.store(q + at, values, mask=mask)
    group = (row // group_rows).to(tl.int64)
    scale_at = group * scale_group_stride + (row % group_rows).to(tl.int64) * scale_row_stride
    tl.store(scales + scale_at + block * scale_block_stride, scale, mask=is_row)
