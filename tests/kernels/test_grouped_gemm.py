"""The grouped product against float64, with NaN wherever nothing may be read."""

import pytest
import torch

from moe_ep import fp8
from moe_ep.dispatch import ContiguousLayout, MaskedLayout
from moe_ep.fp8 import FP8, new_scales
from moe_ep.kernels import grouped_gemm as module
from moe_ep.kernels.grouped_gemm import grouped_gemm
from tests.compare import assert_rows_close
from tests.kernels.cases import DEVICE, NAN, randn, restored, restored_weight, to_device

COUNTS, CAPACITY, ALIGNMENT = [5, 0, 37, 1, 16], 40, 8
NUM_SLOTS, EMPTY_SLOT = len(COUNTS), 1
# Operands are exact in the reference; products and sums are float32, the result is rounded to BF16.
RTOL = 2**-8 + 1e-5


def operand(x: torch.Tensor, is_fp8: bool):
    """Rows as they come in, their scales, and what they are worth."""
    if not is_fp8:
        return x.bfloat16(), None, x.bfloat16().double()
    q, scales = fp8.quantize_rows(x)
    return q, scales, restored(q, scales)


def weights(width: int, depth: int, is_fp8: bool):
    """Weights, their scales, and what they are worth; the slot without rows holds NaN."""
    w = randn(NUM_SLOTS, width, depth, seed=1) / depth**0.5
    w[EMPTY_SLOT] = NAN
    if not is_fp8:
        return w.bfloat16(), None, list(w.bfloat16().double())
    pairs = [fp8.quantize_blocks(matrix) for matrix in w]
    exact = [restored_weight(*pair) for pair in pairs]
    return torch.stack([q for q, _ in pairs]), torch.stack([s for _, s in pairs]), exact


def contiguous(is_fp8: bool, depth: int):
    ends, at = [], 0
    for count in COUNTS:
        ends.append(at + count)
        at = -(-ends[-1] // ALIGNMENT) * ALIGNMENT
    x = torch.full((at + 3, depth), NAN)
    for end, count in zip(ends, COUNTS, strict=True):
        x[end - count : end] = randn(count, depth, seed=end)
    layout = ContiguousLayout(torch.tensor(ends, dtype=torch.int32), ALIGNMENT)
    rows = [range(end - count, end) for end, count in zip(ends, COUNTS, strict=True)]
    return operand(x, is_fp8), layout, rows


def masked(is_fp8: bool, depth: int):
    x = torch.full((NUM_SLOTS, CAPACITY, depth), NAN)
    for slot, count in enumerate(COUNTS):
        x[slot, :count] = randn(count, depth, seed=slot)
    layout = MaskedLayout(torch.tensor(COUNTS, dtype=torch.int32))
    rows = [range(s * CAPACITY, s * CAPACITY + count) for s, count in enumerate(COUNTS)]
    return operand(x, is_fp8), layout, rows


@pytest.mark.parametrize("lay_out", [contiguous, masked])
@pytest.mark.parametrize("a_is_fp8", [True, False])
@pytest.mark.parametrize("b_is_fp8", [True, False])
@pytest.mark.parametrize(("width", "depth"), [(256, 256), (200, 208)], ids=["even", "ragged"])
def test_grouped_product(lay_out, a_is_fp8, b_is_fp8, width, depth):
    (a, a_scales, exact), layout, rows = lay_out(a_is_fp8, depth)
    b, b_scales, exact_weights = weights(width, depth, b_is_fp8)
    out = grouped_gemm(
        a.to(DEVICE),
        b.to(DEVICE),
        layout=to_device(layout),
        a_scales=to_device(a_scales),
        b_scales=to_device(b_scales),
    ).cpu()
    assert out.shape == (*a.shape[:-1], width)
    flat, exact = out.flatten(0, -2).double(), exact.flatten(0, -2)
    for slot, places in enumerate(rows):
        want = exact[list(places)] @ exact_weights[slot].T
        assert_rows_close(flat[list(places)], want, rtol=RTOL, atol=1e-6)


@pytest.mark.parametrize("lay_out", [contiguous, masked])
def test_scales_may_be_column_major(lay_out):
    (a, a_scales, _), layout, rows = lay_out(True, 256)
    b, b_scales, _ = weights(128, 256, True)
    other = new_scales(tuple(a.shape[:-1]), 256, is_column_major=True, device=a_scales.device)
    other.copy_(a_scales)
    assert other.stride() != a_scales.stride()
    one, two = (
        grouped_gemm(
            a.to(DEVICE),
            b.to(DEVICE),
            layout=to_device(layout),
            a_scales=scales.to(DEVICE) if scales is a_scales else _kept(scales),
            b_scales=b_scales.to(DEVICE),
        ).cpu()
        for scales in (a_scales, other)
    )
    for places in rows:
        picked = list(places)
        assert torch.equal(one.flatten(0, -2)[picked], two.flatten(0, -2)[picked])


def _kept(scales: torch.Tensor) -> torch.Tensor:
    """On the device with the same strides."""
    *leading, blocks = scales.shape
    moved = new_scales(tuple(leading), blocks * 128, is_column_major=True, device=DEVICE)
    return moved.copy_(scales)


def test_rows_outside_the_layout_are_not_written(monkeypatch):
    (a, _, _), layout, rows = contiguous(False, 64)
    b, _, _ = weights(64, 64, False)
    monkeypatch.setattr(torch, "empty", lambda *size, **kwargs: torch.full(size, 7.0, **kwargs))
    out = grouped_gemm(a.to(DEVICE), b.to(DEVICE), layout=to_device(layout)).cpu()
    outside = sorted(set(range(len(a))) - {row for places in rows for row in places})
    assert (out[outside] == 7.0).all()
    assert (out[list(rows[2])] != 7.0).all()


def test_no_rows():
    layout = ContiguousLayout(torch.zeros(NUM_SLOTS, dtype=torch.int32, device=DEVICE), 1)
    b, b_scales, _ = weights(128, 128, True)
    out = grouped_gemm(
        torch.empty(0, 128, device=DEVICE, dtype=FP8),
        b.to(DEVICE),
        layout=layout,
        a_scales=torch.empty(0, 1, device=DEVICE),
        b_scales=b_scales.to(DEVICE),
    )
    assert out.shape == (0, 128)


@pytest.mark.parametrize(
    ("room", "expected_rows", "tuned_rows"),
    [(3, None, 16), (16, None, 16), (17, None, 64), (64, None, 64), (65, None, 256),
     (9000, None, 256), (1024, 32, 64), (1024, 1, 16)],
)  # fmt: skip
def test_decode_and_prefill_are_tuned_apart(monkeypatch, room, expected_rows, tuned_rows):
    """By the rows that a slot has on average, in few steps that compile nothing anew."""
    kernel, seen = module._grouped_gemm, []
    assert "tuned_rows" in kernel.keys
    place = kernel.arg_names.index("tuned_rows")

    class Recorded:
        def __getitem__(self, grid):
            return lambda *args, **flags: seen.append(args[place])

    monkeypatch.setattr(module, "_grouped_gemm", Recorded())
    b = torch.empty(2, 64, 64, dtype=torch.bfloat16)
    counts = torch.zeros(2, dtype=torch.int32)
    layouts = {
        (2, room, 64): MaskedLayout(counts),
        (2 * room + 1, 64): ContiguousLayout(counts, 1),
    }
    for shape, layout in layouts.items():
        a = torch.empty(shape, dtype=torch.bfloat16)
        grouped_gemm(a, b, layout=layout, expected_rows=expected_rows)
    assert seen == [tuned_rows] * 2
    assert tuned_rows % 16 == 0


def test_fp8_without_scales_is_refused():
    layout = MaskedLayout(torch.zeros(NUM_SLOTS, dtype=torch.int32))
    a, b = torch.zeros(NUM_SLOTS, 4, 128), torch.zeros(NUM_SLOTS, 128, 128)
    with pytest.raises(ValueError, match=r"a is torch\.float8_e4m3fn; FP8, and nothing else"):
        grouped_gemm(a.to(FP8), b.bfloat16(), layout=layout)
    with pytest.raises(ValueError, match=r"b is torch\.bfloat16; FP8, and nothing else"):
        grouped_gemm(a.bfloat16(), b.bfloat16(), layout=layout, b_scales=torch.ones(5, 1, 1))
