"""Norm, rotation and the write into the paged cache of new latents, as one Triton kernel.

Imports triton, so it is imported where it is used, inside functions.

Shape letters: T tokens, C kv_lora_rank.
"""

import torch
import triton
import triton.language as tl

from attention.triton_kernels import narrow


def write_latent(
    raw: torch.Tensor,
    *,
    norm_weight: torch.Tensor,
    norm_eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    is_interleaved: bool,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
) -> torch.Tensor:
    """Norm and rotate new latents, store them in one layer's cache, and return them.

    raw: ``[T, C + rope]``, as projected. norm_weight: ``[C]``, in the dtype of raw. cos, sin:
    float32 ``[T, rope / 2]``. is_interleaved: pairs are (0, 1), (2, 3), ... in raw, else
    (i, i + rope / 2); they are stored half-split. slot_mapping: int64 ``[T]``; tokens at -1 are
    padding: not read, not stored, and unset in the result. cache: ``[blocks, 64, 1, C + rope]``.
    Roundings are those of the norm (normalised, rounded, times weight) and of the rotary embedding
    (float32, rounded once).
    """
    latent = torch.empty(raw.shape, dtype=raw.dtype, device=raw.device)
    rank, half = len(norm_weight), cos.shape[1]
    if len(raw):
        _write_latent[(len(raw),)](
            raw,
            norm_weight,
            cos.contiguous(),
            sin.contiguous(),
            slot_mapping,
            cache,
            latent,
            raw.stride(0),
            norm_eps,
            RANK=rank,
            HALF=half,
            BLOCK_RANK=triton.next_power_of_2(rank),
            BLOCK_HALF=triton.next_power_of_2(half),
            IS_INTERLEAVED=is_interleaved,
        )
    return latent


@triton.jit
def _write_latent(
    raw,
    norm_weight,
    cos,
    sin,
    slot_mapping,
    cache,
    latent,
    raw_stride,
    eps,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    LATENT: tl.constexpr = RANK + 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    dtype = raw.dtype.element_ty
    # 1. The compressed part: root-mean-square norm.
    col = tl.arange(0, BLOCK_RANK)
    is_col = col < RANK
    x = tl.load(raw + token * raw_stride + col, mask=is_col, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x) / RANK + eps)
    normed = narrow(x * inverse, dtype).to(tl.float32)
    weight = tl.load(norm_weight + col, mask=is_col, other=0.0).to(tl.float32)
    compressed = narrow(weight * normed, dtype)
    tl.store(cache + slot * LATENT + col, compressed, mask=is_col)
    tl.store(latent + token * LATENT + col, compressed, mask=is_col)
    # 2. The key part: rotation.
    pair = tl.arange(0, BLOCK_HALF)
    is_pair = pair < HALF
    first_at = raw + token * raw_stride + RANK + (2 * pair if IS_INTERLEAVED else pair)
    first = tl.load(first_at, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(first_at + (1 if IS_INTERLEAVED else HALF), mask=is_pair, other=0.0).to(
        tl.float32
    )
    c = tl.load(cos + token * HALF + pair, mask=is_pair, other=0.0)
    s = tl.load(sin + token * HALF + pair, mask=is_pair, other=0.0)
    low, high = narrow(first * c - second * s, dtype), narrow(second * c + first * s, dtype)
    stored, kept = cache + slot * LATENT + RANK, latent + token * LATENT + RANK
    tl.store(stored + pair, low, mask=is_pair)
    tl.store(stored + HALF + pair, high, mask=is_pair)
    tl.store(kept + pair, low, mask=is_pair)
    tl.store(kept + HALF + pair, high, mask=is_pair)
