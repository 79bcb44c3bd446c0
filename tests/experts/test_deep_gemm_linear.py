"""Dense projections with FP8 operands, over the strict stand-in of DeepGEMM."""

from collections.abc import Iterator

import pytest
import torch

from moe_ep.fp8 import dequantize_blocks, dequantize_rows, quantize_blocks, quantize_rows
from moe_ep.linear import Linear
from moe_ep.linear_fp8 import DeepGemmLinear, StoredWeight, create_linear
from tests.compare import assert_bits_equal, assert_rows_close
from tests.emulators.device import DEVICE, emulated_kernels

BF16 = torch.bfloat16


@pytest.fixture(autouse=True, params=[9, 10], ids=["sm90", "sm100"])
def _gpu(request) -> Iterator[None]:
    with emulated_kernels(major=request.param):
        yield


def stored(num_rows: int, num_cols: int, seed: int = 0) -> StoredWeight:
    w = torch.randn(num_rows, num_cols, generator=torch.Generator().manual_seed(seed))
    return StoredWeight(*quantize_blocks(w / num_cols**0.5, use_ue8m0=DEVICE.major == 10))


def expected(x: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    rows = dequantize_rows(*quantize_rows(x, use_ue8m0=DEVICE.major == 10), torch.float32)
    assert weight.scale is not None
    return rows.double() @ dequantize_blocks(*weight, torch.float32).double().T


@pytest.mark.parametrize(("num_rows", "num_cols"), [(256, 384), (576, 128), (8, 1664)])
@pytest.mark.parametrize("num_tokens", [1, 3, 130])
def test_it_matches_the_reference(num_rows, num_cols, num_tokens):
    weight = stored(num_rows, num_cols)
    x = torch.randn(num_tokens, num_cols, generator=torch.Generator().manual_seed(1)).to(BF16)
    y = DeepGemmLinear(weight, BF16)(x)
    assert (y.shape, y.dtype) == ((num_tokens, num_rows), BF16)
    assert_rows_close(y.double(), expected(x, weight), dtype=BF16)


def test_bias_strides_and_other_shapes():
    weight = stored(64, 256)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(2))
    linear = DeepGemmLinear(weight, BF16, bias)
    wide = torch.full((2, 3, 512), torch.nan, dtype=BF16)
    wide[..., ::2] = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(3))
    y = linear(wide[..., ::2])
    assert y.shape == (2, 3, 64)
    want = expected(wide[..., ::2].reshape(6, 256), weight) + bias.to(BF16).double()
    assert_rows_close(y.double().view(6, 64), want, dtype=BF16)
    assert linear(wide[:0, ..., ::2]).shape == (0, 3, 64)


def test_rows_do_not_see_each_other():
    linear = DeepGemmLinear(stored(128, 256), BF16)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(4)).to(BF16)
    clean = linear(x)
    x[2] = torch.nan
    y = linear(x)
    assert y[2].isnan().all()
    assert_bits_equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_parts_are_stacked_and_multiplied_at_once():
    parts = [stored(128, 256, 1), stored(256, 256, 2), stored(40, 256, 3)]
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(5)).to(BF16)
    linear = create_linear(parts, BF16, keeps_fp8=True)
    assert isinstance(linear, DeepGemmLinear)
    want = torch.cat([expected(x, part) for part in parts], dim=1)
    assert_rows_close(linear(x).double(), want, dtype=BF16)


def test_without_fp8_products_weights_are_restored():
    parts = [stored(40, 96, 1), stored(24, 96, 2)]  # ends within a block: no matter here
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(5))
    linear = create_linear(parts, torch.float32, keeps_fp8=False)
    assert isinstance(linear, Linear)
    weights = [dequantize_blocks(*part, torch.float32) for part in parts]
    assert_rows_close(linear(x), x @ torch.cat(weights).T)
    plain = create_linear([StoredWeight(weights[0], None)], torch.float32, keeps_fp8=True)
    assert isinstance(plain, Linear)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ([(128, 320)], "not multiples of 8 x 128"),
        ([(100, 256)], "not multiples of 8 x 128"),
        ([(100, 256), (128, 256)], "cannot share a scale per 128x128"),
    ],
)
def test_shapes_that_cannot_be_multiplied_are_refused(parts, named):
    with pytest.raises(ValueError, match=named):
        create_linear([stored(*shape) for shape in parts], BF16, keeps_fp8=True)


def test_a_mix_of_fp8_and_other_weights_is_refused():
    mixed = [stored(128, 256), StoredWeight(torch.zeros(128, 256), None)]
    with pytest.raises(ValueError, match="cannot share a scale per 128x128"):
        create_linear(mixed, BF16, keeps_fp8=True)


def test_inputs_and_types_are_checked():
    weight = stored(128, 256)
    linear = DeepGemmLinear(weight, BF16)
    with pytest.raises(ValueError, match=r"x must be torch\.bfloat16 \[\.\.\., 256\]"):
        linear(torch.zeros(3, 256))
    with pytest.raises(ValueError, match=r"x must be torch\.bfloat16 \[\.\.\., 256\]"):
        linear(torch.zeros(3, 128, dtype=BF16))
    with pytest.raises(ValueError, match="computes in bfloat16"):
        DeepGemmLinear(weight, torch.float32)
    with pytest.raises(ValueError, match="multiplies FP8 with scales"):
        DeepGemmLinear(StoredWeight(torch.zeros(128, 256), None), BF16)
    with pytest.raises(ValueError, match="not one per 128x128"):
        DeepGemmLinear(StoredWeight(weight.weight, torch.ones(2, 2)), BF16)
