"""Block-scaled FP8 against golden values and an independent float64 reference."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ep.fp8 import (
    BLOCK,
    FP8,
    FP8_MAX,
    dequantize_blocks,
    dequantize_rows,
    num_blocks,
    quantize_blocks,
    quantize_rows,
)
from tests.compare import assert_bits_equal

WIDTHS = (1, 127, 128, 129, 300)


def nearest_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3 values, ties to the even code, found by distance and not by a cast."""
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).double()  # 0 to 448, rising
    distance = (values.abs().unsqueeze(-1) - codes).abs()
    is_nearest = distance == distance.amin(dim=-1, keepdim=True)
    first, last = is_nearest.int().argmax(-1), 126 - is_nearest.flip(-1).int().argmax(-1)
    code = torch.where(first % 2 == 0, first, last)
    return codes[code].copysign(values)


def reference_scales(x: torch.Tensor) -> torch.Tensor:
    """float32 ``[rows, ceil(H / 128)]`` by a loop over blocks."""
    columns = [block.abs().amax(dim=1) for block in x.float().split(BLOCK, dim=1)]
    return torch.stack(columns, dim=1).clamp(min=1e-4) / 448


def test_golden_rows():
    x = torch.zeros(3, 130)
    x[0, :4] = torch.tensor([448.0, -1.0, 17.0, 2.0**-9])  # scale 1; 17 is a tie: down to 16
    x[1, :3] = torch.tensor([896.0, 38.0, -37.9])  # scale 2; 19 is a tie: up to 20
    x[2, 129] = -4.48
    q, scales = quantize_rows(x)
    expected_scales = torch.tensor([[1.0, 1e-4 / 448], [2.0, 1e-4 / 448], [1e-4 / 448, 0.01]])
    torch.testing.assert_close(scales, expected_scales, rtol=1e-7, atol=0)
    assert q[0, :4].view(torch.uint8).tolist() == [0x7E, 0xB8, 0x58, 0x01]
    assert q[1, :3].float().tolist() == [448.0, 20.0, -18.0]
    assert q[2, 129].float() == -448.0
    assert q.float().count_nonzero() == 8


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_match_the_reference(width, dtype):
    generator = torch.Generator().manual_seed(width)
    magnitude = 10.0 ** torch.randint(-6, 4, (7, 1), generator=generator)
    x = (torch.randn(7, width, generator=generator) * magnitude).to(dtype)
    q, scales = quantize_rows(x)
    expected_scales = reference_scales(x)
    assert_bits_equal(scales, expected_scales)
    wide_scales = expected_scales.repeat_interleave(BLOCK, dim=1)[:, :width]
    expected = nearest_e4m3((x.float() / wide_scales).double())
    assert_bits_equal(q.double(), expected)
    restored = dequantize_rows(q, scales, torch.float32)
    assert_bits_equal(restored, (expected * wide_scales.double()).float())


def awkward_magnitudes() -> torch.Tensor:
    """Values whose quotient by 448 is not their product with 1 / 448, among others."""
    amax = torch.logspace(-3, 3, 4096, dtype=torch.float64).float()
    assert (amax * torch.tensor(1 / 448) != amax / 448).float().mean() > 0.1
    return amax


@pytest.mark.parametrize("is_block", [False, True])
def test_scales_are_quotients_rounded_once(is_block):
    """To the bit: the quotient in float64, rounded to float32, is the correctly rounded one."""
    amax = awkward_magnitudes()
    x = torch.zeros(len(amax), BLOCK)
    x[:, 5] = -amax
    if is_block:
        scales = quantize_blocks(x.view(-1, 1, BLOCK).expand(-1, BLOCK, -1).reshape(-1, BLOCK))[1]
    else:
        scales = quantize_rows(x)[1]
    assert_bits_equal(scales[:, 0], (amax.double() / 448).float())


class _Divisors(TorchDispatchMode):
    """Collects what tensors are divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
            self.seen.append(args[1])
        return func(*args, **(kwargs or {}))


def test_nothing_is_divided_by_a_number():
    """CUDA would multiply by its reciprocal, as for a tensor of one element on the CPU."""
    with _Divisors() as divisors:
        quantize_rows(torch.ones(2, 200))
        quantize_blocks(torch.ones(2, 200))
    assert len(divisors.seen) == 4
    assert all(isinstance(divisor, torch.Tensor) for divisor in divisors.seen)


@pytest.mark.parametrize("shape", [(0, 256), (2, 3, 200), (200,), (2, 0, 128)])
def test_rows_of_any_shape_come_back_in_it(shape):
    x = torch.randn(shape).bfloat16()
    q, scales = quantize_rows(x)
    assert (q.shape, q.dtype) == (x.shape, FP8)
    assert scales.shape == (*shape[:-1], num_blocks(shape[-1]))
    restored = dequantize_rows(q, scales, torch.bfloat16)
    assert (restored.shape, restored.dtype) == (x.shape, torch.bfloat16)
    assert q.is_contiguous()
    assert scales.is_contiguous()


def test_a_row_depends_on_itself_alone_and_poison_stays_in_its_block():
    x = torch.randn(6, 300)
    clean_q, clean_scales = quantize_rows(x)
    poisoned = x.clone()
    poisoned[1] = float("nan")
    poisoned[3, 130] = float("inf")
    q, scales = quantize_rows(poisoned.t().contiguous().t())
    restored = dequantize_rows(q, scales, torch.float32)
    for row in (0, 2, 4, 5):
        assert_bits_equal(q[row], clean_q[row])
        assert_bits_equal(scales[row], clean_scales[row])
    assert restored[1].isnan().all()
    assert not restored[3, 128:256].isfinite().all()
    expected = dequantize_rows(clean_q, clean_scales, torch.float32)[3]
    assert_bits_equal(restored[3, :128], expected[:128])
    assert_bits_equal(restored[3, 256:], expected[256:])


def test_every_code_is_restored_exactly():
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).view(2, 128)
    for dtype in (torch.float32, torch.bfloat16):
        restored = dequantize_rows(codes, torch.full((2, 1), 0.5), dtype)
        torch.testing.assert_close(
            restored, (codes.double() / 2).to(dtype), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (127, 257), (300, 130), (256, 384)])
def test_blocks_match_the_reference(shape):
    generator = torch.Generator().manual_seed(shape[0])
    w = torch.randn(shape, generator=generator)
    w[:128, :128] *= 100  # blocks of different scale
    q, scales = quantize_blocks(w)
    assert scales.shape == (num_blocks(shape[0]), num_blocks(shape[1]))
    restored = dequantize_blocks(q, scales, torch.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scale = w[where].abs().max() / FP8_MAX
            assert_bits_equal(scales[i, j], scale)
            expected = nearest_e4m3((w[where] / scale).double())
            assert_bits_equal(q[where].double(), expected)
            assert_bits_equal(restored[where], (expected * scale.double()).float())


def test_restored_weights_are_rounded_once():
    q, scales = quantize_blocks(torch.randn(130, 260))
    exact = dequantize_blocks(q, scales, torch.float32)
    assert_bits_equal(dequantize_blocks(q, scales, torch.bfloat16), exact.bfloat16())


def test_quantising_restored_values_again_changes_nothing():
    q, scales = quantize_rows(torch.randn(5, 256))
    again, _ = quantize_rows(dequantize_rows(q, scales, torch.float32))
    assert_bits_equal(again, q)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: quantize_rows(torch.zeros(2, 4, dtype=torch.int32)), "x must be bfloat16"),
        (lambda: quantize_rows(torch.zeros(2, 4, dtype=torch.float64)), "x must be bfloat16"),
        (lambda: quantize_rows(torch.tensor(1.0)), "H >= 1"),
        (lambda: quantize_rows(torch.zeros(3, 0)), "H >= 1"),
        (lambda: quantize_rows(torch.zeros(2, 4).to(FP8)), "x must be bfloat16"),
        (lambda: quantize_blocks(torch.zeros(2, 2, 2)), r"w must be a matrix \[N, K\]"),
        (lambda: dequantize_rows(torch.zeros(2, 4), torch.ones(2, 1), torch.float32), "q must be"),
        (
            lambda: dequantize_rows(torch.zeros(2, 4).to(FP8), torch.ones(2, 2), torch.float32),
            r"must have shape \(2, 1\), got \(2, 2\)",
        ),
        (
            lambda: dequantize_blocks(
                torch.zeros(129, 4).to(FP8), torch.ones(2, 1).bfloat16(), torch.float32
            ),
            "must be float32",
        ),
        (
            lambda: dequantize_blocks(torch.zeros(129, 4).to(FP8), torch.ones(1, 1), torch.float32),
            r"must have shape \(2, 1\), got \(1, 1\)",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, named):
    with pytest.raises(ValueError, match=named):
        call()
