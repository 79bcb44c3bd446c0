"""Norm, rotation and the write into the paged cache of new latents, and the rotation of their
queries, as one Triton kernel.

Imports triton, so it is imported where it is used, inside functions.

Shape letters: T tokens, C kv_lora_rank.
"""

import torch
import triton
import triton.language as tl

from attention.triton_kernels import narrow

BLOCK_HEADS = 32


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
    q_rope: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate new latents, store them in one layer's cache, and return them.

    raw: ``[T, C + rope]``, as projected. norm_weight: ``[C]``, in the dtype of raw. cos, sin:
    float32 ``[T, rope / 2]``. is_interleaved: pairs are (0, 1), (2, 3), ... in raw, else
    (i, i + rope / 2); they are stored half-split. slot_mapping: int64 ``[T]``; tokens at -1 are
    padding: not read, not stored, and unset in the result. cache: ``[blocks, 64, 1, C + rope]``.
    q_rope: ``[T, N, rope]`` in the dtype of raw, contiguous along the last dimension; rotated in
    place. Roundings are those of the norm (normalised, rounded, times weight) and of the rotary
    embedding (float32, rounded once).
    """
    latent = torch.empty(raw.shape, dtype=raw.dtype, device=raw.device)
    rank, half = len(norm_weight), cos.shape[1]
    num_heads = 0 if q_rope is None else q_rope.shape[1]
    if len(raw):
        _write_latent[(len(raw), 1 + triton.cdiv(num_heads, BLOCK_HEADS))](
            raw,
            norm_weight,
            cos.contiguous(),
            sin.contiguous(),
            slot_mapping,
            cache,
            latent,
            q_rope,
            raw.stride(0),
            *((0, 0) if q_rope is None else q_rope.stride()[:2]),
            num_heads,
            norm_eps,
            RANK=rank,
            HALF=half,
            BLOCK_RANK=triton.next_power_of_2(rank),
            BLOCK_HALF=triton.next_power_of_2(half),
            HEADS=BLOCK_HEADS,
            IS_INTERLEAVED=is_interleaved,
        )
    return latent


@triton.jit
def _rotated(at, mask, c, s, HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """The two halves of rotated rows, rounded. at: the address of each pair's first value."""
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + (1 if IS_INTERLEAVED else HALF), mask=mask, other=0.0).to(tl.float32)
    dtype = at.dtype.element_ty
    return narrow(first * c - second * s, dtype), narrow(second * c + first * s, dtype)


@triton.jit
def _write_latent(
    raw,
    norm_weight,
    cos,
    sin,
    slot_mapping,
    cache,
    latent,
    q_rope,
    raw_stride,
    q_token_stride,
    q_head_stride,
    num_heads,
    eps,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    LATENT: tl.constexpr = RANK + 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    pair = tl.arange(0, BLOCK_HALF)
    is_pair = pair < HALF
    first = 2 * pair if IS_INTERLEAVED else pair
    c = tl.load(cos + token * HALF + pair, mask=is_pair, other=0.0)
    s = tl.load(sin + token * HALF + pair, mask=is_pair, other=0.0)
    if tl.program_id(1) == 0:
        # 1. The compressed part of the latent: root-mean-square norm.
        dtype = raw.dtype.element_ty
        source = raw + token * raw_stride
        col = tl.arange(0, BLOCK_RANK)
        is_col = col < RANK
        x = tl.load(source + col, mask=is_col, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x) / RANK + eps)
        normed = narrow(x * inverse, dtype).to(tl.float32)
        weight = tl.load(norm_weight + col, mask=is_col, other=0.0).to(tl.float32)
        compressed = narrow(weight * normed, dtype)
        # 2. Its key part: rotation.
        low, high = _rotated(source + RANK + first, is_pair, c, s, HALF, IS_INTERLEAVED)
        stored, kept = cache + slot * LATENT, latent + token * LATENT
        tl.store(stored + col, compressed, mask=is_col)
        tl.store(kept + col, compressed, mask=is_col)
        tl.store(stored + RANK + pair, low, mask=is_pair)
        tl.store(stored + RANK + HALF + pair, high, mask=is_pair)
        tl.store(kept + RANK + pair, low, mask=is_pair)
        tl.store(kept + RANK + HALF + pair, high, mask=is_pair)
    elif q_rope is not None:
        # 3. Some heads' queries, which go back to where they came from.
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        rows = q_rope + token * q_token_stride + head.to(tl.int64)[:, None] * q_head_stride
        mask = (head < num_heads)[:, None] & is_pair[None, :]
        at = rows + first[None, :]
        q_low, q_high = _rotated(at, mask, c[None, :], s[None, :], HALF, IS_INTERLEAVED)
        tl.debug_barrier()  # all have read before any writes
        tl.store(rows + pair[None, :], q_low, mask=mask)
        tl.store(rows + HALF + pair[None, :], q_high, mask=mask)
