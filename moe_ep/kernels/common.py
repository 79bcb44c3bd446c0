"""What the kernels share: conversions that the interpreter gets wrong, and launch sizes.

Triton 3.7's interpreter multiplies BF16 bit patterns as integers, truncates on the way to BF16, and
in e4m3 drops what is below the smallest normal and knows no NaN. The functions here do those steps
in float32 or on bits under the interpreter, and are the plain instruction on a GPU.
"""

from functools import cache

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

TUNED_COUNTS = (16, 64, 256)  # the last one stands for more, too
# Under the interpreter: few, so that every program takes several turns of its loop.
INTERPRETED_PROGRAMS = 3


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` in float32. Unequal operand types meet in BF16, which holds every e4m3."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    elif a.dtype != b.dtype:
        a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
    return tl.dot(a, b, acc)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 to ``dtype``, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def to_e4m3(x):
    """float32 to e4m3, to nearest even, at most 448; NaN stays NaN."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Drop 20 of 23 mantissa bits and move the exponent's bias from 127 to 7.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 codes count steps of 2^-9, the last place of a float32 from 2^14 to 2^15.
        tiny = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.minimum(tl.where(magnitude < 0x3C800000, tiny, normal), 0x7E)
        code = tl.where(magnitude > 0x7F800000, 0x7F, code) | ((bits >> 24) & 0x80)
        result = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        result = x.to(tl.float8e4nv)
    return result


@triton.jit
def e4m3_block(x, IS_UE8M0: tl.constexpr):
    """Quantise one block of rows: x float32 ``[rows, 128]`` -> e4m3, and scales ``[rows]``.

    The bits are those of ``moe_ep.fp8.quantize_rows``: scale = max(amax, 1e-4) / 448, rounded up to
    a power of two for UE8M0, and correctly rounded divisions. The largest magnitude is taken on bit
    patterns, which order as the values do, and in which NaN wins (a floating-point maximum would
    lose it).
    """
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.maximum(tl.max(magnitude, axis=1), 0x38D1B717)  # 1e-4
    scale = tl.div_rn(amax.to(tl.float32, bitcast=True), 448.0)
    if IS_UE8M0:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        scale = (tl.minimum(exponent, 254) << 23).to(tl.float32, bitcast=True)
    return to_e4m3(tl.div_rn(x, scale[:, None])), scale


@triton.jit
def store_scale(
    scales, row_at, block, block_stride, num_blocks, scale, mask, IS_UE8M0: tl.constexpr
):
    """Store one block's scales ``[rows]``; row_at: where each row's scales start, in elements.

    UE8M0: four blocks share an int32, so the caller visits all four, also those past num_blocks.
    """
    if IS_UE8M0:
        exponent = tl.where(block < num_blocks, scale.to(tl.int32, bitcast=True) >> 23, 0)
        codes = scales.to(tl.pointer_type(tl.uint8))
        at = (row_at + block // 4 * block_stride) * 4 + block % 4
        tl.store(codes + at, exponent.to(tl.uint8), mask=mask)
    else:
        tl.store(scales + row_at + block * block_stride, scale, mask=mask)


def configs(
    on_gpu: list[triton.Config], interpreted: dict[str, int] | None = None
) -> list[triton.Config]:
    """What ``triton.autotune`` tries: all on a GPU, one small choice under the interpreter."""
    if not INTERPRETED.value:
        return on_gpu
    return [triton.Config(interpreted or {}, num_warps=4, num_stages=1)]


def tuned_for(count: int) -> int:
    """The bound of the bucket that ``count`` is in, for the key of ``triton.autotune``: one tuning
    for a handful of rows, one for a decode batch, one for a prefill, and no more. All are multiples
    of 16, which is what triton specialises integers on, so kernels are not compiled anew.
    """
    return next((bound for bound in TUNED_COUNTS if count <= bound), TUNED_COUNTS[-1])


@cache
def num_programs(device: torch.device, per_sm: int) -> int:
    """Programs of a kernel whose programs share out work that only the device can count."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return per_sm * torch.cuda.get_device_properties(device).multi_processor_count
