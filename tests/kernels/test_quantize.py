"""1x128 quantisation and SwiGLU against ``moe_ep.fp8`` and float64."""

import pytest
import torch

from moe_ep import fp8
from moe_ep.dispatch import ContiguousLayout, MaskedLayout
from moe_ep.fp8 import ScaleFormat
from moe_ep.fp8_rows import quantize_rows as quantize_as_torch
from moe_ep.kernels.quantize import quantize_rows
from moe_ep.kernels.swiglu import swiglu
from tests.compare import assert_bits_equal, assert_rows_close
from tests.emulators.deep_gemm.layout import unpack
from tests.kernels.cases import DEVICE, NAN, randn, restored


def hard_rows(num_rows: int, width: int) -> torch.Tensor:
    """Magnitudes over ten decades, zeros, NaN, infinity, and values that lie between two codes."""
    x = randn(num_rows, width) * torch.logspace(-6, 4, width)
    x[1] = 0
    x[2, 5], x[3, width - 1], x[4, 0] = NAN, torch.inf, -torch.inf
    x[5] = torch.linspace(-448, 448, width).round() / 4  # scale 1 / 4: exact and half-way codes
    x[6, :128] = 1e-9
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_column_major", [False, True])
@pytest.mark.parametrize("width", [128, 320])
def test_quantisation_is_that_of_fp8_to_the_bit(dtype, is_column_major, width):
    x = hard_rows(21, width).to(dtype)
    q, scales = (t.cpu() for t in quantize_rows(x.to(DEVICE), is_column_major=is_column_major))
    want, want_scales = fp8.quantize_rows(x)
    assert scales.stride() == ((1, 24) if is_column_major else (fp8.num_blocks(width), 1))
    assert_bits_equal(scales.contiguous().nan_to_num(), want_scales.nan_to_num())
    is_nan = want.float().isnan()
    assert torch.equal(q.view(torch.uint8) & 0x7F == 0x7F, is_nan)
    assert_bits_equal(q.view(torch.uint8)[~is_nan], want.view(torch.uint8)[~is_nan])


@pytest.mark.parametrize("is_column_major", [False, True])
@pytest.mark.parametrize("width", [128, 640, 1030])  # the last word of exponents is not full
def test_powers_of_two_are_those_of_torch_and_packed_alike(is_column_major, width):
    x = hard_rows(21, width)
    flags = {"scale_format": ScaleFormat.UE8M0, "is_column_major": is_column_major}
    q, scales = (t.cpu() for t in quantize_rows(x.to(DEVICE), **flags))
    want, want_scales = quantize_as_torch(x, **flags)
    assert (scales.dtype, scales.shape) == (torch.int32, (21, -(-width // 512)))
    assert scales.stride() == want_scales.stride()
    assert torch.equal(scales, want_scales)
    is_nan = want.float().isnan()
    assert_bits_equal(q.view(torch.uint8)[~is_nan], want.view(torch.uint8)[~is_nan])


def test_quantisation_of_groups_and_of_nothing():
    x = randn(3, 5, 256).bfloat16()
    q, scales = (t.cpu() for t in quantize_rows(x.to(DEVICE), is_column_major=True))
    assert scales.stride() == (2 * 8, 1, 8)  # 5 rows take 16-byte steps of 4 scales
    want, want_scales = fp8.quantize_rows(x)
    assert_bits_equal(q.view(torch.uint8), want.view(torch.uint8))
    assert_bits_equal(scales.contiguous(), want_scales)
    q, scales = quantize_rows(torch.empty(0, 256, device=DEVICE))
    assert (q.shape, scales.shape) == ((0, 256), (0, 2))


def activation(gate_up: torch.Tensor, width: int, weights: torch.Tensor | None) -> torch.Tensor:
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :width].double(), gate_up[..., half : half + width].double()
    hidden = gate / (1 + torch.exp(-gate)) * up
    return hidden if weights is None else hidden * weights.double()[..., None]


@pytest.mark.parametrize("quantizes", [True, False])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_swiglu_of_masked_rows(quantizes, is_weighted):
    """Two slots of three have rows; what lies outside the layout, and between gate and up, is NaN.

    One quantised value may differ from the exact one by half a step of e4m3, 2^-4 of its magnitude.
    """
    counts, capacity, width = [3, 0, 11], 13, 192
    gate_up = torch.full((3, capacity, 512), NAN, dtype=torch.bfloat16)
    weights = torch.full((3, capacity), NAN)
    for slot, count in enumerate(counts):
        gate_up[slot, :count, :192] = randn(count, 192, seed=slot).bfloat16()
        gate_up[slot, :count, 256:448] = randn(count, 192, seed=slot + 9).bfloat16()
        weights[slot, :count] = 0.1 + torch.arange(count)
    hidden = swiglu(
        gate_up.to(DEVICE),
        layout=MaskedLayout(torch.tensor(counts, dtype=torch.int32, device=DEVICE)),
        intermediate=width,
        row_weights=weights.to(DEVICE) if is_weighted else None,
        quantizes=quantizes,
        is_column_major=quantizes,
    )
    values = hidden.values.cpu()
    if quantizes:
        assert hidden.scales is not None
        assert hidden.scales.stride() == (2 * 16, 1, 16)
        values = restored(values, hidden.scales.cpu().contiguous())
    want = activation(gate_up, width, weights if is_weighted else None)
    for slot, count in enumerate(counts):
        got = values[slot, :count].double()
        assert_rows_close(got, want[slot, :count], rtol=2**-4 if quantizes else 2**-8, atol=0.0)


def test_swiglu_with_packed_powers_of_two():
    gate_up = randn(2, 5, 2 * 640).bfloat16()
    counts = torch.tensor([5, 3], dtype=torch.int32, device=DEVICE)
    hidden = swiglu(
        gate_up.to(DEVICE),
        layout=MaskedLayout(counts),
        intermediate=640,
        row_weights=None,
        quantizes=True,
        scale_format=ScaleFormat.UE8M0,
        is_column_major=True,
    )
    assert hidden.scales is not None
    assert hidden.scales.stride() == (2 * 8, 1, 8)
    scales = unpack(hidden.scales.cpu(), 5)
    assert torch.equal(torch.frexp(scales).mantissa[0], torch.full((5, 5), 0.5))
    want = activation(gate_up, 640, None)
    for slot, count in enumerate((5, 3)):
        got = restored(hidden.values.cpu()[slot, :count], scales[slot, :count])
        assert_rows_close(got, want[slot, :count], rtol=2**-4, atol=0.0)


def test_swiglu_of_contiguous_rows_leaves_the_tail(monkeypatch):
    """Rows past the last slot's end are not written; the gap between slots may be anything."""
    gate_up = randn(20, 256).bfloat16()
    gate_up[3:8] = NAN
    gate_up[14:] = NAN
    psum = torch.tensor([3, 8, 14], dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(torch, "empty", lambda *size, **kwargs: torch.full(size, 7.0, **kwargs))
    hidden = swiglu(
        gate_up.to(DEVICE),
        layout=ContiguousLayout(psum, 8),
        intermediate=128,
        row_weights=None,
        quantizes=False,
    )
    rows = [0, 1, 2, *range(8, 14)]
    want = activation(gate_up, 128, None)[rows]
    assert_rows_close(hidden.values.cpu()[rows].double(), want, rtol=2**-8, atol=0.0)
    assert (hidden.values[14:] == 7.0).all()


def test_swiglu_and_its_quantisation_round_once():
    """The activation is float32 until it is quantised: bits are those of quantising the float32."""
    gate_up = randn(9, 256).bfloat16()
    layout = ContiguousLayout(torch.tensor([9], dtype=torch.int32, device=DEVICE), 1)
    hidden = swiglu(
        gate_up.to(DEVICE), layout=layout, intermediate=128, row_weights=None, quantizes=True
    )
    want, want_scales = fp8.quantize_rows(activation(gate_up, 128, None).float())
    assert hidden.scales is not None
    assert_rows_close(hidden.scales.cpu(), want_scales, rtol=1e-6, atol=0.0)
    # A last place of the exponential may move a value that lies between two codes.
    differs = hidden.values.cpu().view(torch.uint8) != want.view(torch.uint8)
    assert differs.sum() <= 0.01 * differs.numel()
