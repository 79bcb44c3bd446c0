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

from typing import NamedTuple

import numpy as np

from eplb.cost import CostModel, traffic
from eplb.replicate import count_replicas

HUGE = 1e60  # a load that rules a change out; finite, so that sums of it are no NaN
PARTNER_SLOTS = 256  # slots of light ranks that are looked at


class Changes(NamedTuple):
    """For each e and f, ``[L, S, Q]``.

    ``heaviest``: load of the heaviest of all ranks after the change; ``touched``: of the heaviest
    that it changed for the worse, or the top; neither is underestimated. ``crossings``: by how
    much they rise, to first order; 0 where they have no price. ``moves``: experts to fetch.
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
        self._slopes = self._find_slopes(loads, cost) if cost.price_per_crossing else None

    def swaps(self) -> Changes:
        """e and f change places."""
        share_e, share_f = self._of_e(self._share), self._of_f(self._share)
        given = share_e - share_f
        touched = np.maximum(self._top_load() - given, self._load_of_b() + given)
        touched[self._e_on_b | self._f_on_top] = HUGE
        heaviest = np.maximum(touched, self._others.max(1)[:, None, None])
        crossings: np.ndarray | float = 0.0
        if self._slopes:
            top = self._slopes.on_top
            e_moves = self._slopes.e_on_b - self._of_e(top)
            f_moves = self._of_f(top) - self._slopes.f_on_b
            crossings = share_e * e_moves + share_f * f_moves
        return Changes(heaviest, touched, crossings, 2)

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
        crossings: np.ndarray | float = 0.0
        if self._slopes:
            mean = self._slopes.mean
            e_comes = self._slopes.e_on_b - self._of_e(mean)
            f_goes = self._of_f(mean) - self._slopes.f_on_b
            crossings = more_e * e_comes + less_f * f_goes
        return Changes(heaviest, touched, crossings, 1)

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

    def _find_slopes(self, loads: np.ndarray, cost: CostModel) -> "_Slopes":
        (_, num_ranks, slots_per_rank), num_experts = self._slots.shape, loads.shape[1]
        by_node = traffic(loads, self._slots, cost).slopes
        by_node = by_node.repeat(num_experts // cost.num_groups, 2)  # [L, N, E]
        ranks_per_node = num_ranks // cost.num_nodes
        node = np.arange(num_ranks * slots_per_rank) // (ranks_per_node * slots_per_rank)
        here = by_node[self._layer, node, self._flat]  # [L, P]
        cell = self._layer * num_experts + self._flat
        sums = np.bincount(cell.ravel(), here.ravel(), loads.size).reshape(loads.shape)
        node_of_b = self._b // ranks_per_node
        return _Slopes(
            on_top=by_node[self._layer[:, 0], self._top[:, 0] // ranks_per_node],
            mean=sums * self._share / loads,
            e_on_b=by_node[self._layer[..., None], node_of_b[:, None], self._e[:, :, None]],
            f_on_b=by_node[self._layer, node_of_b, self._f][:, None],
        )


class _Slopes(NamedTuple):
    """How much crossings rise for each unit of load of an expert that comes to the node of

    - the top, ``on_top`` ``[L, E]``, or its own slots in the mean, ``mean`` ``[L, E]``;
    - b, for e in ``e_on_b`` ``[L, S, Q]`` and for f in ``f_on_b`` ``[L, 1, Q]``.
    """

    on_top: np.ndarray
    mean: np.ndarray
    e_on_b: np.ndarray
    f_on_b: np.ndarray
