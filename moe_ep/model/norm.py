"""Root-mean-square norm."""

import torch
import torch.nn.functional as F


class RMSNorm:
    """``weight * x / sqrt(mean(x ** 2) + eps)`` over the last dimension.

    Statistics are float32; the normalised value is rounded to the input dtype before it is
    multiplied by the weight, the order that the reference implementation of these models has.

    weight: ``[dim]``, in the dtype of the inputs.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x ``[..., dim]`` -> a new tensor of the same shape and dtype."""
        return F.rms_norm(x, x.shape[-1:], eps=self.eps).mul_(self.weight)
