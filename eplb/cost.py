"""What a placement costs in a step: the heaviest rank, and traffic between nodes at a price.

Loads tell how often an expert was chosen, not which ones together; so the traffic is an estimate,
as if experts of a group, and groups, were chosen independently of each other.

Shape letters: L layers, E experts, G groups, N nodes, R ranks, S slots per rank, P = R * S slots,
K experts per token. All arrays numpy; ``slots`` int64 ``[L, R, S]`` holds experts; ``loads``
``[L, E]`` above 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eplb.place import max_rank_load
from eplb.replicate import count_replicas


@dataclass(frozen=True)
class CostModel:
    """The cost of a layer, in the unit of loads: (token, expert) pairs that a rank computes.

        load of the heaviest rank + price_per_crossing * crossings + price_per_move * moves

    ``crossings``: copies of tokens that reach a rank from another node, mean over the ranks; a
    token goes once to each node that has an expert of its choice. ``moves``: experts that some rank
    has to fetch; counted by ``improve`` only, which knows the placement before.

    Ranks are numbered node by node. A router without groups has ``num_groups`` 1 and
    ``topk_group`` 1. Raises ValueError, which names the field, for numbers out of range.
    """

    num_nodes: int = 1
    num_groups: int = 1
    topk_group: int = 1
    num_experts_per_tok: int = 1
    price_per_crossing: float = 0.0
    price_per_move: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_nodes", "num_groups", "topk_group", "num_experts_per_tok"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} given, 1 or more needed")
        for name in ("price_per_crossing", "price_per_move"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)} given, 0 or more needed")
        most = min(self.num_groups, self.num_experts_per_tok)
        if self.topk_group > most:
            raise ValueError(f"topk_group: {self.topk_group} given, at most {most} possible")

    def check(self, num_experts: int, num_ranks: int) -> None:
        """Raise ValueError where the experts or ranks do not divide by this model's numbers."""
        if num_ranks % self.num_nodes:
            raise ValueError(f"num_nodes: {self.num_nodes} given, must divide {num_ranks} ranks")
        if num_experts % self.num_groups:
            raise ValueError(
                f"num_groups: {self.num_groups} given, must divide {num_experts} experts"
            )

    def divisions(self, num_slots: int, num_experts: int, num_ranks: int) -> Iterator[int]:
        """Numbers of equal parts of the cluster in which whole groups can be kept, 1 first."""
        yield 1
        for parts in range(2, self.num_nodes + 1 if self.price_per_crossing else 2):
            is_even = self.num_nodes % parts == 0 and self.num_groups % parts == 0
            if is_even and num_slots <= num_experts // parts * num_ranks:
                yield parts


def costs(loads: np.ndarray, slots: np.ndarray, cost: CostModel) -> np.ndarray:
    """``[L]``: the cost of each layer without moves; replicas share evenly."""
    maxima = max_rank_load(loads, slots)
    if not cost.price_per_crossing:
        return maxima
    return maxima + cost.price_per_crossing * traffic(loads, slots, cost).crossings


class Traffic(NamedTuple):
    """``crossings`` ``[L]`` as ``CostModel`` counts them; ``slopes`` ``[L, N, G]``: how much they
    rise for each unit of load of a group that comes to a node."""

    crossings: np.ndarray
    slopes: np.ndarray


def traffic(loads: np.ndarray, slots: np.ndarray, cost: CostModel) -> Traffic:
    """The traffic between nodes when replicas share evenly and tokens start on all nodes alike.

    A token chooses group g with probability p = topk_group * (share of g in the load), at most 1,
    and in it q = K / topk_group experts. Of the group's load the share f lies on node n, so the
    token needs that node for this group with h = p * (1 - (1 - f)^q), and for any with
    1 - product(1 - h).
    """
    (num_layers, num_experts), num_ranks = loads.shape, slots.shape[1]
    num_nodes, num_groups = cost.num_nodes, cost.num_groups
    # 1. [L, N, G]: share of each group's load on each node.
    flat = slots.reshape(num_layers, -1)
    slot_loads = np.take_along_axis(loads / count_replicas(flat, num_experts), flat, 1)
    group_loads = loads.reshape(num_layers, 1, num_groups, -1).sum(3)
    cell = np.arange(num_layers)[:, None] * num_nodes + np.arange(flat.shape[1]) // (
        flat.shape[1] // num_nodes
    )
    cell = cell * num_groups + flat // (num_experts // num_groups)
    share = np.bincount(cell.ravel(), slot_loads.ravel(), num_layers * num_nodes * num_groups)
    share = np.minimum(share.reshape(num_layers, num_nodes, num_groups) / group_loads, 1)
    # 2. Probabilities.
    total = loads.sum(1)[:, None, None]
    chosen = np.minimum(cost.topk_group * group_loads / total, 1)  # p
    picks = cost.num_experts_per_tok / cost.topk_group  # q
    misses = 1 - chosen * (1 - (1 - share) ** picks)  # 1 - h
    spared = misses.prod(2, keepdims=True)
    # 3. A copy starts on the node it is for in one case of N.
    copies = total / cost.num_experts_per_tok * (1 - 1 / num_nodes) / num_ranks
    slopes = copies * spared / np.maximum(misses, 1e-9) * chosen * picks
    slopes = slopes * (1 - share) ** (picks - 1) / group_loads
    return Traffic((copies * (1 - spared)).sum((1, 2)), slopes)
