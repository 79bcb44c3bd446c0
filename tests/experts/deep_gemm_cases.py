"""DeepGEMM experts for the tests: loaded banks, and rows as dispatchers and products see them."""

from dataclasses import replace

import torch

from moe_ep.dispatch import Dispatched
from moe_ep.experts import ExpertSpec, ExpertWeights
from moe_ep.experts.deep_gemm_experts import DeepGemmExperts
from moe_ep.fp8 import FP8, dequantize_blocks, dequantize_rows, quantize_blocks, quantize_rows
from tests.compare import assert_rows_close
from tests.experts.cases import SlotInputs, kernel_reference, load, valid_rows

COUNTS = [3, 0, 130, 40, 0, 17]
BF16 = torch.bfloat16


def make_spec(*, is_fp8: bool = True, num_slots: int = len(COUNTS), **sizes: int) -> ExpertSpec:
    sizes = {"hidden": 384, "intermediate": 256, **sizes}
    return ExpertSpec(num_slots, dtype=BF16, is_fp8=is_fp8, **sizes)


def loaded(spec: ExpertSpec) -> tuple[DeepGemmExperts, list[ExpertWeights]]:
    return load(DeepGemmExperts, spec)


def power_of_two_scales(weights: ExpertWeights) -> ExpertWeights:
    """The same expert as SM100 multiplies it."""
    parts, scales = {}, {}
    for name in ("gate", "up", "down"):
        weight, scale = getattr(weights, name), getattr(weights, f"{name}_scale")
        restored = dequantize_blocks(weight, scale, torch.float32)
        parts[name], scales[f"{name}_scale"] = quantize_blocks(restored, use_ue8m0=True)
    return ExpertWeights(**parts, **scales)


def restored_rows(inputs: SlotInputs, slot: int, *, use_ue8m0: bool = False) -> torch.Tensor:
    """What the rows of a slot are worth as the products see them: FP8 always for FP8 weights."""
    rows = inputs.per_slot[slot]
    rows = rows if inputs.payload is FP8 else rows.to(inputs.payload)
    return dequantize_rows(*quantize_rows(rows, use_ue8m0=use_ue8m0), torch.float32)


def column_major(dispatched: Dispatched) -> Dispatched:
    """As low-latency dispatch returns scales: stride 1 over rows. C is a multiple of 4."""
    assert dispatched.scales is not None
    return replace(dispatched, scales=dispatched.scales.mT.contiguous().mT)


def check(
    experts: DeepGemmExperts,
    weights: list[ExpertWeights],
    inputs: SlotInputs,
    dispatched: Dispatched,
) -> None:
    """Every valid row against the reference; the weights are FP8."""
    y = experts(dispatched)
    assert (y.shape, y.dtype) == (dispatched.rows.shape, BF16)
    for slot, rows in enumerate(valid_rows(y, dispatched)):
        expected = kernel_reference(restored_rows(inputs, slot), weights[slot])
        assert_rows_close(rows.double(), expected, dtype=BF16)
