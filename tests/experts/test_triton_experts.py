"""Triton experts, under the interpreter where there is no GPU, against a float64 reference."""

from dataclasses import replace

import pytest
import torch

from moe_ep.dispatch import MaskedLayout
from moe_ep.experts import ExpertSpec, ExpertWeights, create_experts
from moe_ep.experts.triton_experts import TritonExperts
from moe_ep.fp8 import FP8, quantize_rows
from tests.compare import assert_bits_equal, assert_rows_close
from tests.experts.cases import (
    SlotInputs,
    kernel_reference,
    load,
    random_weights,
    valid_rows,
    with_row_weights,
)
from tests.kernels.cases import DEVICE, restored, to_device

BF16 = torch.bfloat16
COUNTS = [3, 0, 17, 1]
# (FP8 weights, dtype of the dispatched rows)
KINDS = [(True, FP8), (False, FP8), (True, BF16), (False, BF16)]


def make_spec(is_fp8: bool, *, num_slots: int = len(COUNTS)) -> ExpertSpec:
    """Neither size is a multiple of 128: short scale blocks, and a gap between gate and up."""
    return ExpertSpec(
        num_slots, hidden=320, intermediate=192, dtype=BF16, is_fp8=is_fp8, device=DEVICE
    )


def loaded(spec: ExpertSpec) -> tuple[TritonExperts, list[ExpertWeights]]:
    return load(TritonExperts, spec)


def rows_of(inputs: SlotInputs, slot: int) -> torch.Tensor:
    rows = inputs.per_slot[slot]
    return restored(*quantize_rows(rows)) if inputs.payload is FP8 else rows.to(BF16).double()


def outputs(experts: TritonExperts, dispatched) -> list[torch.Tensor]:
    y = experts(to_device(dispatched)).cpu()
    assert (y.shape, y.dtype) == (dispatched.rows.shape, BF16)
    return valid_rows(y, dispatched)


def check(experts, weights, inputs: SlotInputs, dispatched) -> None:
    for slot, rows in enumerate(outputs(experts, dispatched)):
        expected = kernel_reference(rows_of(inputs, slot), weights[slot])
        assert_rows_close(rows.double(), expected, dtype=BF16)


@pytest.mark.parametrize(("is_fp8", "payload"), KINDS)
def test_both_layouts_match_the_reference_and_each_other(is_fp8, payload):
    spec = make_spec(is_fp8)
    experts, weights = loaded(spec)
    inputs = SlotInputs.random(COUNTS, spec.hidden, payload)
    check(experts, weights, inputs, inputs.contiguous(1))
    first = outputs(experts, inputs.contiguous(1))
    for other in (inputs.contiguous(64), inputs.masked(17)):
        for got, expected in zip(outputs(experts, other), first, strict=True):
            assert_bits_equal(got, expected)


@pytest.mark.parametrize(("is_fp8", "payload"), [KINDS[0], KINDS[3]])
def test_row_weights_scale_each_row(is_fp8, payload):
    spec = make_spec(is_fp8)
    experts, weights = loaded(spec)
    inputs = SlotInputs.random(COUNTS, spec.hidden, payload)
    for layout in (inputs.contiguous(16), inputs.masked(20)):
        dispatched = with_row_weights(layout, 0.5)
        y = outputs(experts, dispatched)
        for slot, row_weights in enumerate(valid_rows(dispatched.row_weights, dispatched)):
            expected = kernel_reference(rows_of(inputs, slot), weights[slot], row_weights)
            assert_rows_close(y[slot].double(), expected, dtype=BF16)


def test_no_rows_at_all():
    experts, _ = loaded(make_spec(True))
    inputs = SlotInputs.random([0] * len(COUNTS), 320, FP8)
    assert experts(to_device(inputs.masked(8))).shape == (len(COUNTS), 8, 320)
    assert experts(to_device(inputs.contiguous(1))).shape == (3, 320)
    nothing = replace(inputs.contiguous(1), rows=torch.empty(0, 320, dtype=FP8))
    nothing = replace(nothing, scales=torch.empty(0, 3))
    assert experts(to_device(nothing)).shape == (0, 320)


def test_a_poisoned_row_does_not_reach_its_slot_mates():
    spec = make_spec(True, num_slots=1)
    experts, _ = loaded(spec)
    inputs = SlotInputs.random([9], spec.hidden, FP8)
    clean = outputs(experts, inputs.masked(9))[0]
    inputs.per_slot[0][4] = float("nan")
    y = outputs(experts, inputs.masked(9))[0]
    assert y[4].isnan().all()
    assert_bits_equal(y[:4], clean[:4])
    assert_bits_equal(y[5:], clean[5:])


@pytest.mark.parametrize(("is_fp8", "payload"), [KINDS[0], KINDS[3]])
def test_a_slot_can_be_replaced_and_an_empty_one_shows(is_fp8, payload):
    spec = make_spec(is_fp8, num_slots=2)
    experts = TritonExperts(spec)
    old, new = random_weights(spec, 0), random_weights(spec, 1)
    experts.load_slot(0, old)
    inputs = SlotInputs.random([5, 2], spec.hidden, payload)
    y = outputs(experts, inputs.masked(8))
    assert_rows_close(y[0].double(), kernel_reference(rows_of(inputs, 0), old), dtype=BF16)
    assert y[1].isnan().all()
    experts.load_slot(0, new)
    y = outputs(experts, inputs.masked(8))
    assert_rows_close(y[0].double(), kernel_reference(rows_of(inputs, 0), new), dtype=BF16)


@pytest.mark.parametrize(
    ("slot", "is_fp8", "change", "error", "named"),
    [
        (4, True, {}, IndexError, "slot 4 is not one of 0 to 3"),
        (0, True, {"gate_scale": None}, ValueError, "gate must be .* with gate_scale"),
        (0, True, {"up": torch.zeros(192, 320)}, ValueError, "up must be .*float8.*, got .*32"),
        (0, True, {"up": torch.zeros(192, 64).to(FP8)}, ValueError, r"shape \[192, 320\]"),
        (0, True, {"up_scale": torch.ones(3, 2)}, ValueError, r"must be float32 \[2, 3\]"),
        (0, False, {"gate": torch.zeros(192, 320).int()}, ValueError, "int32"),
        (0, False, {"gate_scale": torch.ones(2, 3)}, ValueError, "without a scale"),
    ],
)
def test_bad_weights_are_refused(slot, is_fp8, change, error, named):
    spec = make_spec(is_fp8)
    with pytest.raises(error, match=named):
        TritonExperts(spec).load_slot(slot, replace(random_weights(spec, 50), **change))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scales": None}, "a is torch.float8_e4m3fn; FP8, and nothing else"),
        ({"rows": torch.zeros(4, 20, 320)}, "rows must be"),
        ({"rows": torch.zeros(4, 20, 64).to(FP8)}, "rows of width 320"),
        ({"layout": MaskedLayout(torch.ones(5, dtype=torch.int32))}, "expected 4 slots"),
    ],
)
def test_rows_that_do_not_fit_are_refused(change, named):
    dispatched = SlotInputs.random(COUNTS, 320, FP8).masked(20)
    experts = TritonExperts(make_spec(True))
    with pytest.raises(ValueError, match=named):
        experts(to_device(replace(dispatched, **change)))


def test_chosen_by_name_and_refused_with_the_reason(monkeypatch):
    import triton

    assert isinstance(create_experts("triton", make_spec(True)), TritonExperts)
    wide = replace(make_spec(True), dtype=torch.float32)
    assert "compute in bfloat16" in str(TritonExperts.supports(wide))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    on_cpu = replace(make_spec(True), device=torch.device("cpu"))
    assert "need a CUDA device" in str(TritonExperts.supports(on_cpu))
    with pytest.raises(ValueError, match="triton: triton kernels need a CUDA device"):
        create_experts("triton", on_cpu)
