"""From rows that came once per rank to rows per slot, and back; on the device, without waiting.

For a backend that returns every token once with the slots it chose here (``slots [N, K]``). All
sizes are known on the host beforehand. The Triton kernels do it where they run, torch elsewhere;
both give the same rows in the same order.

Shape letters: N rows received, K choices, S slots of this rank, M rows of the layout, H hidden.
"""

from abc import ABC, abstractmethod

import torch

from moe_ep import kernels
from moe_ep.dispatch.base import ContiguousLayout
from moe_ep.fp8 import FP8, to_columns


class Expansion(ABC):
    """Which row of the layout each choice has."""

    layout: ContiguousLayout

    @abstractmethod
    def copy(self, received: torch.Tensor, *, is_column_major: bool = False) -> torch.Tensor:
        """``[N, W]`` of any dtype to ``[M, W]``; rows outside the layout are unspecified.

        is_column_major: as ``moe_ep.fp8.new_columns`` lays out scales.
        """

    @abstractmethod
    def weighted_sums(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``[N, H]`` in the dtype of y: weight times output over the choices of each received row.

        y: ``[M, H]``. weights: float32 ``[N, K]``, read where there is a choice. Added in float32
        in order of k and rounded once.
        """


def expand(slots: torch.Tensor, *, num_slots: int, num_rows: int, alignment: int) -> Expansion:
    """Group by slot the choices of all rows, in the order of rows.

    slots: int64 ``[N, K]``, 0 to S - 1, or -1 for another rank's; a row names a slot at most once.
    num_rows: M, the sum over slots of the number of their choices, each rounded up to
        ``alignment``.
    """
    implementation = _ByKernels if kernels.are_used(slots.device) else _ByTorch
    return implementation(slots, num_slots, num_rows, alignment)


class _ByKernels(Expansion):
    def __init__(self, slots: torch.Tensor, num_slots: int, num_rows: int, alignment: int) -> None:
        from moe_ep.kernels.permute import place_contiguous

        self._places = place_contiguous(
            slots.contiguous(), num_slots=num_slots, alignment=alignment, num_rows=num_rows
        )
        self.layout = self._places.layout

    def copy(self, received: torch.Tensor, *, is_column_major: bool = False) -> torch.Tensor:
        from moe_ep.kernels.permute import permute

        return permute(received, self._places, is_column_major=is_column_major)

    def weighted_sums(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        from moe_ep.kernels.permute import unpermute

        return unpermute(y.contiguous(), self._places, weights.contiguous())


class _ByTorch(Expansion):
    def __init__(self, slots: torch.Tensor, num_slots: int, num_rows: int, alignment: int) -> None:
        flat = slots.flatten()
        # 1. Sort the choices by slot; those of other ranks go to the end, as slot S.
        keys = flat.where(flat >= 0, num_slots)
        ordered = keys.sort(stable=True)
        # 2. The first row of every slot, counted with and without padding.
        counts = torch.zeros(num_slots + 1, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, keys, torch.ones_like(keys))
        padded = (counts + alignment - 1) // alignment * alignment
        starts, first = padded.cumsum(0) - padded, counts.cumsum(0) - counts
        self.layout = ContiguousLayout((starts + counts)[:num_slots].int(), alignment)
        # 3. A choice's row is its slot's first row plus its place among the choices of the slot.
        place = torch.arange(len(flat), device=flat.device) - first.take(ordered.values)
        rows = starts.take(ordered.values) + place
        is_here = ordered.values < num_slots
        positions = torch.empty_like(flat).scatter_(0, ordered.indices, rows.where(is_here, -1))
        self._positions = positions.view(slots.shape)
        # 4. The received row that each row copies. One row more than there are takes the choices of
        #    other ranks; padding copies row 0.
        sources = torch.zeros(num_rows + 1, dtype=torch.int64, device=flat.device)
        sources.scatter_(0, rows.where(is_here, num_rows), ordered.indices // slots.shape[1])
        self._sources = sources[:num_rows]

    def copy(self, received: torch.Tensor, *, is_column_major: bool = False) -> torch.Tensor:
        if received.dtype is FP8:  # has no index_select
            return self.copy(received.view(torch.uint8)).view(FP8)
        rows = received.index_select(0, self._sources)
        return to_columns(rows) if is_column_major else rows

    def weighted_sums(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        positions = self._positions
        total = torch.zeros(len(positions), y.shape[1], dtype=torch.float32, device=y.device)
        for k in range(positions.shape[1]) if len(y) else ():
            is_here = (positions[:, k] >= 0).unsqueeze(1)
            chosen = y.index_select(0, positions[:, k].clamp(min=0)).float()
            # Masked, not multiplied by zero: the row that stands in for none may be NaN.
            total += (chosen * weights[:, k, None]).where(is_here, 0.0)
        return total.to(y.dtype)
