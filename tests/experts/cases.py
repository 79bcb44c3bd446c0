"""Expert layers for the tests: weights, rows in either layout, and a float64 reference."""

from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from moe_ep.dispatch import ContiguousLayout, Dispatched, MaskedLayout
from moe_ep.experts import Experts, ExpertSpec, ExpertWeights
from moe_ep.fp8 import FP8, dequantize_blocks, dequantize_rows, quantize_blocks, quantize_rows

NAN = float("nan")
Bank = TypeVar("Bank", bound=Experts)


def random_weights(spec: ExpertSpec, seed: int) -> ExpertWeights:
    """One expert as a checkpoint of this spec would hold it."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(num_rows: int, num_cols: int) -> torch.Tensor:
        return torch.randn(num_rows, num_cols, generator=generator) / num_cols**0.5

    gate, up = (matrix(spec.intermediate, spec.hidden) for _ in range(2))
    down = matrix(spec.hidden, spec.intermediate)
    if not spec.is_fp8:
        return ExpertWeights(gate.to(spec.dtype), up.to(spec.dtype), down.to(spec.dtype))
    quantized = [quantize_blocks(weight) for weight in (gate, up, down)]
    return ExpertWeights(*(q for q, _ in quantized), *(scale for _, scale in quantized))


def load(backend: type[Bank], spec: ExpertSpec) -> tuple[Bank, list[ExpertWeights]]:
    """A bank with an expert of its own in every slot."""
    experts = backend(spec)
    weights = [random_weights(spec, seed) for seed in range(spec.num_slots)]
    for slot, expert in enumerate(weights):
        experts.load_slot(slot, expert)
    return experts, weights


def reference(
    x: torch.Tensor,
    weights: ExpertWeights,
    spec: ExpertSpec,
    row_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """float64 ``[rows, H]`` from the restored weights and rows.

    Where the activation goes through FP8, the roundings up to there (products in BF16, then FP8)
    are part of the arithmetic and are made here too: one FP8 step is larger than the tolerance.
    """
    requantizes = spec.is_fp8 and spec.dtype is torch.bfloat16

    def restored(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is None:
            return weight.double()
        return dequantize_blocks(weight, scale, torch.float32).to(spec.dtype).double()

    gate = x.double() @ restored(weights.gate, weights.gate_scale).t()
    up = x.double() @ restored(weights.up, weights.up_scale).t()
    if requantizes:
        gate, up = gate.bfloat16().double(), up.bfloat16().double()
    hidden = gate / (1 + torch.exp(-gate)) * up
    if row_weights is not None:
        hidden *= row_weights.double().unsqueeze(1)
    if requantizes:
        hidden = dequantize_rows(*quantize_rows(hidden.float()), torch.bfloat16).double()
    return hidden @ restored(weights.down, weights.down_scale).t()


def kernel_reference(
    x: torch.Tensor,
    weights: ExpertWeights,
    row_weights: torch.Tensor | None = None,
    *,
    use_ue8m0: bool = False,
) -> torch.Tensor:
    """float64 ``[rows, H]`` from restored rows, as kernels round: products are exact, gate and up
    become BF16, the activation FP8 when the weights are FP8, else BF16."""

    def restored(name: str) -> torch.Tensor:
        weight, scale = getattr(weights, name), getattr(weights, f"{name}_scale")
        if scale is None:
            return weight.double()
        return dequantize_blocks(weight, scale, torch.float32).double()

    gate, up = ((x.double() @ restored(name).T).bfloat16().double() for name in ("gate", "up"))
    hidden = gate / (1 + torch.exp(-gate)) * up
    if row_weights is not None:
        hidden *= row_weights.double().unsqueeze(1)
    if weights.down_scale is None:
        return hidden.bfloat16().double() @ restored("down").T
    quantized = quantize_rows(hidden.float(), use_ue8m0=use_ue8m0)
    return dequantize_rows(*quantized, torch.float32).double() @ restored("down").T


@dataclass(frozen=True)
class SlotInputs:
    """Rows of every slot, ``[count, H]`` float32, and the form in which they are dispatched."""

    per_slot: list[torch.Tensor]
    payload: torch.dtype

    @classmethod
    def random(
        cls, counts: list[int], hidden: int, payload: torch.dtype, seed: int = 0
    ) -> "SlotInputs":
        generator = torch.Generator().manual_seed(seed)
        return cls([torch.randn(n, hidden, generator=generator) for n in counts], payload)

    @property
    def counts(self) -> list[int]:
        return [len(rows) for rows in self.per_slot]

    def restored(self, slot: int) -> torch.Tensor:
        """What the rows of a slot are worth after their trip."""
        rows = self.per_slot[slot]
        if self.payload is FP8:
            return dequantize_rows(*quantize_rows(rows), torch.bfloat16)
        return rows.to(self.payload)

    def contiguous(self, alignment: int) -> Dispatched:
        """Rows one slot after the other; gaps and a tail of 3 rows hold NaN."""
        ends, pieces, width = [], [], self.per_slot[0].shape[1]
        for rows in self.per_slot:
            start = sum(len(piece) for piece in pieces)
            ends.append(start + len(rows))
            pieces += [rows, torch.full((-len(rows) % alignment, width), NAN)]
        pieces.append(torch.full((3, width), NAN))
        psum = torch.tensor(ends, dtype=torch.int32)
        return self._dispatched(torch.cat(pieces), ContiguousLayout(psum, alignment))

    def masked(self, capacity: int) -> Dispatched:
        """Rows ``[S, C, H]``; unused places hold NaN."""
        rows = torch.full((len(self.per_slot), capacity, self.per_slot[0].shape[1]), NAN)
        for slot, given in enumerate(self.per_slot):
            rows[slot, : len(given)] = given
        return self._dispatched(rows, MaskedLayout(torch.tensor(self.counts, dtype=torch.int32)))

    def _dispatched(
        self, rows: torch.Tensor, layout: ContiguousLayout | MaskedLayout
    ) -> Dispatched:
        if self.payload is FP8:
            q, scales = quantize_rows(rows)
            return Dispatched(q, scales, layout, None, None)
        return Dispatched(rows.to(self.payload), None, layout, None, None)


def valid_rows(output: torch.Tensor, dispatched: Dispatched) -> list[torch.Tensor]:
    """The outputs of each slot, cut out of either layout independently of the code under test."""
    counts = dispatched.layout.counts.tolist()
    if isinstance(dispatched.layout, MaskedLayout):
        return [output[slot, :count] for slot, count in enumerate(counts)]
    ends = dispatched.layout.psum.tolist()
    return [output[end - count : end] for end, count in zip(ends, counts, strict=True)]


def with_row_weights(dispatched: Dispatched, value: float) -> Dispatched:
    """The same rows with one weight per valid row, and NaN as the weight of the others."""
    weights = torch.full(dispatched.rows.shape[:-1], NAN)
    for rows in valid_rows(weights, dispatched):
        rows.copy_(value + torch.arange(len(rows)) / 8)
    return replace(dispatched, row_weights=weights)
