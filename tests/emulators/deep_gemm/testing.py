"""``deep_gemm.testing``: the library's own measure of difference."""

import torch


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | float:
    """1 - 2 * sum(xy) / sum(xx + yy): neither shifted nor clamped near zero."""
    x, y = x.double(), y.double()
    denominator = (x * x + y * y).sum()
    if denominator == 0:
        return 0.0
    return 1 - 2 * (x * y).sum() / denominator
