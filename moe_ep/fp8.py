"""Block-scaled FP8: activations in 1x128 row blocks, weights in 128x128 blocks.

Every conversion between FP8 and wider types in the engine goes through this module, so that the
CPU and the GPU backends see the same bits. The convention is DeepGEMM's: e4m3 values with
``value = fp8 * scale`` and ``scale = max(amax, 1e-4) / 448`` in float32, one scale per block; the
last block of a dimension may be short. The module knows nothing of layouts: a scale tensor is
always row-major, and a backend that wants another order re-orders it.

NaN is data, not an error: a block that holds NaN or infinity restores to NaN or infinity somewhere
in that block and in no other, so padding rows may hold anything.
"""

from functools import cache

import torch
import torch.nn.functional as F

BLOCK = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest finite e4m3 value
MIN_AMAX = 1e-4  # keeps the scale of an all-zero block away from zero

_WIDE = (torch.bfloat16, torch.float16, torch.float32)


def num_blocks(size: int) -> int:
    """How many 128-wide blocks cover ``size`` elements; the last one may be short."""
    return -(-size // BLOCK)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row in blocks of 128 along the last dimension.

    x: ``[..., H]`` BF16, FP16 or float32; may be non-contiguous; not modified.
    Returns new contiguous tensors: e4m3 ``[..., H]`` and float32 scales ``[..., ceil(H / 128)]``.
    A row's result depends on that row alone.
    Raises ValueError for another dtype or a tensor without dimensions.
    """
    _check_wide("x", x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension [..., H], got a scalar")
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    blocks = _pad_to_blocks(rows).unflatten(1, (num_blocks(width), BLOCK))
    # abs is exact in every dtype, so the maximum is taken before widening to float32
    scales = blocks.abs().amax(dim=2).float().clamp_min_(MIN_AMAX).div_(FP8_MAX)
    q = (blocks / scales.unsqueeze(2)).to(FP8).flatten(1)[:, :width]
    return q.reshape(x.shape), scales.reshape(*x.shape[:-1], scales.shape[1])


def dequantize_rows(q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Restore what ``quantize_rows`` made: ``q * scale`` in float32, rounded once to ``dtype``.

    q: e4m3 ``[..., H]``; scales: float32 ``[..., ceil(H / 128)]``.
    Returns a new contiguous ``[..., H]`` tensor. Raises ValueError when shapes or dtypes differ
    from this.
    """
    _check_fp8("q", q)
    if q.dim() == 0:
        raise ValueError("q must have at least one dimension [..., H], got a scalar")
    width = q.shape[-1]
    _check_scales("q", q, scales, (*q.shape[:-1], num_blocks(width)))
    rows = _pad_to_blocks(_to_float32(q.reshape(-1, width)))
    blocks = rows.unflatten(1, (num_blocks(width), BLOCK))
    restored = blocks.mul_(scales.reshape(*blocks.shape[:2], 1)).flatten(1)[:, :width]
    return restored.to(dtype).reshape(q.shape)


def quantize_blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight matrix in 128x128 blocks.

    w: ``[N, K]`` BF16, FP16 or float32; not modified.
    Returns e4m3 ``[N, K]`` and float32 scales ``[ceil(N / 128), ceil(K / 128)]``.
    Raises ValueError for another dtype or another number of dimensions.
    """
    _check_wide("w", w)
    _check_matrix("w", w)
    num_rows, num_cols = w.shape
    padded = F.pad(w.float(), (0, -num_cols % BLOCK, 0, -num_rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [N/128, 128, K/128, 128]
    scales = blocks.abs().amax(dim=(1, 3)).clamp_min_(MIN_AMAX).div_(FP8_MAX)
    q = (blocks / scales[:, None, :, None]).to(FP8).reshape(padded.shape)
    return q[:num_rows, :num_cols].contiguous(), scales


def dequantize_blocks(w: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Restore a block-quantised weight: ``w * scale`` in float32, rounded once to ``dtype``.

    w: e4m3 ``[N, K]``; scale: float32 ``[ceil(N / 128), ceil(K / 128)]``.
    Returns a new contiguous ``[N, K]`` tensor. Raises ValueError when shapes or dtypes differ
    from this.
    """
    _check_fp8("w", w)
    _check_matrix("w", w)
    num_rows, num_cols = w.shape
    _check_scales("w", w, scale, (num_blocks(num_rows), num_blocks(num_cols)))
    restored = torch.empty(w.shape, dtype=dtype)
    for block, first in enumerate(range(0, num_rows, BLOCK)):
        strip = _to_float32(w[first : first + BLOCK])  # one strip of rows at a time stays in cache
        strip *= scale[block].repeat_interleave(BLOCK)[:num_cols]
        restored[first : first + BLOCK] = strip
    return restored


@cache
def _fp8_values() -> torch.Tensor:
    """The float32 value of each of the 256 bit patterns."""
    return torch.arange(256, dtype=torch.uint8).view(FP8).float()


def _to_float32(q: torch.Tensor) -> torch.Tensor:
    # A table look-up: PyTorch's own cast from FP8 takes five times as long on a CPU.
    if q.device.type != "cpu":
        return q.float()
    codes = q.contiguous().view(torch.uint8).flatten().int()
    return _fp8_values().index_select(0, codes).view(q.shape)


def _pad_to_blocks(rows: torch.Tensor) -> torch.Tensor:
    missing = -rows.shape[1] % BLOCK
    return F.pad(rows, (0, missing)) if missing else rows


def _check_wide(name: str, x: torch.Tensor) -> None:
    if x.dtype not in _WIDE:
        raise ValueError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")


def _check_fp8(name: str, q: torch.Tensor) -> None:
    if q.dtype is not FP8:
        raise ValueError(f"{name} must be {FP8}, got {q.dtype}")


def _check_matrix(name: str, w: torch.Tensor) -> None:
    if w.dim() != 2:
        raise ValueError(f"{name} must be a matrix [N, K], got shape {tuple(w.shape)}")


def _check_scales(
    name: str, q: torch.Tensor, scales: torch.Tensor, expected: tuple[int, ...]
) -> None:
    if scales.dtype is not torch.float32:
        raise ValueError(f"scales of {name} must be float32, got {scales.dtype}")
    if tuple(scales.shape) != expected:
        raise ValueError(
            f"scales of {name} with shape {tuple(q.shape)} must have shape {expected},"
            f" got {tuple(scales.shape)}"
        )
