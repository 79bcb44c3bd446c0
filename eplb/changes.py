"""What small changes of a placement do to its heaviest ranks, all at once.

- A swap: a slot of the heaviest rank changes places with a slot of a light rank.
- A copy: an expert of the heaviest rank gets one replica more, in a slot of a light rank whose
  expert has other replicas.

Replicas share evenly, so a copy makes its expert lighter on every rank that has it, and the expert
that gives way heavier.

Shape letters: L layers, E experts, N nodes, R ranks, S slots per rank, P = R * S slots. All arrays
numpy. Names: the top is the heaviest rank, e the expert of one of its slots; b is one of the Q / S
lightest ranks, f the expert of one of their slots.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from eplb.cost import CostModel, Traffic, traffic
from eplb.replicate import count_replicas

HUGE = 1e60  # a load that rules a change out; finite, so that sums of it are no NaN
PARTNER_SLOTS = 256  # slots of light ranks that are looked at


class Changes(NamedTuple):
    """For each e and f, ``[L, S, Q]``.

    ``heaviest``: load of the heaviest of all ranks after the change; ``touched``: of the heaviest
    that it changed for the worse, or the top; neither is underestimated. ``crossings``: by how
    much they rise, nearly: as if changes of two groups on a node added up; 0 where they have no
    price. ``moves``: experts to fetch.
    """

    heaviest: np.ndarray
    touched: np.ndarray
    crossings: np.ndarray | float
    moves: int


class View:
    """The changes of a placement, ``slots`` int64 ``[L, R, S]``, under ``loads`` ``[L, E]``."""

    def __init__(self, loads: np.ndarray, slots: np.ndarray, cost: CostModel) -> None:
        (num_layers, num_ranks, slots_per_rank), num_experts = slots.shape, loads.shape[1]
        layer = self._layer = np.arange(num_layers)[:, None]
        self._slots, self._flat = slots, slots.reshape(num_layers, -1)
        # 1. [L, E]: load of a slot of each expert now, with one replica more, with one less.
        counts = count_replicas(self._flat, num_experts)
        self._share = loads / counts
        self._more = np.where(counts < num_ranks, loads / (counts + 1), HUGE)
        self._less = np.where(counts > 1, loads / np.maximum(counts - 1, 1), HUGE)
        # 2. Loads of the ranks [L, R]; the top counts as 0 among the others.
        slot_loads = np.take_along_axis(self._share, self._flat, 1)
        self._loads = slot_loads.reshape(slots.shape).sum(2)
        self._order = self._loads.argsort(1, kind="stable")
        self._top, self.top_load = self._order[:, -1:], self._loads.max(1)
        self._others = self._loads.copy()
        np.put_along_axis(self._others, self._top, 0, 1)
        # 3. Slots of the top [L, S], and of the light ranks [L, Q].
        self._e = slots[layer, self._top][:, 0]
        light = self._order[:, : min(-(-PARTNER_SLOTS // slots_per_rank), num_ranks)]
        self._b = light.repeat(slots_per_rank, 1)
        self._p = self._b * slots_per_rank + np.arange(self._b.shape[1]) % slots_per_rank
        self._f = self._flat[layer, self._p]
        # 4. Who holds what: e on each rank [L, S, R], e on b [L, S, Q], f on the top [L, 1, Q].
        holds = np.zeros((num_layers, num_ranks, num_experts), bool)
        holds[layer[..., None], np.arange(num_ranks)[:, None], slots] = True
        self._e_on_rank = holds[layer, :, self._e]
        self._e_on_b = np.take_along_axis(self._e_on_rank, self._b[:, None], 2)
        self._f_on_top = holds[layer, self._top, self._f][:, None]
        # 5. [L]: what the layers cost as they are, without moves, as ``eplb.cost.costs`` has it.
        self.cost, self._rises = self.top_load, None
        if cost.price_per_crossing:
            self._rises = self._find_rises(loads, cost)
            self.cost = self.cost + cost.price_per_crossing * self._rises.traffic.crossings

    def swaps(self) -> Changes:
        """e and f change places."""
        share_e, share_f = self._of_e(self._share), self._of_f(self._share)
        given = share_e - share_f
        touched = np.maximum(self._top_load() - given, self._load_of_b() + given)
        touched[self._e_on_b | self._f_on_top] = HUGE
        heaviest = np.maximum(touched, self._others.max(1)[:, None, None])
        return Changes(heaviest, touched, self._swap_crossings(given), 2)

    def copies(self) -> Changes:
        """e gets a replica in the slot of f."""
        share_e, more_e = self._of_e(self._share), self._of_e(self._more)
        share_f, less_f = self._of_f(self._share), self._of_f(self._less)
        holders = self._heaviest_holders()
        top = self._top_load() - share_e + more_e + (less_f - share_f) * self._f_on_top
        touched = np.maximum(top, self._load_of_b() - share_f + more_e)
        touched = np.maximum(touched, self._of_f(holders) - share_f + less_f)
        touched[self._e_on_b] = HUGE
        with_e = self._of_e(holders) - share_e + more_e
        without_e = np.where(self._e_on_rank, 0, self._others[:, None]).max(2)[..., None]
        heaviest = np.maximum(touched, np.maximum(with_e, without_e))
        return Changes(heaviest, touched, self._copy_crossings(), 1)

    def change(self, place: np.ndarray, in_layer: np.ndarray) -> None:
        """Make one change in ``slots``, in the layers of the bool ``in_layer`` ``[L]``.

        ``place`` int64 ``[L]`` counts all swaps and then all copies.
        """
        layer = np.nonzero(in_layer)[0]
        is_copy, place = np.divmod(place[layer], self._e.shape[1] * self._f.shape[1])
        e, f = np.divmod(place, self._f.shape[1])
        self._flat[layer, self._p[layer, f]] = self._e[layer, e]
        self._slots[layer, self._top[layer, 0], e] = np.where(
            is_copy, self._e[layer, e], self._f[layer, f]
        )

    def _of_e(self, table: np.ndarray) -> np.ndarray:
        return np.take_along_axis(table, self._e, 1)[:, :, None]

    def _of_f(self, table: np.ndarray) -> np.ndarray:
        return np.take_along_axis(table, self._f, 1)[:, None]

    def _top_load(self) -> np.ndarray:
        return self.top_load[:, None, None]

    def _load_of_b(self) -> np.ndarray:
        return np.take_along_axis(self._loads, self._b, 1)[:, None]

    def _heaviest_holders(self) -> np.ndarray:
        """``[L, E]``: load of the heaviest rank but the top that holds each expert, or 0."""
        rising = self._slots[self._layer, self._order]  # [L, R, S]
        loads = np.take_along_axis(self._others, self._order, 1)
        # The top, which comes last with load 0, goes first; of the others the last one stays.
        holders = np.zeros(self._share.shape)
        holders[self._layer[..., None], np.roll(rising, 1, 1)] = np.roll(loads, 1, 1)[..., None]
        return holders

    def _swap_crossings(self, given: np.ndarray) -> np.ndarray | float:
        if self._rises is None:
            return 0.0
        rises = self._rises
        b_node, top_node = (ranks // self._ranks_per_node for ranks in (self._b, self._top))
        e_moves = rises.on(rises.arrives, b_node[:, None], self._e[..., None])
        e_moves = e_moves + rises.on(rises.leaves, top_node, self._e)[..., None]
        f_moves = rises.on(rises.arrives, top_node, self._f)
        f_moves = (f_moves + rises.on(rises.leaves, b_node, self._f))[:, None]
        crossings = np.where((b_node == top_node)[:, None], 0, e_moves + f_moves)
        # Of one group, what comes and what goes make up for each other.
        of_e, of_f = rises.group[self._e][..., None], rises.group[self._f][:, None]
        layer, e, f = np.nonzero((of_e == of_f) & (b_node != top_node)[:, None])
        group, net = of_e[layer, e, 0], given[layer, e, f]
        comes = rises.traffic.rises(layer, b_node[layer, f], group, net)
        crossings[layer, e, f] = comes + rises.traffic.rises(layer, top_node[layer, 0], group, -net)
        return crossings

    def _copy_crossings(self) -> np.ndarray | float:
        if self._rises is None:
            return 0.0
        rises, b_node = self._rises, self._b // self._ranks_per_node
        e_gains = rises.on(rises.gains, b_node[:, None], self._e[..., None])
        return e_gains + rises.on(rises.loses, b_node, self._f)[:, None]

    def _find_rises(self, loads: np.ndarray, cost: CostModel) -> "_Rises":
        (num_layers, num_experts), num_nodes = loads.shape, cost.num_nodes
        self._ranks_per_node = self._slots.shape[1] // num_nodes
        layer, node, _ = np.ogrid[:num_layers, :num_nodes, :1]
        group = np.arange(num_experts) // (num_experts // cost.num_groups)
        held = np.zeros((num_layers, num_nodes, num_experts))
        np.add.at(held, (layer, node, self._slots.reshape(num_layers, num_nodes, -1)), 1)
        now = traffic(loads, self._slots, cost)
        rise = partial(now.rises, layer, node, group)
        # Where there can be no replica more, or none less, the change is ruled out anyhow.
        share = self._share[:, None]
        more, less = (
            np.where(table < HUGE, table, self._share)[:, None]
            for table in (self._more, self._less)
        )
        lighter, heavier = held * (share - more), held * (less - share)
        falls, grows = rise(-lighter), rise(heavier)
        return _Rises(
            arrives=rise(share),
            leaves=rise(-share),
            gains=falls.sum(1, keepdims=True) - falls + rise(more - lighter),
            loses=grows.sum(1, keepdims=True) - grows + rise(heavier - less),
            group=group,
            traffic=now,
        )


class _Rises(NamedTuple):
    """How much crossings rise, ``[L, N, E]``, when a replica of an expert, as it is,

    - comes to the node (``arrives``) or goes from it (``leaves``),
    - or is made there (``gains``) or removed there (``loses``), its load going from or to the
      others. ``group``: int64 ``[E]``.
    """

    arrives: np.ndarray
    leaves: np.ndarray
    gains: np.ndarray
    loses: np.ndarray
    group: np.ndarray
    traffic: Traffic

    @staticmethod
    def on(table: np.ndarray, node: np.ndarray, expert: np.ndarray) -> np.ndarray:
        """Of each expert on each node; both ``[L, ...]``, and broadcast."""
        layer = np.arange(len(table)).reshape(-1, *[1] * (node.ndim - 1))
        return table[layer, node, expert]
