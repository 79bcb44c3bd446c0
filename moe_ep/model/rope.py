"""Rotary position embedding with YaRN, for both ways checkpoints lay out the rotary dimensions.

Shape letters: T tokens, N heads.

Interleaved checkpoints pair dimensions (0, 1), (2, 3), ...; half-split ones pair (i, i + dim / 2).
The result is half-split in both cases. Queries and cached keys pass through the same ``apply``, and
a dot product does not see the order of dimensions, so the layout stays private to this module.

YaRN (arXiv 2309.00071) stretches low frequencies by ``factor`` and leaves high ones alone. Of the
two forms of its temperature, the factor on cos and sin is applied here; the factor on the softmax
scale (DeepSeek's ``mscale_all_dim``) is part of the attention spec.
"""

import math

import torch

from moe_ep.config import YarnConfig


class RotaryEmbedding:
    """Tables of cos and sin for positions ``0 .. max_positions - 1``, and the rotation itself.

    dim: rotary dimensions of a head, even. theta: base of the frequencies. interleave: layout of
    the checkpoint's rotary dimensions. max_positions: longest sequence the engine may serve.
    """

    def __init__(
        self,
        *,
        dim: int,
        theta: float,
        interleave: bool,
        yarn: YarnConfig | None,
        max_positions: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if dim <= 0 or dim % 2:
            raise ValueError(f"rotary dim must be even and positive, got {dim}")
        self.dim = dim
        self.interleave = interleave
        scale = 1.0 if yarn is None else yarn.cos_sin_scale
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = positions[:, None] * _inverse_frequencies(dim, theta, yarn)
        self._cos = (angles.cos() * scale).to(device)  # [max_positions, dim / 2]
        self._sin = (angles.sin() * scale).to(device)

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 ``[T]``, each below ``max_positions`` -> two float32 ``[T, dim / 2]``.

        Once per step; every layer uses the same pair. Padding rows may carry any valid position.
        """
        return self._cos[positions], self._sin[positions]

    def apply(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x ``[T, N, dim]`` or ``[T, dim]``; returns a new tensor, half-split, x's dtype.

        The products are float32 whatever the dtype of x, rounded once.
        """
        if x.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        # A pair is a complex number: one pass for what is six in real ones.
        if self.interleave:
            pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        else:
            pairs = torch.complex(*x.float().chunk(2, dim=-1))
        turned = torch.view_as_real(pairs * torch.complex(cos, sin))  # [..., dim / 2, 2]
        return turned.mT.flatten(-2).to(x.dtype)


def _inverse_frequencies(dim: int, theta: float, yarn: YarnConfig | None) -> torch.Tensor:
    """float32 ``[dim / 2]``: radians per position of each pair."""
    periods = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if yarn is None:
        return 1.0 / periods
    kept = 1.0 - _ramp(dim, theta, yarn)
    return (1.0 / (yarn.factor * periods)) * (1.0 - kept) + (1.0 / periods) * kept


def _ramp(dim: int, theta: float, yarn: YarnConfig) -> torch.Tensor:
    """float32 ``[dim / 2]``: 0 where a frequency stays, 1 where it is stretched by the factor.

    A pair turns ``beta`` times within the original length at the dimension that
    ``pair_with_turns(beta)`` names; the ramp runs between those of beta_fast and beta_slow.
    """

    def pair_with_turns(turns: float) -> float:
        length = yarn.original_max_position_embeddings
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with_turns(yarn.beta_fast), pair_with_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step, without dividing by zero
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
