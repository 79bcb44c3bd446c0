"""Placements from loads.

``rebalance_experts`` has the arguments, the outputs and the rule of DeepSeek's EPLB function of
that name, so that its users change an import and no more; ``rebalance`` gives a ``Placement``, and
weighs traffic between nodes against balance where a ``CostModel`` prices it.

Shape letters: L layers, E experts, G groups, N nodes, R ranks, S slots per rank, P = R * S slots.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from eplb.balance import as_loads
from eplb.cost import CostModel, costs
from eplb.pack import pack_greedily, refold
from eplb.place import max_rank_load, place, place_greedily
from eplb.placement import Placement

# rows of loads [L, E], slots, ranks, rows per layer -> slots [L, R, S]
Place = Callable[[np.ndarray, int, int, int], np.ndarray]


class Rebalanced(NamedTuple):
    """Three int64 tensors on the CPU.

    ``physical_to_logical`` ``[L, P]``: the expert of each slot; slot p is on GPU ``p // S``.
    ``logical_to_physical`` ``[L, E, X]``: each expert's slots, then -1; X is the largest count.
    ``expert_count`` ``[L, E]``: replicas of each expert.
    """

    physical_to_logical: torch.Tensor
    logical_to_physical: torch.Tensor
    expert_count: torch.Tensor


def rebalance_experts(
    weight: torch.Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> Rebalanced:
    """Where to put ``num_replicas`` slots so that GPUs are evenly loaded; DeepSeek EPLB's call.

    Args:
        weight: ``[L, E]``, any dtype and device; the load of each logical expert, 0 or more.
        num_replicas: P, slots of a layer in all, a multiple of ``num_gpus``.
        num_groups: G. Where ``num_nodes`` divides it, all experts of a group stay on one node and
            every node gets as many groups (hierarchical); else experts go anywhere (global).
        num_nodes: N; GPUs are numbered node by node.
        num_gpus: R.

    Differs from DeepSeek's in the result only: no GPU holds two replicas of an expert, and no
    layer is worse balanced than by its rule, where that rule keeps replicas apart. Raises
    ValueError, which names the argument, for sizes that do not fit.
    """
    loads = as_loads(weight, "weight")
    sizes = Sizes(loads.shape[1], num_replicas, num_groups, num_nodes, num_gpus)
    slots = _place_best(loads, sizes.settled())
    placement = Placement(torch.from_numpy(slots.reshape(len(slots), -1)), sizes.experts, num_gpus)
    return Rebalanced(
        placement.physical_to_logical, placement.logical_to_physical, placement.replica_counts
    )


def greedy_experts(
    weight: torch.Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> torch.Tensor:
    """What DeepSeek's own rule gives, to compare with: int64 ``[L, P]``, the expert of each slot.

    Arguments as ``rebalance_experts``. Two replicas of an expert may be on a GPU.
    """
    loads = as_loads(weight, "weight")
    sizes = Sizes(loads.shape[1], num_replicas, num_groups, num_nodes, num_gpus).settled()
    slots = _place_by_node(loads, sizes, _pack_groups(loads, sizes), _greedily)
    return torch.from_numpy(slots.reshape(len(slots), -1))


def rebalance(
    loads: torch.Tensor, *, num_slots: int, num_ranks: int, cost: CostModel | None = None
) -> Placement:
    """The placement of ``num_slots`` slots a layer with the least cost that is found.

    Args: ``loads`` ``[L, E]``, any dtype, 0 or more; a ``cost`` model, by default one node and
    the load of the heaviest rank alone. Where traffic between nodes has a price, placements that
    keep groups on one node, on a half of the nodes, and so on, are weighed against one that does
    not, for each layer by itself. Raises ValueError for sizes that do not fit.
    """
    cost, array = cost or CostModel(), as_loads(loads, "loads")
    num_experts = array.shape[1]
    _check_slots("num_slots", num_slots, "num_ranks", num_ranks, num_experts)
    cost.check(num_experts, num_ranks)
    candidates = []
    for num_parts in cost.divisions(num_slots, num_experts, num_ranks):
        num_groups = cost.num_groups if num_parts > 1 else 1
        sizes = Sizes(num_experts, num_slots, num_groups, num_parts, num_ranks)
        candidates.append(_place_best(array, sizes.settled()))
    cheapest = np.stack([costs(array, slots, cost) for slots in candidates]).argmin(0)
    slots = np.stack(candidates)[cheapest, np.arange(len(array))].reshape(len(array), -1)
    return Placement(torch.from_numpy(slots), num_experts, num_ranks)


class Sizes(NamedTuple):
    """Sizes under the names of ``rebalance_experts``' arguments."""

    experts: int
    replicas: int
    groups: int
    nodes: int
    gpus: int

    def settled(self) -> "Sizes":
        """Checked, and one group on one node where the global policy applies."""
        for name in ("replicas", "groups", "nodes", "gpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"num_{name}: {getattr(self, name)} given, 1 or more needed")
        sizes = self if self.groups % self.nodes == 0 else self._replace(groups=1, nodes=1)
        _check_divides("number of experts", sizes.experts, "num_groups", sizes.groups)
        _check_divides("num_gpus", sizes.gpus, "num_nodes", sizes.nodes)
        _check_slots("num_replicas", sizes.replicas, "num_gpus", sizes.gpus, sizes.experts)
        most = sizes.experts // sizes.nodes * sizes.gpus
        if sizes.replicas > most:
            raise ValueError(
                f"num_replicas: {sizes.replicas} given; with {sizes.experts // sizes.nodes} experts"
                f" on each of {sizes.nodes} nodes {most} at most keep replicas on different GPUs"
            )
        return sizes


def _check_divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(f"{name}: {value} given, must be a multiple of {divisor_name}, {divisor}")


def _check_slots(name: str, slots: int, ranks_name: str, ranks: int, experts: int) -> None:
    _check_divides(name, slots, ranks_name, ranks)
    if not experts <= slots <= experts * ranks:
        raise ValueError(
            f"{name}: {slots} given, {experts} experts need a slot each and have use for "
            f"{experts * ranks}, one on each of {ranks}"
        )


def _place_best(loads: np.ndarray, sizes: Sizes) -> np.ndarray:
    """``slots`` ``[L, R, S]``, each layer by the better of two ways to put groups on nodes."""
    packed = _pack_groups(loads, sizes)
    best = _place_by_node(loads, sizes, packed, _carefully)
    group_loads = _group_loads(loads, sizes.groups)
    evened = refold(packed, group_loads, group_loads.sum(1) / sizes.nodes)
    differs = np.nonzero(max_rank_load(group_loads, evened) < max_rank_load(group_loads, packed))[0]
    if len(differs):
        other = _place_by_node(loads[differs], sizes, evened[differs], _carefully)
        before = max_rank_load(loads[differs], best[differs])
        better = max_rank_load(loads[differs], other) < before
        best[differs[better]] = other[better]
    return best


def _carefully(loads: np.ndarray, num_slots: int, num_ranks: int, num_together: int) -> np.ndarray:
    return place(loads, num_slots, num_ranks, num_together)[0]


def _greedily(loads: np.ndarray, num_slots: int, num_ranks: int, num_together: int) -> np.ndarray:
    return place_greedily(loads, num_slots, num_ranks)


def _group_loads(loads: np.ndarray, num_groups: int) -> np.ndarray:
    return loads.reshape(len(loads), num_groups, -1).sum(2)


def _pack_groups(loads: np.ndarray, sizes: Sizes) -> np.ndarray:
    """int64 ``[L, N, G / N]``: the groups of each node."""
    group_loads = _group_loads(loads, sizes.groups)
    groups = np.broadcast_to(np.arange(sizes.groups), group_loads.shape)
    return pack_greedily(groups, group_loads, sizes.nodes)


def _place_by_node(
    loads: np.ndarray, sizes: Sizes, groups: np.ndarray, place_rows: Place
) -> np.ndarray:
    """``slots`` ``[L, R, S]`` with the experts of each node placed on its own ranks."""
    num_layers, num_nodes = len(loads), sizes.nodes
    # 1. [L * N, E / N]: the experts of each node, and their loads.
    in_group = np.arange(sizes.experts // sizes.groups)
    experts = groups[..., None] * len(in_group) + in_group
    experts = experts.reshape(num_layers, -1)
    rows = np.take_along_axis(loads, experts, 1).reshape(num_layers * num_nodes, -1)
    # 2. [L * N, R / N, S]: places in those lists.
    local = place_rows(rows, sizes.replicas // num_nodes, sizes.gpus // num_nodes, num_nodes)
    # 3. [L, R, S]: experts.
    slots = np.take_along_axis(experts.reshape(rows.shape), local.reshape(len(rows), -1), 1)
    return slots.reshape(num_layers, sizes.gpus, -1)
