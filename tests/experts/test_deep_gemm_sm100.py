"""DeepGEMM experts on SM100: packed power-of-two scales, blocks of 256 rows (trap 7)."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moe_ep.deep_gemm_library import DeepGemm
from moe_ep.experts import ExpertWeights
from moe_ep.experts.deep_gemm_experts import DeepGemmExperts
from moe_ep.fp8 import (
    FP8,
    ScaleFormat,
    dequantize_blocks,
    dequantize_rows,
    quantize_blocks,
    quantize_rows,
)
from tests.compare import assert_bits_equal, assert_rows_close
from tests.emulators.deep_gemm.layout import is_mn_major, unpack
from tests.emulators.deep_gemm.utils import ceil_to_ue8m0
from tests.emulators.device import emulated_kernels
from tests.experts.cases import SlotInputs, kernel_reference, load, valid_rows, with_row_weights
from tests.experts.deep_gemm_cases import (
    BF16,
    column_major,
    make_spec,
    power_of_two_scales,
    restored_rows,
)

COUNTS = [3, 0, 300, 40]


@pytest.fixture(autouse=True)
def _sm100() -> Iterator[None]:
    with emulated_kernels(major=10):
        yield


def loaded() -> tuple[DeepGemmExperts, list[ExpertWeights]]:
    """Weights of a checkpoint whose scales are not powers of two, and as they are multiplied."""
    experts, weights = load(DeepGemmExperts, make_spec(num_slots=len(COUNTS)))
    return experts, [power_of_two_scales(expert) for expert in weights]


def rounded_again(inputs: SlotInputs, slot: int) -> torch.Tensor:
    q, scales = quantize_rows(inputs.per_slot[slot])
    rounded = ceil_to_ue8m0(scales).repeat_interleave(128, dim=1)
    return (dequantize_rows(q, scales, torch.float32) / rounded).to(FP8).float() * rounded


@pytest.mark.parametrize("alignment", [256, 512])
def test_trap_07_rows_of_a_dispatcher_without_powers_of_two(alignment):
    """Their scales are rounded up, and their values once more."""
    experts, weights = loaded()
    inputs = SlotInputs.random(COUNTS, 384, FP8)
    layouts = inputs.contiguous(alignment), inputs.masked(512), column_major(inputs.masked(512))
    for dispatched in layouts:
        y = experts(dispatched)
        for slot, rows in enumerate(valid_rows(y, dispatched)):
            expected = kernel_reference(rounded_again(inputs, slot), weights[slot], use_ue8m0=True)
            assert_rows_close(rows.double(), expected, dtype=BF16)


@pytest.mark.parametrize("payload", [FP8, BF16])
def test_trap_07_rows_quantised_with_powers_of_two_are_multiplied_as_they_are(payload):
    experts, weights = loaded()
    inputs = SlotInputs.random(COUNTS, 384, payload)
    for dispatched in (inputs.contiguous(256), inputs.masked(512)):
        if payload is FP8:
            rows = torch.full(dispatched.rows.shape, torch.nan)
            for place, given in zip(valid_rows(rows, dispatched), inputs.per_slot, strict=True):
                place.copy_(given)
            q, scales = quantize_rows(rows, use_ue8m0=True)
            dispatched = replace(dispatched, rows=q, scales=scales)
        y = experts(dispatched)
        for slot, rows in enumerate(valid_rows(y, dispatched)):
            x = restored_rows(inputs, slot, use_ue8m0=True)
            expected = kernel_reference(x, weights[slot], use_ue8m0=True)
            assert_rows_close(rows.double(), expected, dtype=BF16)


def test_trap_07_packed_scales_are_taken_as_they_lie():
    experts, _ = loaded()
    inputs = SlotInputs.random(COUNTS, 384, BF16)
    dispatched = inputs.masked(512)
    want = experts(dispatched)
    q, packed = experts.library.quantized(dispatched.rows)
    rows, scales = experts.library.rows(q, packed)
    assert scales.data_ptr() == packed.data_ptr()
    assert rows.data_ptr() == q.data_ptr()
    got = experts(replace(dispatched, rows=q, scales=packed))
    for a, b in zip(valid_rows(got, dispatched), valid_rows(want, dispatched), strict=True):
        assert_bits_equal(a, b)


@pytest.mark.parametrize("shape", [(5, 384), (1, 128), (3, 6, 1664)])
def test_trap_07_scales_are_packed_as_the_library_packs_them(shape):
    library = DeepGemm()
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    q, packed = library.quantized(x)
    plain, scales = quantize_rows(x, use_ue8m0=True)
    assert_bits_equal(q, plain)
    assert is_mn_major(packed)
    want = library.lib.get_mn_major_tma_aligned_packed_ue8m0_tensor(scales)
    assert packed.tolist() == want.tolist()
    assert_bits_equal(unpack(packed, scales.shape[-1]), scales)


def test_trap_07_garbage_in_padding_does_not_reach_a_device_assertion():
    """The library's own packing kernel would end the process on these scales."""
    library = DeepGemm()
    scales = torch.tensor([[1.0, torch.nan, -3.0, torch.inf, 0.3]])
    with pytest.raises(RuntimeError, match="not a non-negative power of two"):
        library.lib.get_mn_major_tma_aligned_packed_ue8m0_tensor(scales)
    _, packed = library.rows(torch.zeros(1, 640).to(FP8), scales)
    assert unpack(packed, 5)[0, [0, 4]].tolist() == [1.0, 0.5]


def test_trap_07_weights_are_quantised_anew_unless_their_scales_are_powers_of_two():
    library = DeepGemm()
    w = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    kept, scale = quantize_blocks(w, use_ue8m0=True)
    weight, packed = library.weight(kept, scale)
    assert weight.data_ptr() == kept.data_ptr()
    assert packed.shape == (256, 1)
    assert_bits_equal(unpack(packed, 3)[::128], scale)
    other, scale = quantize_blocks(w)
    weight, packed = library.weight(other, scale)
    restored = dequantize_rows(weight, unpack(packed, 3), torch.float32)
    assert_rows_close(restored, dequantize_blocks(other, scale, torch.float32), rtol=7e-2)


def test_blocks_are_the_librarys():
    experts, _ = loaded()
    assert experts.row_alignment == experts.library.lib.get_mk_alignment_for_contiguous_layout()
    assert experts.row_alignment == 256
    inputs = SlotInputs.random(COUNTS, 384, FP8)
    for dispatched in (inputs.contiguous(128), inputs.masked(384)):
        with pytest.raises(ValueError, match="must be a multiple of 256"):
            experts(dispatched)


@pytest.mark.usefixtures("kernels_or_torch")
def test_the_activation_of_packed_rows():
    """What an exchange that can send UE8M0 delivers, in both layouts, with row weights."""
    counts = [3, 0, 17]
    spec = make_spec(num_slots=3, hidden=128, intermediate=128)
    experts, weights = load(DeepGemmExperts, spec)
    assert experts.scale_format is ScaleFormat.UE8M0
    inputs = SlotInputs.random(counts, 128, BF16)
    for layout in (inputs.contiguous(256), inputs.masked(256)):
        dispatched = with_row_weights(layout, 0.5)
        q, scales = experts.library.quantized(dispatched.rows)
        y = experts(replace(dispatched, rows=q, scales=scales))
        row_weights = valid_rows(dispatched.row_weights, dispatched)
        for slot, rows in enumerate(valid_rows(y, dispatched)):
            x = restored_rows(inputs, slot, use_ue8m0=True)
            expert = power_of_two_scales(weights[slot])
            expected = kernel_reference(x, expert, row_weights[slot], use_ue8m0=True)
            assert_rows_close(rows.double(), expected, dtype=BF16)
