"""Rows in FP8 as exchanges send and products read them: by the Triton kernel where it runs, else by
torch, with the same bits.

Shape letters: H hidden.
"""

import torch

from moe_ep import fp8, kernels
from moe_ep.fp8 import ScaleFormat


def quantize_rows(
    x: torch.Tensor,
    *,
    scale_format: ScaleFormat = ScaleFormat.FLOAT32,
    is_column_major: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x ``[T, H]`` or ``[S, C, H]``, BF16 or float32 -> contiguous e4m3, and its 1x128 scales.

    is_column_major: the scales are ``moe_ep.fp8.new_columns``, else row-major.
    """
    if kernels.are_used(x.device):
        from moe_ep.kernels import quantize

        return quantize.quantize_rows(x, scale_format=scale_format, is_column_major=is_column_major)
    is_ue8m0 = scale_format is ScaleFormat.UE8M0
    q, scales = fp8.quantize_rows(x, use_ue8m0=is_ue8m0)
    if is_ue8m0:
        scales = fp8.pack_exponents(scales)
    return q, fp8.to_columns(scales) if is_column_major else scales
