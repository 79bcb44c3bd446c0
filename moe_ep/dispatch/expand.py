"""From rows that came once per rank to rows per slot, and back; on the device, without waiting.

For a backend that returns every token once with the slots it chose here (``slots [N, K]``). All
sizes are known on the host beforehand, so nothing here waits for a device.

Shape letters: N rows received, K choices, S slots of this rank, M rows of the layout, H hidden.
"""

from dataclasses import dataclass

import torch

from moe_ep.fp8 import FP8


@dataclass(frozen=True)
class Expansion:
    """psum: int32 ``[S]``, as in ``ContiguousLayout``. positions: int64 ``[N, K]``, the row of each
    choice, -1 for none. sources: int64 ``[M]``, the received row that each row copies; padding
    copies row 0.
    """

    psum: torch.Tensor
    positions: torch.Tensor
    sources: torch.Tensor


def expand(slots: torch.Tensor, *, num_slots: int, num_rows: int, alignment: int) -> Expansion:
    """Group by slot the choices of all rows, in the order of rows and then of k.

    slots: int64 ``[N, K]``, 0 to S - 1, or -1 for another rank's. num_rows: M, the sum over slots
        of the number of their choices, each rounded up to ``alignment``.
    """
    flat = slots.flatten()
    # 1. Sort the choices by slot; those of other ranks go to the end, as slot S.
    keys = flat.where(flat >= 0, num_slots)
    ordered = keys.sort(stable=True)
    # 2. The first row of every slot, counted with and without padding.
    counts = torch.zeros(num_slots + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    padded = (counts + alignment - 1) // alignment * alignment
    starts, first = padded.cumsum(0) - padded, counts.cumsum(0) - counts
    # 3. A choice's row is its slot's first row plus its place among the choices of the slot.
    place = torch.arange(len(flat), device=flat.device) - first.take(ordered.values)
    rows = starts.take(ordered.values) + place
    is_here = ordered.values < num_slots
    positions = torch.empty_like(flat).scatter_(0, ordered.indices, rows.where(is_here, -1))
    # 4. The inverse; one row more than there are takes the choices of other ranks.
    sources = torch.zeros(num_rows + 1, dtype=torch.int64, device=flat.device)
    sources.scatter_(0, rows.where(is_here, num_rows), ordered.indices // slots.shape[1])
    psum = (starts + counts)[:num_slots].int()
    return Expansion(psum, positions.view(slots.shape), sources[:num_rows])


def copy_rows(received: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """``received[sources]``, for any dtype."""
    if received.dtype is FP8:
        return received.view(torch.uint8).index_select(0, sources).view(FP8)
    return received.index_select(0, sources)


def weighted_row_sums(
    y: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """``[N, H]`` in the dtype of y: weight times output over the choices of each received row.

    y: ``[M, H]``. positions: ``[N, K]``, -1 for none. weights: float32 ``[N, K]``. Added in float32
    in order of k and rounded once.
    """
    total = torch.zeros(len(positions), y.shape[1], dtype=torch.float32, device=y.device)
    if len(y) == 0:
        return total.to(y.dtype)
    for k in range(positions.shape[1]):
        is_here = (positions[:, k] >= 0).unsqueeze(1)
        chosen = y.index_select(0, positions[:, k].clamp(min=0)).float()
        # Masked, not multiplied by zero: the row that stands in for none may be NaN.
        total += (chosen * weights[:, k, None]).where(is_here, 0.0)
    return total.to(y.dtype)
