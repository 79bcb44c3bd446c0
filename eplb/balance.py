"""How evenly any placement could load the ranks; and loads as the algorithms take them.

Shape letters: L layers, E experts, R ranks, P slots.
"""

import numpy as np
import torch

from eplb.bounds import bound_for_any_replicas, bound_for_slots
from eplb.placement import Placement

MAX_LOAD = 1e30


def load_bounds(loads: torch.Tensor, *, num_slots: int, num_ranks: int) -> torch.Tensor:
    """float64 ``[L]``: no placement whose replicas share evenly has a lighter heaviest rank.

    The larger of the mean load of a rank and the least load to which the slots of hot experts can
    be brought. Args: ``loads`` ``[L, E]``, any dtype, 0 or more.
    """
    return torch.from_numpy(bound_for_any_replicas(as_loads(loads, "loads"), num_slots, num_ranks))


def load_bounds_like(placement: Placement, loads: torch.Tensor) -> torch.Tensor:
    """float64 ``[L]``: as ``load_bounds``, and tighter, of placements with these replica counts.

    It knows that a rank with a hot slot needs others beside it. Not a bound for other counts.
    """
    check_loads(loads, placement)
    slot_loads = as_loads(loads, "loads") / placement.replica_counts.numpy()
    slot_loads = np.take_along_axis(slot_loads, placement.physical_to_logical.numpy(), 1)
    return torch.from_numpy(bound_for_slots(slot_loads, placement.num_ranks))


def check_loads(loads: torch.Tensor, placement: Placement) -> None:
    """Raise ValueError where ``loads`` are of other layers or experts than the placement."""
    needed = [placement.num_layers, placement.num_experts]
    if list(loads.shape) != needed:
        raise ValueError(
            f"loads: {list(loads.shape)} given, the placement has [layers, experts] {needed}"
        )


def as_loads(loads: torch.Tensor, name: str) -> np.ndarray:
    """Float64 ``[L, E]`` on the CPU, every value above 0, for the algorithms.

    Experts without load count next to nothing, so that spare replicas are spread over them; in a
    layer without any load all experts count alike. Raises ValueError, which starts with ``name``,
    for another shape, for NaN, and for loads below 0 or above 1e30, of which sums overflow.
    """
    if loads.dim() != 2 or not loads.numel():
        raise ValueError(f"{name}: {list(loads.shape)} given, non-empty [layers, experts] needed")
    array = loads.detach().cpu().double().numpy()
    if not ((array >= 0) & (array <= MAX_LOAD)).all():
        raise ValueError(f"{name}: {array.min()} to {array.max()} given, 0 to {MAX_LOAD} allowed")
    largest = array.max(1, keepdims=True)
    return np.where(array > 0, array, np.where(largest > 0, largest * 1e-20, 1.0))
