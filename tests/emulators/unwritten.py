"""Memory that nobody has written: values that show when they are used."""

import torch

GARBAGE = -0x5EADBEE  # what an integer holds
FP8 = torch.float8_e4m3fn
FP8_NAN = 0x7F


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with values that show when they are used: NaN, or an absurd integer."""
    if tensor.dtype == FP8:
        tensor.view(torch.uint8).fill_(FP8_NAN)
    elif tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        limits = torch.iinfo(tensor.dtype)
        tensor.fill_(GARBAGE if limits.min <= GARBAGE else limits.max)
    return tensor


def unwritten(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return poison(torch.empty(shape, dtype=dtype))
