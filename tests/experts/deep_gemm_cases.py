"""DeepGEMM experts for the tests: loaded banks, rows as dispatchers lay them out, and a float64
reference that makes the roundings of FP8 products."""

from dataclasses import replace

import torch

from moe_ep.dispatch import Dispatched
from moe_ep.experts import ExpertSpec, ExpertWeights
from moe_ep.experts.deep_gemm_experts import DeepGemmExperts
from moe_ep.fp8 import FP8, dequantize_blocks, dequantize_rows, quantize_blocks, quantize_rows
from tests.compare import assert_rows_close
from tests.experts.cases import SlotInputs, random_weights, valid_rows

COUNTS = [3, 0, 130, 40, 0, 17]
BF16 = torch.bfloat16


def make_spec(*, is_fp8: bool = True, num_slots: int = len(COUNTS), **sizes: int) -> ExpertSpec:
    sizes = {"hidden": 384, "intermediate": 256, **sizes}
    return ExpertSpec(num_slots, dtype=BF16, is_fp8=is_fp8, **sizes)


def loaded(spec: ExpertSpec) -> tuple[DeepGemmExperts, list[ExpertWeights]]:
    experts = DeepGemmExperts(spec)
    weights = [random_weights(spec, seed) for seed in range(spec.num_slots)]
    for slot, expert in enumerate(weights):
        experts.load_slot(slot, expert)
    return experts, weights


def power_of_two_scales(weights: ExpertWeights) -> ExpertWeights:
    """The same expert as SM100 multiplies it."""
    parts, scales = {}, {}
    for name in ("gate", "up", "down"):
        weight, scale = getattr(weights, name), getattr(weights, f"{name}_scale")
        restored = dequantize_blocks(weight, scale, torch.float32)
        parts[name], scales[f"{name}_scale"] = quantize_blocks(restored, use_ue8m0=True)
    return ExpertWeights(**parts, **scales)


def reference(
    x: torch.Tensor,
    weights: ExpertWeights,
    row_weights: torch.Tensor | None = None,
    *,
    use_ue8m0: bool = False,
) -> torch.Tensor:
    """float64 ``[rows, H]`` from restored rows: products exact, gate and up rounded to BF16, the
    activation to FP8 when the weights are FP8, else to BF16."""

    def restored(name: str) -> torch.Tensor:
        weight, scale = getattr(weights, name), getattr(weights, f"{name}_scale")
        if scale is None:
            return weight.double()
        return dequantize_blocks(weight, scale, torch.float32).double()

    gate, up = ((x.double() @ restored(name).T).to(BF16).double() for name in ("gate", "up"))
    hidden = gate / (1 + torch.exp(-gate)) * up
    if row_weights is not None:
        hidden *= row_weights.double().unsqueeze(1)
    if weights.down_scale is None:
        return hidden.to(BF16).double() @ restored("down").T
    quantized = quantize_rows(hidden.float(), use_ue8m0=use_ue8m0)
    return dequantize_rows(*quantized, torch.float32).double() @ restored("down").T


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
        expected = reference(restored_rows(inputs, slot), weights[slot])
        assert_rows_close(rows.double(), expected, dtype=BF16)
