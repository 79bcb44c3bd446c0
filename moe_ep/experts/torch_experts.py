"""Experts in plain PyTorch, for CPUs: one product per slot and projection, the rest in one go.

A slot's product reads the slot's weights once, whatever its number of rows, so a decode step costs
one pass over the weights of the slots that have rows; what comes between the products is done for
several small slots at a time, to pay PyTorch's cost per call once. FP8 weights are restored when
loaded; the arithmetic of the GPU kernels is kept in the activations: restored 1x128 FP8 rows in,
and the activation in float32, rounded through 1x128 FP8 before the down projection.

Not chosen: ``torch._grouped_mm`` and ``torch.bmm`` read row-major weights, at half the bandwidth of
the packed ones (``bench/grouped_gemm.py`` measures it); ``bmm`` also needs padding to equal rows.

Shape letters: S slots, C capacity, H hidden, I expert intermediate, n valid rows of all slots.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from moe_ep.dispatch.base import ContiguousLayout, Dispatched
from moe_ep.experts.base import (
    Experts,
    ExpertSpec,
    ExpertWeights,
    check_rows,
    check_scales,
    check_slot,
)
from moe_ep.fp8 import FP8, dequantize_blocks, dequantize_rows, quantize_rows
from moe_ep.linear import Linear

# Rows of slots that go together between the products: more cost more to join than their calls do.
GROUP_ROWS = 128


class SlotRows(NamedTuple):
    """The valid rows of one slot: ``start`` to ``stop`` of the flattened layout."""

    slot: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


class _Expert(NamedTuple):
    gate_up: Linear  # H -> 2I, gate first
    down: Linear  # I -> H


class TorchExperts(Experts):
    """See ``Experts``. A row's result depends on that row and its slot's weights; on the number of
    rows of its slot only as far as the matrix product's rounding does."""

    row_alignment = 1  # products take any number of rows; gaps would only have to be skipped

    def __init__(self, spec: ExpertSpec) -> None:
        if (problem := self.supports(spec)) is not None:
            raise ValueError(problem)
        self.spec = spec
        self._experts: list[_Expert | None] = [None] * spec.num_slots
        self._requantizes = spec.is_fp8 and spec.dtype is torch.bfloat16

    @classmethod
    def supports(cls, spec: ExpertSpec) -> str | None:
        if spec.dtype not in (torch.bfloat16, torch.float32):
            return f"dtype: {spec.dtype} given, torch experts compute in bfloat16 or float32"
        for name in ("num_slots", "hidden", "intermediate"):
            if getattr(spec, name) < 1:
                return f"{name}: {getattr(spec, name)} given, must be at least 1"
        return None

    def load_slot(self, slot: int, weights: ExpertWeights) -> None:
        """See ``Experts``. The weights are copied; the caller may reuse them.

        Raises IndexError for a slot out of range, ValueError for a wrong shape or dtype, for FP8
        without its scale and for a scale without FP8; the slot then keeps what it held.
        """
        check_slot(slot, self.spec)
        hidden, intermediate, dtype = self.spec.hidden, self.spec.intermediate, self.spec.dtype
        gate = _restore("gate", weights.gate, weights.gate_scale, (intermediate, hidden), dtype)
        up = _restore("up", weights.up, weights.up_scale, (intermediate, hidden), dtype)
        down = _restore("down", weights.down, weights.down_scale, (hidden, intermediate), dtype)
        self.load_staged(slot, self.stage([torch.cat([gate, up]), down]))

    def slot_tensors(self, slot: int) -> list[torch.Tensor]:
        """See ``Experts``. Raises RuntimeError for a slot that was never loaded."""
        expert = self._experts[slot]
        if expert is None:
            raise RuntimeError(f"slot {slot} holds no expert")
        return [expert.gate_up.dense_weight, expert.down.dense_weight]

    def stage(self, tensors: list[torch.Tensor]) -> _Expert:
        """See ``Experts``. Packs the weights, which is what takes time."""
        gate_up, down = tensors
        return _Expert(Linear(gate_up, self.spec.dtype), Linear(down, self.spec.dtype))

    def load_staged(self, slot: int, staged: _Expert) -> None:
        self._experts[slot] = staged

    def __call__(self, dispatched: Dispatched) -> torch.Tensor:
        """See ``Experts``. Raises ValueError when the rows or the layout do not fit the spec, and
        RuntimeError when a slot that was never loaded has rows."""
        check_rows(dispatched, self.spec)
        check_scales(dispatched)
        slots = slots_with_rows(dispatched)
        rows = dispatched.rows.flatten(0, -2)
        out = rows.new_empty(rows.shape, dtype=self.spec.dtype)
        if slots:
            # Without gaps the rows are taken, and the results returned, where they lie.
            row_idx = None if _is_gapless(slots, len(rows)) else _row_idx(slots, rows.device)
            x = self._restored_rows(rows, dispatched.scales, row_idx)
            weights = dispatched.row_weights
            row_weights = None if weights is None else _pick(weights.flatten(), row_idx)
            y = _joined(list(self._outputs(x, row_weights, slots)))
            out = y if row_idx is None else out.index_copy_(0, row_idx, y)
        return out.view(dispatched.rows.shape)

    def _restored_rows(
        self, rows: torch.Tensor, scales: torch.Tensor | None, row_idx: torch.Tensor | None
    ) -> torch.Tensor:
        """The valid rows ``[n, H]`` in the compute dtype."""
        if scales is None:
            return _pick(rows, row_idx).to(self.spec.dtype)
        codes = _pick(rows.view(torch.uint8), row_idx)
        return dequantize_rows(
            codes.view(FP8), _pick(scales.flatten(0, -2), row_idx), self.spec.dtype
        )

    def _outputs(
        self, x: torch.Tensor, row_weights: torch.Tensor | None, slots: list[SlotRows]
    ) -> Iterator[torch.Tensor]:
        """Yield the outputs ``[rows, H]`` of each slot; x ``[n, H]`` holds the slots' rows."""
        first = 0
        for group in _groups(slots):
            sizes = [slot.num_rows for slot in group]
            last = first + sum(sizes)
            experts = [self._expert(slot) for slot in group]
            inputs = x[first:last].split(sizes)
            gate_up = [e.gate_up(rows) for e, rows in zip(experts, inputs, strict=True)]
            weights = None if row_weights is None else row_weights[first:last]
            hidden = self._activation(_joined(gate_up), weights).split(sizes)
            yield from (e.down(rows) for e, rows in zip(experts, hidden, strict=True))
            first = last

    def _expert(self, rows: SlotRows) -> _Expert:
        expert = self._experts[rows.slot]
        if expert is None:
            raise RuntimeError(f"slot {rows.slot} has {rows.num_rows} rows but holds no expert")
        return expert

    def _activation(self, gate_up: torch.Tensor, row_weights: torch.Tensor | None) -> torch.Tensor:
        """SwiGLU: ``[rows, 2I]`` -> ``[rows, I]`` in the compute dtype.

        Row weights are applied here, not to the output: the down projection is linear, and its
        output would be rounded a second time.
        """
        if row_weights is None and not self._requantizes:
            gate, up = gate_up.chunk(2, dim=-1)
            return F.silu(gate).mul_(up)
        gate, up = gate_up.float().chunk(2, dim=-1)
        hidden = F.silu(gate).mul_(up)
        if row_weights is not None:
            hidden.mul_(row_weights.unsqueeze(1))
        if self._requantizes:
            return dequantize_rows(*quantize_rows(hidden), self.spec.dtype)
        return hidden.to(self.spec.dtype)


def slots_with_rows(dispatched: Dispatched) -> list[SlotRows]:
    """The slots that have rows, in order, for either layout.

    Raises ValueError when the layout covers rows that do not exist.
    """
    layout, rows = dispatched.layout, dispatched.rows
    counts: list[int] = layout.counts.tolist()
    if isinstance(layout, ContiguousLayout):
        starts = [stop - count for stop, count in zip(layout.psum.tolist(), counts, strict=True)]
        most, available = max(layout.psum.tolist()), len(rows)
    else:
        starts = [slot * rows.shape[1] for slot in range(len(counts))]
        most, available = max(counts), rows.shape[1]
    if min(counts) < 0 or most > available:
        raise ValueError(f"counts {counts} do not fit rows of shape {list(rows.shape)}")
    slots = zip(range(len(counts)), starts, counts, strict=True)
    return [SlotRows(slot, start, start + count) for slot, start, count in slots if count]


def _is_gapless(slots: list[SlotRows], num_rows: int) -> bool:
    return sum(slot.num_rows for slot in slots) == num_rows


def _row_idx(slots: list[SlotRows], device: torch.device) -> torch.Tensor:
    idx = [row for slot in slots for row in range(slot.start, slot.stop)]
    return torch.tensor(idx, device=device)


def _pick(rows: torch.Tensor, row_idx: torch.Tensor | None) -> torch.Tensor:
    return rows if row_idx is None else rows.index_select(0, row_idx)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _groups(slots: list[SlotRows]) -> Iterator[list[SlotRows]]:
    """Runs of slots with at most GROUP_ROWS rows together; a larger slot is a group of its own."""
    group: list[SlotRows] = []
    num_rows = 0
    for slot in slots:
        if group and num_rows + slot.num_rows > GROUP_ROWS:
            yield group
            group, num_rows = [], 0
        group.append(slot)
        num_rows += slot.num_rows
    if group:
        yield group


def _restore(
    name: str,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """A copy of a checkpoint's weight in the compute dtype."""
    if tuple(weight.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(weight.shape)}")
    if weight.dtype is FP8:
        if scale is None:
            raise ValueError(f"{name} is FP8 and has no {name}_scale; its values are unknown")
        return dequantize_blocks(weight, scale, dtype)
    if scale is not None:
        raise ValueError(f"{name}_scale is given, but {name} is {weight.dtype}, not {FP8}")
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{name} must be BF16, FP16, float32 or {FP8}, got {weight.dtype}")
    return weight.to(dtype, copy=True)
