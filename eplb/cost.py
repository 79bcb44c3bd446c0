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
    """``crossings`` ``[L]`` as ``CostModel`` counts them, and what ``rises`` needs, by node and
    group ``[L, N, G]``: ``share`` of the group's load on the node, and ``weight``, how much
    crossings rise for each token of the group that comes to need the node."""

    crossings: np.ndarray
    share: np.ndarray
    weight: np.ndarray
    group_loads: np.ndarray
    picks: float

    def rises(
        self, layer: np.ndarray, node: np.ndarray, group: np.ndarray, load: np.ndarray
    ) -> np.ndarray:
        """How much crossings rise if each ``load`` of a group, by itself, came to a node, or, being
        below 0, went from it. All int64 but ``load``, and broadcast against each other."""
        place = (layer, node, group)
        spare, total = 1 - self.share[place], self.group_loads[layer, 0, group]
        left = np.clip(spare - load / total, 0, 1)
        return self.weight[place] * (spare**self.picks - left**self.picks)


def traffic(loads: np.ndarray, slots: np.ndarray, cost: CostModel) -> Traffic:
    """The traffic between nodes when replicas share evenly and tokens start on all nodes alike.

    A token chooses group g with probability p = topk_group * (share of g in the load), at most 1,
    and in it q = K / topk_group experts. Of the group's load the share f lies on node n, so the
    token needs that node for this group with h = p * (1 - (1 - f)^q), and for any with
    1 - product(1 - h).
    """
    num_nodes, num_groups = cost.num_nodes, cost.num_groups
    # 1. [L, N, G]: share of each group's load on each node.
    experts = slots.reshape(len(slots), num_nodes, -1)
    group = experts // (loads.shape[1] // num_groups)
    shares = loads / count_replicas(experts.reshape(len(slots), -1), loads.shape[1])
    on_node = np.zeros((len(slots), num_nodes, num_groups))
    slot_loads = np.take_along_axis(shares[:, None], experts, 2)
    layer, node, _ = np.ogrid[: len(slots), :num_nodes, :1]
    np.add.at(on_node, (layer, node, group), slot_loads)
    group_loads = loads.reshape(len(loads), 1, num_groups, -1).sum(3)
    share = np.minimum(on_node / group_loads, 1)
    # 2. Probabilities.
    total = loads.sum(1)[:, None, None]
    chosen = np.minimum(cost.topk_group * group_loads / total, 1)  # p
    picks = cost.num_experts_per_tok / cost.topk_group  # q
    misses = 1 - chosen * (1 - (1 - share) ** picks)  # 1 - h
    spared = misses.prod(2, keepdims=True)
    # 3. A copy starts on the node it is for in one case of N.
    copies = total / cost.num_experts_per_tok * (1 - 1 / num_nodes) / slots.shape[1]
    weight = copies * spared / np.maximum(misses, 1e-9) * chosen
    crossings = (copies * (1 - spared)).sum((1, 2))
    return Traffic(crossings, share, weight, group_loads, picks)
