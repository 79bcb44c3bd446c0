"""Recorded loads through several policies: what each would have made of them, window by window.

A window is judged under a placement that was computed from windows before it, as a running engine
would have had it; the first window only teaches. One policy, the oracle, knows the window itself:
no engine can, and it shows what there is to gain. Placements switch between windows, at once.

Shape letters: W windows, L layers, E experts, R ranks, P slots in all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from eplb.balance import as_loads
from eplb.cost import CostModel, traffic
from eplb.loads import balancedness, rank_loads, work_of_slowest
from eplb.placement import Placement, Rebalance
from eplb.rebalance import greedy_experts, rebalance
from eplb.shares import balanced_shares

NONE, GREEDY, OURS, BALANCED, ORACLE = (
    "none", "published greedy", "ours", "ours, balanced dispatch", "oracle",
)  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """num_redundant: extra slots of a layer (total). num_groups: of the router; where the nodes
    divide them, the published rule keeps each on one node. Ranks are numbered node by node."""

    num_ranks: int
    num_redundant: int = 0
    num_nodes: int = 1
    num_groups: int = 1


@dataclass(frozen=True, eq=False)
class PolicyReplay:
    """One policy, over the windows that are judged: all but the first.

    num_slots: of a layer, in all. tokens: float64 ``[W, L, R]``, (token, expert) pairs that each
    rank would have computed. moves: int64 ``[W]``, experts that ranks had to fetch before each
    window, all layers together. moves_between_nodes: experts that nodes had to fetch. crossings:
    float64 ``[W, L]``, copies of tokens that a rank would have got from other nodes, as
    ``eplb.cost`` estimates it.
    """

    name: str
    num_slots: int
    tokens: torch.Tensor
    moves: torch.Tensor
    moves_between_nodes: torch.Tensor
    crossings: torch.Tensor

    @property
    def balancedness(self) -> torch.Tensor:
        """Mean over maximum of the ranks' tokens, float64 ``[W, L]``."""
        return balancedness(self.tokens.flatten(0, 1)).unflatten(0, self.tokens.shape[:2])

    @property
    def work(self) -> float:
        """Tokens of the slowest rank of each layer and window: what all ranks wait for."""
        return work_of_slowest(self.tokens.flatten(0, 1))

    def saved(self, base: "PolicyReplay") -> float:
        """Share of the slowest ranks' tokens under ``base`` that falls away here."""
        return 1 - self.work / base.work if base.work else 0.0

    def crossings_saved(self, base: "PolicyReplay") -> float:
        """Share of the copies between nodes under ``base`` that falls away here."""
        before = float(base.crossings.sum())
        return 1 - float(self.crossings.sum()) / before if before else 0.0


class _Arrangement(NamedTuple):
    """``table`` int64 ``[L, P]``: the expert of each slot; ``shares`` float64 ``[L, P]`` of it."""

    table: torch.Tensor
    shares: torch.Tensor


def replay(
    windows: torch.Tensor, cluster: Cluster, next_placement: Rebalance, cost: CostModel
) -> list[PolicyReplay]:
    """All policies, ``NONE`` first and ``ORACLE`` last.

    windows: ``[W, L, E]``, at least 2. next_placement: ours, from the loads of the window before
    and the placement in it. cost: for ``crossings``, of the same nodes. ``NONE`` has experts in
    order, without redundant slots where the experts divide over the ranks. Raises ValueError for
    sizes that do not fit.
    """
    if windows.dim() != 3 or len(windows) < 2:
        raise ValueError(f"windows: {list(windows.shape)} given, [2 or more, layers, experts]")
    num_layers, num_experts = windows.shape[1:]
    start = Placement.trivial(
        num_layers=num_layers,
        num_experts=num_experts,
        num_ranks=cluster.num_ranks,
        num_redundant=cluster.num_redundant,
    )
    ours = list(_ours(windows, start, next_placement))
    arrangements = {
        NONE: _none(windows, start),
        GREEDY: _greedy(windows, start.num_slots, cluster),
        OURS: (_evenly(placement.physical_to_logical, num_experts) for placement in ours),
        BALANCED: (
            _Arrangement(placement.physical_to_logical, balanced_shares(placement, before))
            for placement, before in zip(ours, windows, strict=False)
        ),
        ORACLE: _oracle(windows, start.num_slots, cluster.num_ranks),
    }
    return [
        _judge(name, windows[1:], list(found), start, cluster, cost)
        for name, found in arrangements.items()
    ]


def _none(windows: torch.Tensor, start: Placement) -> Iterator[_Arrangement]:
    table, num_experts = start.physical_to_logical, start.num_experts
    if num_experts % start.num_ranks == 0:
        table = table[:, :num_experts]
    for _ in windows[1:]:
        yield _evenly(table, num_experts)


def _greedy(windows: torch.Tensor, num_slots: int, cluster: Cluster) -> Iterator[_Arrangement]:
    sizes = (num_slots, cluster.num_groups, cluster.num_nodes, cluster.num_ranks)
    for before in windows[:-1]:
        yield _evenly(greedy_experts(before, *sizes), windows.shape[2])


def _ours(
    windows: torch.Tensor, placement: Placement, next_placement: Rebalance
) -> Iterator[Placement]:
    for before in windows[:-1]:
        placement = next_placement(before, placement)
        yield placement


def _oracle(windows: torch.Tensor, num_slots: int, num_ranks: int) -> Iterator[_Arrangement]:
    for window in windows[1:]:
        placement = rebalance(window, num_slots=num_slots, num_ranks=num_ranks)
        yield _evenly(placement.physical_to_logical, windows.shape[2])


def _evenly(table: torch.Tensor, num_experts: int) -> _Arrangement:
    """Replicas share evenly; also where two of them are on one rank, as the published rule has."""
    counts = torch.zeros(len(table), num_experts, dtype=torch.float64)
    counts.scatter_add_(1, table, torch.ones(table.shape, dtype=torch.float64))
    return _Arrangement(table, counts.gather(1, table).reciprocal())


def _judge(
    name: str,
    windows: torch.Tensor,
    arrangements: list[_Arrangement],
    start: Placement,
    cluster: Cluster,
    cost: CostModel,
) -> PolicyReplay:
    tokens = [
        rank_loads(window.double().gather(1, table) * shares, cluster.num_ranks)
        for window, (table, shares) in zip(windows, arrangements, strict=True)
    ]
    tables = [table for table, _ in arrangements]
    # What never moves may have fewer slots than the start; it is its own start.
    before = tables[:1] if name == NONE else [start.physical_to_logical]
    steps = list(zip(before + tables, tables, strict=False))
    moves, between_nodes = (
        torch.tensor([_fetched(*step, start.num_experts, parts) for step in steps])
        for parts in (cluster.num_ranks, cluster.num_nodes)
    )
    crossings = [
        _crossings(window, table, cluster.num_ranks, cost)
        for window, table in zip(windows, tables, strict=True)
    ]
    return PolicyReplay(
        name=name,
        num_slots=tables[0].shape[1],
        tokens=torch.stack(tokens),
        moves=moves,
        moves_between_nodes=between_nodes,
        crossings=torch.stack(crossings),
    )


def _crossings(
    window: torch.Tensor, table: torch.Tensor, num_ranks: int, cost: CostModel
) -> torch.Tensor:
    """Float64 ``[L]``; replicas share evenly."""
    loads = as_loads(window, "windows")
    slots = table.unflatten(1, (num_ranks, -1)).numpy()
    return torch.from_numpy(traffic(loads, slots, cost).crossings)


def _fetched(before: torch.Tensor, after: torch.Tensor, num_experts: int, num_parts: int) -> int:
    """Experts of ``after`` that were not in the same part of the cluster ``before``; one that comes
    twice to a part is fetched once."""
    had, has = (
        torch.zeros(len(table), num_parts, num_experts, dtype=torch.bool).scatter_(
            2, table.unflatten(1, (num_parts, -1)), True
        )
        for table in (before, after)
    )
    return int((has & ~had).sum())
