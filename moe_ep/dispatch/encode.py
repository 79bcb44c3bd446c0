"""Tokens as a backend sends them whose scales stay in the format that the experts want."""

import torch

from moe_ep.dispatch.base import DispatchSpec
from moe_ep.fp8 import FP8
from moe_ep.fp8_rows import quantize_rows


def encode(x: torch.Tensor, spec: DispatchSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Contiguous rows ``[T, H]`` in the payload dtype, and their row-major scales when FP8."""
    if spec.payload_dtype is FP8:
        return quantize_rows(x, scale_format=spec.scale_format)
    return x.to(spec.payload_dtype).contiguous(), None
