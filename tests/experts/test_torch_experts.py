"""Torch experts against a float64 reference, in every layout, with NaN where nothing is read."""

from dataclasses import replace

import pytest
import torch

from moe_ep.dispatch import ContiguousLayout, MaskedLayout
from moe_ep.experts import ExpertSpec, ExpertWeights
from moe_ep.experts.torch_experts import TorchExperts
from moe_ep.fp8 import FP8
from tests.compare import assert_bits_equal, assert_rows_close
from tests.experts.cases import (
    SlotInputs,
    load,
    random_weights,
    reference,
    valid_rows,
    with_row_weights,
)

BF16, FP32 = torch.bfloat16, torch.float32
COUNTS = [3, 0, 1, 40, 0, 17]
# (compute dtype, FP8 weights, dtype of the dispatched rows)
KINDS = [
    (BF16, True, FP8),
    (BF16, False, FP8),
    (BF16, True, BF16),
    (BF16, False, BF16),
    (FP32, False, FP32),
    (FP32, True, FP32),
    (FP32, False, BF16),
]


def make_spec(dtype: torch.dtype, is_fp8: bool, *, num_slots: int = len(COUNTS)) -> ExpertSpec:
    return ExpertSpec(num_slots, hidden=320, intermediate=192, dtype=dtype, is_fp8=is_fp8)


def loaded(spec: ExpertSpec) -> tuple[TorchExperts, list[ExpertWeights]]:
    return load(TorchExperts, spec)


def check(experts, weights, inputs: SlotInputs, dispatched) -> None:
    y = experts(dispatched)
    assert (y.shape, y.dtype) == (dispatched.rows.shape, experts.spec.dtype)
    for slot, rows in enumerate(valid_rows(y, dispatched)):
        expected = reference(inputs.restored(slot), weights[slot], experts.spec)
        assert_rows_close(rows.double(), expected, dtype=experts.spec.dtype)


@pytest.mark.parametrize(("dtype", "is_fp8", "payload"), KINDS)
def test_both_layouts_match_the_reference(dtype, is_fp8, payload):
    spec = make_spec(dtype, is_fp8)
    experts, weights = loaded(spec)
    inputs = SlotInputs.random(COUNTS, spec.hidden, payload)
    for dispatched in (inputs.contiguous(1), inputs.contiguous(128), inputs.masked(48)):
        check(experts, weights, inputs, dispatched)


@pytest.mark.parametrize(("dtype", "is_fp8", "payload"), KINDS)
def test_layouts_agree_to_the_bit(dtype, is_fp8, payload):
    spec = make_spec(dtype, is_fp8)
    experts, _ = loaded(spec)
    inputs = SlotInputs.random(COUNTS, spec.hidden, payload)
    layouts = inputs.contiguous(1), inputs.contiguous(16), inputs.masked(40)
    first, *others = (valid_rows(experts(d), d) for d in layouts)
    for other in others:
        for got, expected in zip(other, first, strict=True):
            assert_bits_equal(got, expected)


def test_layouts_without_any_gap_are_taken_as_they_lie():
    spec = make_spec(BF16, True, num_slots=3)
    experts, weights = loaded(spec)
    inputs = SlotInputs.random([4, 4, 4], spec.hidden, FP8)
    check(experts, weights, inputs, inputs.masked(4))
    tight = inputs.contiguous(1)
    tight = replace(tight, rows=tight.rows[:12], scales=tight.scales[:12])
    check(experts, weights, inputs, tight)


@pytest.mark.parametrize("counts", [[0, 300, 0], [300, 1, 2], [130, 130, 130], [50, 60, 30]])
def test_more_rows_than_one_group(counts):
    spec = make_spec(BF16, True, num_slots=3)
    experts, weights = loaded(spec)
    inputs = SlotInputs.random(counts, spec.hidden, FP8)
    check(experts, weights, inputs, inputs.contiguous(16))
    check(experts, weights, inputs, inputs.masked(320))


def test_no_rows_at_all():
    experts, _ = loaded(make_spec(BF16, True))
    inputs = SlotInputs.random([0] * len(COUNTS), 320, FP8)
    assert experts(inputs.masked(8)).shape == (len(COUNTS), 8, 320)
    assert experts(inputs.contiguous(1)).shape == (3, 320)
    nothing = replace(inputs.contiguous(1), rows=torch.empty(0, 320, dtype=FP8))
    assert experts(replace(nothing, scales=torch.empty(0, 3))).shape == (0, 320)


@pytest.mark.parametrize(("dtype", "is_fp8", "payload"), [KINDS[0], KINDS[4]])
def test_row_weights_scale_each_row(dtype, is_fp8, payload):
    spec = make_spec(dtype, is_fp8)
    experts, weights = loaded(spec)
    inputs = SlotInputs.random(COUNTS, spec.hidden, payload)
    for layout in (inputs.contiguous(16), inputs.masked(40)):
        dispatched = with_row_weights(layout, 0.5)
        y = valid_rows(experts(dispatched), dispatched)
        for slot, row_weights in enumerate(valid_rows(dispatched.row_weights, dispatched)):
            expected = reference(inputs.restored(slot), weights[slot], spec, row_weights)
            assert_rows_close(y[slot].double(), expected, dtype=dtype)


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(), reason="known to hold with AVX-512; not known with AMX"
)
@pytest.mark.parametrize(("dtype", "is_fp8", "payload"), [KINDS[0], KINDS[3]])
def test_a_row_alone_equals_the_row_in_company(dtype, is_fp8, payload):
    """To the bit in BF16, where each output is one chain of sums over K whatever the number of
    rows; not in float32, where the library's order of sums changes with the number of rows."""
    spec = make_spec(dtype, is_fp8, num_slots=1)
    experts, _ = loaded(spec)
    inputs = SlotInputs.random([40], spec.hidden, payload)
    together = experts(inputs.masked(40))[0]
    for row in (0, 7, 39):
        alone = SlotInputs([inputs.per_slot[0][row : row + 1]], payload)
        assert_bits_equal(experts(alone.masked(1))[0], together[row : row + 1])


def test_a_poisoned_row_does_not_reach_its_slot_mates():
    spec = make_spec(BF16, True, num_slots=1)
    experts, _ = loaded(spec)
    inputs = SlotInputs.random([9], spec.hidden, FP8)
    clean = experts(inputs.masked(9))[0]
    inputs.per_slot[0][4] = float("nan")
    y = experts(inputs.masked(9))[0]
    assert y[4].isnan().all()
    assert_bits_equal(y[:4], clean[:4])
    assert_bits_equal(y[5:], clean[5:])


@pytest.mark.parametrize(("dtype", "is_fp8", "payload"), [KINDS[0], KINDS[4]])
def test_a_slot_can_be_replaced_and_the_given_weights_reused(dtype, is_fp8, payload):
    spec = make_spec(dtype, is_fp8)
    experts, weights = loaded(spec)
    inputs = SlotInputs.random(COUNTS, spec.hidden, payload)
    dispatched = inputs.contiguous(16)
    before = valid_rows(experts(dispatched), dispatched)
    weights[3] = random_weights(spec, seed=77)
    staging = replace(weights[3], **{k: getattr(weights[3], k).clone() for k in ("gate", "down")})
    experts.load_slot(3, staging)
    staging.gate.view(torch.uint8).fill_(0x7F)
    staging.down.view(torch.uint8).fill_(0x7F)
    check(experts, weights, inputs, dispatched)
    after = valid_rows(experts(dispatched), dispatched)
    assert not torch.equal(after[3], before[3])
    for slot in (0, 2, 5):
        assert_bits_equal(after[slot], before[slot])


def test_an_empty_slot_is_fine_until_it_gets_rows():
    spec = make_spec(BF16, True, num_slots=2)
    experts = TorchExperts(spec)
    experts.load_slot(0, random_weights(spec, 0))
    experts(SlotInputs.random([5, 0], spec.hidden, FP8).masked(8))
    with pytest.raises(RuntimeError, match="slot 1 has 2 rows but holds no expert"):
        experts(SlotInputs.random([5, 2], spec.hidden, FP8).masked(8))


@pytest.mark.parametrize(
    ("slot", "change", "error", "named"),
    [
        (6, {}, IndexError, "slot 6 is not one of 0 to 5"),
        (-1, {}, IndexError, "slot -1 is not one of 0 to 5"),
        (0, {"gate_scale": None}, ValueError, "gate is FP8 and has no gate_scale"),
        (0, {"down_scale": None}, ValueError, "down is FP8 and has no down_scale"),
        (0, {"up": torch.zeros(192, 320)}, ValueError, "up_scale is given, but up is"),
        (0, {"up": torch.zeros(192, 64).to(FP8)}, ValueError, r"up must have shape \[192, 320\]"),
        (0, {"up_scale": torch.ones(3, 2)}, ValueError, r"must have shape \(2, 3\)"),
        (0, {"gate": torch.zeros(192, 320).int(), "gate_scale": None}, ValueError, "int32"),
    ],
)
def test_bad_weights_are_refused_and_the_slot_keeps_its_expert(slot, change, error, named):
    spec = make_spec(BF16, True)
    experts, weights = loaded(spec)
    with pytest.raises(error, match=named):
        experts.load_slot(slot, replace(random_weights(spec, 50), **change))
    inputs = SlotInputs.random(COUNTS, spec.hidden, FP8)
    check(experts, weights, inputs, inputs.masked(40))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scales": None}, "came without scales"),
        ({"rows": torch.zeros(6, 40, 320).bfloat16()}, "came with scales"),
        ({"rows": torch.zeros(6, 40, 64).to(FP8)}, "rows of width 320"),
        ({"layout": MaskedLayout(torch.ones(5, dtype=torch.int32))}, "expected 6 slots"),
        ({"layout": MaskedLayout(torch.full((6,), 41))}, "do not fit rows of shape"),
        (
            {
                "rows": torch.zeros(5, 320).to(FP8),
                "scales": torch.ones(5, 3),
                "layout": ContiguousLayout(torch.arange(1, 7), 1),
            },
            "do not fit rows of shape",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused(change, named):
    experts, _ = loaded(make_spec(BF16, True))
    dispatched = SlotInputs.random(COUNTS, 320, FP8).masked(40)
    with pytest.raises(ValueError, match=named):
        experts(replace(dispatched, **change))
