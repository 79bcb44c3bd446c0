"""What tests of Triton kernels share: where they run, and exact values of quantised tensors."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")


def to_device(value: Any) -> Any:
    """A tensor, or a dataclass with all its tensors, on the device of the kernels."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if is_dataclass(value) and not isinstance(value, type):
        moved = {field.name: to_device(getattr(value, field.name)) for field in fields(value)}
        return replace(value, **moved)
    return value


def restored(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 ``[.., H]``: exactly what e4m3 values and their 1x128 scales are worth."""
    return q.float().double() * scales.double().repeat_interleave(128, -1)[..., : q.shape[-1]]


def restored_weight(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """float64 ``[N, K]``: exactly what a weight and its 128x128 scales are worth."""
    if scale is None:
        return weight.double()
    rows = scale.repeat_interleave(128, 0)[: len(weight)]
    return restored(weight, rows)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
