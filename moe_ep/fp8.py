"""Block-scaled FP8: activations in 1x128 row blocks, weights in 128x128 blocks.

Every conversion between FP8 and wider types in the engine goes through this module, so that the
CPU and the GPU backends see the same bits. The convention is DeepGEMM's: e4m3 values with
``value = fp8 * scale`` and ``scale = max(amax, 1e-4) / 448`` in float32, one scale per block; the
last block of a dimension may be short. With ``use_ue8m0`` the scale is rounded up to a power of
two, the only kind that SM100 multiplies with. What quantises here gives row-major scales;
``new_scales`` and ``pack_exponents`` are for those who want them elsewhere.

NaN is data, not an error: a block that holds NaN or infinity restores to NaN or infinity somewhere
in that block and in no other, so padding rows may hold anything.
"""

import sys
from collections.abc import Sequence
from enum import Enum
from functools import cache

import torch
import torch.nn.functional as F

BLOCK = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest finite e4m3 value
MIN_AMAX = 1e-4  # keeps the scale of an all-zero block away from zero

# Rows converted at a time on their way through float32: the temporaries stay in cache.
_CHUNK_ROWS = 256

_WIDE = (torch.bfloat16, torch.float16, torch.float32)


class ScaleFormat(Enum):
    """How the scales of rows ``[.., H]`` are written.

    FLOAT32: float32 ``[.., ceil(H / 128)]``.
    UE8M0: powers of two; int32 ``[.., ceil(H / 512)]``, the exponents of four blocks, the first one
        in the lowest byte; 0 where there are no more blocks.
    """

    FLOAT32 = "float32"
    UE8M0 = "ue8m0"


def num_blocks(size: int) -> int:
    """How many 128-wide blocks cover ``size`` elements; the last one may be short."""
    return -(-size // BLOCK)


def new_nan(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Values that are all NaN, for weights that nobody has loaded yet."""
    return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(FP8)


def new_scales(
    leading: tuple[int, ...],
    width: int,
    *,
    scale_format: ScaleFormat = ScaleFormat.FLOAT32,
    is_column_major: bool,
    device: torch.device,
) -> torch.Tensor:
    """Uninitialised scales for rows ``[*leading, width]``; see ``new_columns``."""
    is_packed = scale_format is ScaleFormat.UE8M0
    columns = -(-num_blocks(width) // 4) if is_packed else num_blocks(width)
    dtype = torch.int32 if is_packed else torch.float32
    shape = (*leading, columns)
    if is_column_major:
        return new_columns(shape, dtype, device)
    return torch.empty(shape, dtype=dtype, device=device)


def new_columns(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised ``[.., rows, columns]`` of a 4-byte dtype, stride 1 over rows and columns that
    start at 16 bytes: how TMA and DeepGEMM want scales."""
    *groups, rows, columns = shape
    aligned = -(-rows // 4) * 4
    return torch.empty(*groups, columns, aligned, dtype=dtype, device=device).mT[..., :rows, :]


def to_columns(scales: torch.Tensor) -> torch.Tensor:
    """A copy of ``[.., rows, columns]``, laid out as ``new_columns``."""
    return new_columns(tuple(scales.shape), scales.dtype, scales.device).copy_(scales)


def pack_exponents(scales: torch.Tensor) -> torch.Tensor:
    """Float32 powers of two ``[.., blocks]`` as UE8M0, row-major; other values lose their mantissa
    and sign."""
    exponents = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return F.pad(exponents, (0, -exponents.shape[-1] % 4)).view(torch.int32)


def quantize_rows(x: torch.Tensor, *, use_ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row in blocks of 128 along the last dimension.

    x: ``[..., H]`` BF16, FP16 or float32; may be non-contiguous; not modified.
    use_ue8m0: round the scales up to powers of two.
    Returns new contiguous tensors: e4m3 ``[..., H]`` and float32 scales ``[..., ceil(H / 128)]``.
    A row's result depends on that row alone.
    Raises ValueError for another dtype, a scalar, or H = 0.
    """
    _check_wide("x", x)
    _check_width("x", x)
    chunks = x.reshape(-1, x.shape[-1]).split(_CHUNK_ROWS)
    quantized = (_quantize(chunk, use_ue8m0) for chunk in chunks)
    q, scales = (_joined(parts) for parts in zip(*quantized, strict=True))
    return q.view(x.shape), scales.view(*x.shape[:-1], scales.shape[1])


def dequantize_rows(q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Restore what ``quantize_rows`` made: ``q * scale`` in float32, rounded once to ``dtype``.

    q: e4m3 ``[..., H]``; scales: float32 ``[..., ceil(H / 128)]``.
    Returns a new contiguous ``[..., H]`` tensor. Raises ValueError when shapes or dtypes differ
    from this.
    """
    _check_fp8("q", q)
    _check_width("q", q)
    width = q.shape[-1]
    _check_scales("q", q, scales, (*q.shape[:-1], num_blocks(width)))
    chunks = q.reshape(-1, width).split(_CHUNK_ROWS)
    scale_chunks = scales.reshape(-1, num_blocks(width)).split(_CHUNK_ROWS)
    parts = [_dequantize(*pair, dtype) for pair in zip(chunks, scale_chunks, strict=True)]
    return _joined(parts).view(q.shape)


def quantize_blocks(
    w: torch.Tensor, *, use_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight matrix in 128x128 blocks.

    w: ``[N, K]`` BF16, FP16 or float32; not modified.
    use_ue8m0: round the scales up to powers of two.
    Returns e4m3 ``[N, K]`` and float32 scales ``[ceil(N / 128), ceil(K / 128)]``.
    Raises ValueError for another dtype or another number of dimensions.
    """
    _check_wide("w", w)
    _check_matrix("w", w)
    num_rows, num_cols = w.shape
    padded = F.pad(w.float(), (0, -num_cols % BLOCK, 0, -num_rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [N/128, 128, K/128, 128]
    scales = _scales(blocks.abs().amax(dim=(1, 3)), use_ue8m0)
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
    restored = torch.empty(w.shape, dtype=dtype, device=w.device)
    for block, first in enumerate(range(0, num_rows, BLOCK)):
        strip = _to_float32(w[first : first + BLOCK])
        strip *= scale[block].repeat_interleave(BLOCK)[:num_cols]
        restored[first : first + BLOCK] = strip
    return restored


def ceil_to_power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """The smallest powers of two that are not below the scales (float32, positive).

    NaN and infinity become 2^127, so that every result is a power of two; the FP8 value of such an
    element carries its NaN.
    """
    bits = scales.view(torch.int32)
    exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponents.clamp_(1, 254) << 23).view(torch.float32)


def _scales(amax: torch.Tensor, use_ue8m0: bool) -> torch.Tensor:
    # By a tensor: CUDA divides by a number by multiplying with its reciprocal, which is not exact.
    scales = amax.clamp_min_(MIN_AMAX).div_(amax.new_full((), FP8_MAX))
    return ceil_to_power_of_two(scales) if use_ue8m0 else scales


def _quantize(rows: torch.Tensor, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = _to_blocks(rows.float())
    scales = _scales(blocks.abs().amax(dim=1, keepdim=True), use_ue8m0)
    q = _from_blocks((blocks / scales).to(FP8), rows.shape[1])
    return q, scales.view(len(rows), num_blocks(rows.shape[1]))


def _dequantize(q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    blocks = _to_blocks(_to_float32(q)).mul_(scales.reshape(-1, 1))
    return _from_blocks(blocks.to(dtype), q.shape[1])


def _joined(chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(list(chunks))


@cache
def _pair_values() -> torch.Tensor:
    """The two float32 values of each pair of codes, as one 8-byte element; ``[65536]``."""
    values = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    is_little = sys.byteorder == "little"
    pairs = torch.cartesian_prod(values, values)  # row 256 * a + b holds (a, b)
    return (pairs.flip(1) if is_little else pairs).contiguous().view(torch.float64).flatten()


def _to_float32(q: torch.Tensor) -> torch.Tensor:
    """A new contiguous float32 tensor."""
    if q.device.type != "cpu":
        return q.float()
    # Two codes at a time from a table: PyTorch's own cast from FP8 takes ten times as long.
    codes = q.contiguous().view(torch.uint8).flatten()
    if codes.numel() % 2 or codes.storage_offset() % 2:
        codes = F.pad(codes, (0, codes.numel() % 2))
    pairs = _pair_values().index_select(0, codes.view(torch.uint16).int())
    return pairs.view(torch.float32)[: q.numel()].view(q.shape)


def _to_blocks(rows: torch.Tensor) -> torch.Tensor:
    """``[T, H]`` -> ``[T * ceil(H / 128), 128]``, zeros after the end of each row."""
    missing = -rows.shape[1] % BLOCK
    return (F.pad(rows, (0, missing)) if missing else rows).reshape(-1, BLOCK)


def _from_blocks(blocks: torch.Tensor, width: int) -> torch.Tensor:
    """The inverse of ``_to_blocks``; contiguous."""
    rows = blocks.view(-1, num_blocks(width) * BLOCK)
    return rows if rows.shape[1] == width else rows[:, :width].contiguous()


def _check_wide(name: str, x: torch.Tensor) -> None:
    if x.dtype not in _WIDE:
        raise ValueError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")


def _check_fp8(name: str, q: torch.Tensor) -> None:
    if q.dtype is not FP8:
        raise ValueError(f"{name} must be {FP8}, got {q.dtype}")


def _check_width(name: str, x: torch.Tensor) -> None:
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name} must be [..., H] with H >= 1, got shape {list(x.shape)}")


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
