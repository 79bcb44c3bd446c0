"""DeepGEMM experts over the strict stand-in, against a float64 reference in every layout."""

from dataclasses import replace

import pytest
import torch

from moe_ep.dispatch import MaskedLayout
from moe_ep.experts import create_experts, resolve_backend
from moe_ep.experts.deep_gemm_experts import DeepGemmExperts
from moe_ep.fp8 import FP8
from tests.compare import assert_bits_equal, assert_rows_close
from tests.experts.cases import (
    SlotInputs,
    kernel_reference,
    random_weights,
    valid_rows,
    with_row_weights,
)
from tests.experts.deep_gemm_cases import (
    BF16,
    COUNTS,
    check,
    column_major,
    loaded,
    make_spec,
    restored_rows,
)

pytestmark = pytest.mark.usefixtures("sm90")


@pytest.mark.parametrize("payload", [FP8, BF16])
def test_fp8_in_both_layouts_matches_the_reference(payload):
    experts, weights = loaded(make_spec())
    inputs = SlotInputs.random(COUNTS, experts.spec.hidden, payload)
    for dispatched in (inputs.contiguous(128), inputs.contiguous(256), inputs.masked(256)):
        check(experts, weights, inputs, dispatched)


@pytest.mark.parametrize("payload", [FP8, BF16])
def test_bf16_in_both_layouts_matches_the_reference(payload):
    experts, weights = loaded(make_spec(is_fp8=False, hidden=192, intermediate=64))
    inputs = SlotInputs.random(COUNTS, experts.spec.hidden, payload)
    for dispatched in (inputs.contiguous(128), inputs.contiguous(256), inputs.masked(256)):
        y = experts(dispatched)
        assert (y.shape, y.dtype) == (dispatched.rows.shape, BF16)
        for slot, rows in enumerate(valid_rows(y, dispatched)):
            expected = kernel_reference(inputs.restored(slot), weights[slot])
            assert_rows_close(rows.double(), expected, dtype=BF16)


def test_layouts_agree_to_the_bit():
    experts, _ = loaded(make_spec())
    inputs = SlotInputs.random(COUNTS, experts.spec.hidden, FP8)
    masked = inputs.masked(256)
    layouts = inputs.contiguous(128), inputs.contiguous(256), masked, column_major(masked)
    first, *others = (valid_rows(experts(d), d) for d in layouts)
    for other in others:
        for got, expected in zip(other, first, strict=True):
            assert_bits_equal(got, expected)


@pytest.mark.parametrize(
    "counts", [[0, 0, 0], [0, 256, 0], [128, 128, 128], [1, 0, 0], [0, 0, 129]]
)
def test_empty_full_and_uneven_slots(counts):
    experts, weights = loaded(make_spec(num_slots=3, hidden=128, intermediate=128))
    inputs = SlotInputs.random(counts, 128, FP8)
    for dispatched in (inputs.contiguous(128), inputs.contiguous(384), inputs.masked(256)):
        check(experts, weights, inputs, dispatched)


def test_no_rows_at_all():
    experts, _ = loaded(make_spec())
    inputs = SlotInputs.random([0] * len(COUNTS), 384, FP8)
    empty = inputs.contiguous(128)
    empty = replace(empty, rows=empty.rows[:0], scales=empty.scales[:0])
    assert experts(empty).shape == (0, 384)


@pytest.mark.usefixtures("kernels_or_torch")
@pytest.mark.parametrize("is_fp8", [True, False])
def test_row_weights_are_applied_before_the_down_product(is_fp8):
    experts, weights = loaded(make_spec(is_fp8=is_fp8))
    payload = FP8 if is_fp8 else BF16
    inputs = SlotInputs.random(COUNTS, 384, payload)
    for layout in (inputs.contiguous(128), inputs.masked(256)):
        dispatched = with_row_weights(layout, 0.5)
        y = valid_rows(experts(dispatched), dispatched)
        for slot, row_weights in enumerate(valid_rows(dispatched.row_weights, dispatched)):
            x = restored_rows(inputs, slot) if is_fp8 else inputs.restored(slot)
            expected = kernel_reference(x, weights[slot], row_weights)
            assert_rows_close(y[slot].double(), expected, dtype=BF16)


def test_a_slot_is_replaced_in_place_and_the_given_weights_reused():
    experts, weights = loaded(make_spec())
    inputs = SlotInputs.random(COUNTS, 384, FP8)
    dispatched = inputs.contiguous(128)
    before = valid_rows(experts(dispatched), dispatched)
    places = [tensor.data_ptr() for bank in (experts._gate_up, experts._down) for tensor in bank]
    weights[3] = random_weights(experts.spec, seed=77)
    staging = replace(weights[3], gate=weights[3].gate.clone(), down=weights[3].down.clone())
    experts.load_slot(3, staging)
    staging.gate.view(torch.uint8).fill_(0x7F)
    staging.down.view(torch.uint8).fill_(0x7F)
    check(experts, weights, inputs, dispatched)
    after = valid_rows(experts(dispatched), dispatched)
    assert not torch.equal(after[3], before[3])
    for slot in (0, 2, 5):
        assert_bits_equal(after[slot], before[slot])
    banks = (experts._gate_up, experts._down)
    assert places == [tensor.data_ptr() for bank in banks for tensor in bank]


def test_rows_of_a_slot_that_was_never_loaded_come_out_nan():
    for is_fp8 in (True, False):
        spec = make_spec(is_fp8=is_fp8, num_slots=2)
        experts = DeepGemmExperts(spec)
        experts.load_slot(0, random_weights(spec, 0))
        y = experts(SlotInputs.random([5, 2], 384, BF16).masked(128))
        assert y[0, :5].isfinite().all()
        assert y[1, :2].isnan().all()


@pytest.mark.parametrize(
    ("slot", "change", "error", "named"),
    [
        (6, {}, IndexError, "slot 6 is not one of 0 to 5"),
        (-1, {}, IndexError, "slot -1 is not one of 0 to 5"),
        (0, {"gate_scale": None}, ValueError, "gate is FP8 and has no gate_scale"),
        (0, {"down_scale": None}, ValueError, "down is FP8 and has no down_scale"),
        (0, {"up": torch.zeros(256, 384)}, ValueError, "up must be torch.float8_e4m3fn"),
        (0, {"up": torch.zeros(256, 64).to(FP8)}, ValueError, r"up must have shape \[256, 384\]"),
        (0, {"up_scale": torch.ones(3, 2)}, ValueError, r"must have shape \(2, 3\)"),
        (0, {"down_scale": torch.ones(3, 2).double()}, ValueError, "in float32"),
    ],
)
def test_bad_weights_are_refused_and_the_slot_keeps_its_expert(slot, change, error, named):
    experts, weights = loaded(make_spec())
    with pytest.raises(error, match=named):
        experts.load_slot(slot, replace(random_weights(experts.spec, 50), **change))
    inputs = SlotInputs.random(COUNTS, 384, FP8)
    check(experts, weights, inputs, inputs.masked(256))


def test_scales_without_fp8_are_refused():
    spec = make_spec(is_fp8=False)
    weights = replace(random_weights(spec, 0), up_scale=torch.ones(2, 3))
    with pytest.raises(ValueError, match="up_scale is given, but up is"):
        DeepGemmExperts(spec).load_slot(0, weights)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scales": None}, "came without scales"),
        ({"rows": torch.zeros(6, 128, 384).bfloat16()}, "came with scales"),
        ({"rows": torch.zeros(6, 128, 64).to(FP8)}, "rows of width 384"),
        ({"layout": MaskedLayout(torch.ones(5, dtype=torch.int32))}, "expected 6 slots"),
    ],
)
def test_rows_that_do_not_fit_are_refused(change, named):
    experts, _ = loaded(make_spec())
    dispatched = SlotInputs.random([1] * 6, 384, FP8).masked(128)
    with pytest.raises(ValueError, match=named):
        experts(replace(dispatched, **change))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": torch.float32}, "dtype: torch.float32 given"),
        ({"num_slots": 0}, "num_slots: 0 given"),
        ({"hidden": 320}, "hidden: 320 given, deep_gemm needs a multiple of 128"),
        ({"intermediate": 192}, "intermediate: 192 given, deep_gemm needs a multiple of 128"),
        ({"hidden": 96, "is_fp8": False}, "hidden: 96 given, deep_gemm needs a multiple of 64"),
        ({"intermediate": 0}, "intermediate: 0 given"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_reason(change, named):
    spec = replace(make_spec(), **change)
    assert named in (DeepGemmExperts.supports(spec) or "")
    with pytest.raises(ValueError, match=named):
        DeepGemmExperts(spec)


def test_expected_rows_reach_the_library_without_reading_counts(monkeypatch):
    import deep_gemm

    seen = []
    masked = deep_gemm.m_grouped_fp8_gemm_nt_masked

    def spy(a, b, d, masked_m, expected_m):
        seen.append(expected_m)
        masked(a, b, d, masked_m, expected_m)

    monkeypatch.setattr(deep_gemm, "m_grouped_fp8_gemm_nt_masked", spy)
    dispatched = SlotInputs.random(COUNTS, 384, FP8).masked(256)
    for expected_rows in (None, 32, 999):
        experts, _ = loaded(replace(make_spec(), expected_rows=expected_rows))
        experts(dispatched)
    assert seen == [256, 256, 32, 32, 256, 256]


def test_it_is_chosen_by_name_and_by_auto():
    assert resolve_backend("auto", make_spec())[0] == "deep_gemm"
    assert isinstance(create_experts("deep_gemm", make_spec()), DeepGemmExperts)
