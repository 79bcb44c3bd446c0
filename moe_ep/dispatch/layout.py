"""Where tokens lie for the experts, and how expert outputs are added up: shared by the backends.

Knows nothing of communication. Indices are numpy on the host, because the sizes of an exchange
must be known there anyway and numpy's small operations cost a third of torch's; rows are tensors
on the rank's device.

Shape letters: T tokens, K choices per token, S slots per rank, H hidden, n entries (one entry per
token and chosen slot of this rank).
"""

from typing import NamedTuple

import numpy as np
import torch

from moe_ep.dispatch.base import (
    ContiguousLayout,
    Dispatched,
    DispatchSpec,
    MaskedLayout,
    Mode,
)
from moe_ep.fp8 import FP8, num_blocks

# Rows summed at a time on a CPU: the float32 copies of their terms then stay in cache.
SUM_ROWS = 128


class Entries(NamedTuple):
    """The choices that this rank's slots serve, in the order in which their outputs are added.

    rows: int64 ``[n]``, rising: the received row (or own token). slots: int64 ``[n]``, 0 to S - 1.
    weights: float32 ``[n]``.
    """

    rows: np.ndarray
    slots: np.ndarray
    weights: np.ndarray


class Places(NamedTuple):
    """positions: int64 ``[n]``, each entry's row in the flattened layout. counts: int64 ``[S]``.
    starts: int64 ``[S]``, first row of each slot. num_rows: rows of the flattened layout.
    """

    positions: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    num_rows: int


def masked_rows(spec: DispatchSpec) -> int:
    """C: rows that a slot has room for in the masked layout."""
    return -(-spec.num_ranks * spec.capacity // spec.row_alignment) * spec.row_alignment


def place(entries: Entries, spec: DispatchSpec, mode: Mode) -> Places:
    """Give every (row, slot) pair its place, rows rising within a slot.

    A slot that one row names twice holds the row once, so that a slot never needs more than one
    place per token; both entries then point to it.
    """
    num_slots = spec.num_slots_per_rank
    # 1. Sort entries by (slot, row); a pair's repetitions become neighbours.
    row_range = int(entries.rows[-1]) + 1 if len(entries.rows) else 1
    pairs = entries.slots * row_range + entries.rows
    order = np.argsort(pairs, kind="stable")
    by_slot = entries.slots[order]
    is_new = _differs_from_previous(pairs[order])
    # 2. Rows per slot, and the first row of each slot in the layout.
    counts = np.bincount(by_slot[is_new], minlength=num_slots)
    ends = counts.cumsum()
    if mode is Mode.LOW_LATENCY:
        starts = np.arange(num_slots) * masked_rows(spec)
        num_rows = num_slots * masked_rows(spec)
    else:
        aligned = -(-counts // spec.row_alignment) * spec.row_alignment
        aligned_ends = aligned.cumsum()
        starts = aligned_ends - aligned
        num_rows = int(aligned_ends[-1])
    # 3. Place in the slot = pairs before this one, less the pairs of earlier slots.
    positions = np.empty(len(order), dtype=np.int64)
    positions[order] = is_new.cumsum() - 1 + (starts - (ends - counts))[by_slot]
    return Places(positions, counts, starts, num_rows)


def sum_order(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """int64 ``[num_rows + 1]``: where the terms of each row start, for rising ``rows [n]``."""
    return np.searchsorted(rows, np.arange(num_rows + 1))


class LayoutBuffer:
    """Rows and scales of one layout, uninitialised, to be filled from one or more sources."""

    def __init__(
        self, spec: DispatchSpec, mode: Mode, places: Places, device: torch.device
    ) -> None:
        self._spec = spec
        self._mode = mode
        self._places = places
        shape = (places.num_rows, spec.hidden)
        self._rows = torch.empty(shape, dtype=spec.payload_dtype, device=device)
        self._scales = None
        if spec.payload_dtype == FP8:
            shape = (places.num_rows, num_blocks(spec.hidden))
            self._scales = torch.empty(shape, dtype=torch.float32, device=device)

    def fill(
        self,
        positions: np.ndarray,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        row_idx: np.ndarray,
    ) -> None:
        """Copy ``rows[row_idx]``, and their scales, to the given positions."""
        if len(positions):
            _copy_rows(self._rows, positions, rows, row_idx)
            if self._scales is not None:
                assert scales is not None
                _copy_rows(self._scales, positions, scales, row_idx)

    def finish(self, handle: object) -> Dispatched:
        """The filled layout as the experts see it."""
        rows, scales, counts = self._rows, self._scales, self._places.counts
        layout: ContiguousLayout | MaskedLayout
        if self._mode is Mode.LOW_LATENCY:
            leading = (self._spec.num_slots_per_rank, masked_rows(self._spec))
            rows = rows.unflatten(0, leading)
            scales = None if scales is None else scales.unflatten(0, leading)
            layout = MaskedLayout(_int32(counts, rows.device))
        else:
            psum = _int32(self._places.starts + counts, rows.device)
            layout = ContiguousLayout(psum, self._spec.row_alignment)
        return Dispatched(rows, scales, layout, row_weights=None, handle=handle)


def weighted_sums(
    values: torch.Tensor, value_idx: np.ndarray, starts: np.ndarray, weights: np.ndarray
) -> torch.Tensor:
    """Row b is the sum of weight times value over terms ``starts[b]`` to ``starts[b + 1]``.

    values: ``[N, H]``; term i is ``weights[i] * values[value_idx[i]]``, weights float32 ``[n]``.
    Terms are added in float32 one after another, so a row's bits depend on its terms alone; the sum
    is rounded once, to the dtype of the values. Rows without terms are zero.
    """
    num_rows, device = len(starts) - 1, values.device
    out = torch.empty(num_rows, values.shape[1], dtype=values.dtype, device=device)
    step = SUM_ROWS if values.is_cpu else max(num_rows, 1)
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        terms = slice(starts[first], starts[last])
        chosen = values.index_select(0, _to_device(value_idx[terms], device))
        # embedding_bag takes weights in the dtype of the values only, and BF16 ones would not do.
        out[first:last] = torch.embedding_bag(
            chosen.float(),
            torch.arange(len(chosen), device=device),
            _to_device(starts[first:last] - terms.start, device),
            mode=0,  # sum
            per_sample_weights=_to_device(weights[terms], device),
        )[0]
    return out


def sums(values: torch.Tensor, value_idx: np.ndarray, starts: np.ndarray) -> torch.Tensor:
    """As ``weighted_sums`` with all weights 1."""
    # embedding_bag adds BF16 rows in float32 too.
    return torch.embedding_bag(
        values,
        _to_device(value_idx, values.device),
        _to_device(starts[:-1], values.device),
        mode=0,  # sum
    )[0]


def _differs_from_previous(values: np.ndarray) -> np.ndarray:
    differs = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=differs[1:])
    return differs


def _copy_rows(
    target: torch.Tensor, positions: np.ndarray, source: torch.Tensor, row_idx: np.ndarray
) -> None:
    if target.is_cpu:
        source_idx = np.full(len(target), -1)
        source_idx[positions] = row_idx
        if len(source_idx) and source_idx.min() >= 0:  # all of the target, in order
            idx = torch.from_numpy(source_idx)
            torch.index_select(_bytes(source), 0, idx, out=_bytes(target))
        else:
            # Whole rows as numpy elements: torch's index_copy_ takes ten times as long on a CPU.
            _records(target)[positions] = _records(source)[row_idx]
    else:
        chosen = source.index_select(0, _to_device(row_idx, source.device))
        target.index_copy_(0, _to_device(positions, target.device), chosen)


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.uint8)


def _records(rows: torch.Tensor) -> np.ndarray:
    row_bytes = rows.shape[1] * rows.element_size()
    return _bytes(rows).numpy().view(np.dtype((np.void, row_bytes)))[:, 0]


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


def _int32(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return _to_device(array.astype(np.int32), device)
