"""Root-mean-square norm."""

import torch


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
        # One pass that widens as it reads: a float32 copy of a prefill would fall out of the cache.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        inverse = torch.rsqrt(length.square_().div_(x.shape[-1]).add_(self.eps))
        return (x * inverse).to(x.dtype).mul_(self.weight)
