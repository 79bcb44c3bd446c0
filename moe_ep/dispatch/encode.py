"""Tokens as they travel to the experts."""

import torch

from moe_ep.fp8 import FP8, ScaleFormat
from moe_ep.fp8_rows import quantize_rows


def encode_rows(
    x: torch.Tensor,
    payload_dtype: torch.dtype,
    scale_format: ScaleFormat = ScaleFormat.FLOAT32,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Contiguous rows ``[T, H]`` in the payload dtype, and their row-major scales when FP8."""
    if payload_dtype is FP8:
        return quantize_rows(x, scale_format=scale_format)
    return x.to(payload_dtype).contiguous(), None
