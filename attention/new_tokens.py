"""New tokens enter attention: queries and keys are rotated to their positions, latents are stored.

On a GPU one Triton kernel does all of it; elsewhere torch does. Which one is decided here alone.

Shape letters: T tokens, N heads, C kv_lora_rank.
"""

import importlib.util
from functools import cache as cached
from typing import Protocol

import torch

from attention.latent_cache import LatentCache


class Norm(Protocol):
    """Root-mean-square norm: normalised in float32, rounded, times ``weight [C]``."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Rotation(Protocol):
    """Rotary embedding of ``[T, N, rope]``. interleave: pairs are (0, 1), (2, 3), ..., else
    (i, i + rope / 2); the result is half-split."""

    interleave: bool

    def apply(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor: ...


@cached
def uses_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def enter_tokens(
    q_rope: torch.Tensor,
    raw: torch.Tensor,
    *,
    norm: Norm,
    rope: Rotation,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: LatentCache,
    layer_idx: int,
) -> None:
    """Rotate the queries in place, norm and rotate the latents and store them in the cache.

    q_rope: ``[T, N, rope]``, of any strides. raw: ``[T, C + rope]``, as projected. cos, sin:
    float32 ``[T, rope / 2]``. slot_mapping: int64 ``[T]``; -1 is padding: may hold NaN, is not
    stored where anyone reads.
    """
    if uses_kernel(raw.device):
        from attention.triton_latent import write_latent

        write_latent(
            raw,
            q_rope=q_rope,
            norm_weight=norm.weight,
            norm_eps=norm.eps,
            cos=cos,
            sin=sin,
            is_interleaved=rope.interleave,
            slot_mapping=slot_mapping,
            cache=cache.layer(layer_idx),
        )
        return
    compressed, key = raw.split([raw.shape[1] - 2 * cos.shape[1], 2 * cos.shape[1]], dim=-1)
    # The key that all heads share turns like the queries: one call for both.
    rotated = rope.apply(torch.cat([q_rope, key.unsqueeze(1)], dim=1), cos, sin)
    q_rope.copy_(rotated[:, :-1])
    latent = torch.cat([norm(compressed), rotated[:, -1]], dim=-1)
    cache.write(layer_idx, slot_mapping, latent)
