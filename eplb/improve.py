"""A placement nearly as good as a new one that moves few experts.

Starts from the placement in force and changes one thing at a time on the heaviest rank of a layer,
in all layers at once: what takes most off, for each expert moved and after its price. That finds
the few changes that matter most. Layers which it leaves short of their bound start once more from
the replica counts that the new loads ask for, which it would have to pass through worse placements
to reach. The cheapest placement met on either way is the result.

Shape letters: L layers, E experts, R ranks, S slots per rank, P = R * S slots. Arrays are numpy.
"""

import numpy as np
import torch

from eplb.balance import as_loads, check_loads
from eplb.bounds import bound_for_any_replicas
from eplb.changes import HUGE, Changes, View
from eplb.cost import CostModel, costs
from eplb.migrate import keep_slots
from eplb.place import max_rank_load
from eplb.placement import Placement
from eplb.recount import recount

CLOSE = 1e-3  # layers this near their bound are good enough; less relief is not worth a step
TOUCHED_WEIGHT = 0.1  # of relief of the ranks touched, against relief of the heaviest of all


def improve(
    current: Placement,
    loads: torch.Tensor,
    *,
    max_moves: int | None = None,
    cost: CostModel | None = None,
) -> Placement:
    """``current``, changed where that makes a layer cheaper under other loads.

    Args:
        loads: ``[L, E]``, any dtype, 0 or more.
        max_moves: how many experts ranks may have to fetch in a layer; None is no limit.
        cost: what a layer costs, with moves; by default the load of its heaviest rank.

    Experts that stay on a rank stay in their slot; layers without any load stay as they are.
    Raises ValueError for sizes that do not fit.
    """
    check_loads(loads, current)
    cost, array = cost or CostModel(), as_loads(loads, "loads")
    if max_moves is not None and max_moves < 0:
        raise ValueError(f"max_moves: {max_moves} given, 0 or more needed")
    cost.check(current.num_experts, current.num_ranks)
    slots = current.physical_to_logical.numpy().reshape(len(array), current.num_ranks, -1)
    most = current.num_slots if max_moves is None else max_moves
    search = _Search(array, slots, cost, most)
    search.leave(~(loads.cpu() > 0).any(1).numpy())
    search.walk(slots, with_copies=True)
    search.walk(recount(array, slots), with_copies=False)
    table = torch.from_numpy(search.best.reshape(len(array), -1))
    return keep_slots(current, Placement(table, current.num_experts, current.num_ranks))


class _Search:
    """Walks through placements, and the best of all that they met: ``best`` ``[L, R, S]``."""

    def __init__(self, loads: np.ndarray, slots: np.ndarray, cost: CostModel, most: int) -> None:
        self._loads, self._cost, self._most = loads, cost, most
        self.best, self._best_cost = slots.copy(), costs(loads, slots, cost)
        bound = bound_for_any_replicas(loads, slots[0].size, slots.shape[1])
        self._goal = bound * (1 + CLOSE)
        # Which rank held what: [L, R, E].
        self._held = np.zeros((*slots.shape[:2], loads.shape[1]), bool)
        np.put_along_axis(self._held, slots, True, 2)

    def leave(self, layers: np.ndarray) -> None:
        """Count layers, bool ``[L]``, as good enough."""
        self._goal[layers] = np.inf

    def walk(self, slots: np.ndarray, with_copies: bool) -> None:
        """Change ``slots`` step by step in the layers whose best is not good enough."""
        rows = np.nonzero(max_rank_load(self._loads, self.best) > self._goal)[0]
        slots, idle = slots[rows], np.zeros(len(rows), np.int64)
        while len(rows):
            view = View(self._loads[rows], slots, self._cost)
            moves, is_better = self._record(rows, slots, view.cost)
            # A rank may be one of many as heavy, so a gain may need as many steps to show.
            idle = np.where(is_better, 0, idle + 1)
            kinds = [view.swaps(), view.copies()] if with_copies else [view.swaps()]
            scores = np.stack([self._scores(view, kind, moves) for kind in kinds], 1)
            scores = scores.reshape(len(rows), -1)
            choice = scores.argmax(1)
            goes_on = scores[np.arange(len(rows)), choice] > -HUGE
            goes_on &= (view.top_load > self._goal[rows]) & (idle <= slots.shape[1])
            view.change(choice, goes_on)
            rows, slots, idle = rows[goes_on], slots[goes_on], idle[goes_on]

    def _record(
        self, rows: np.ndarray, slots: np.ndarray, cost: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Moves so far, int64 ``[L]``, and where ``slots`` are the best that is allowed; kept.

        cost: of the slots ``[L]``, without that of moving.
        """
        moves = (~np.take_along_axis(self._held[rows], slots, 2)).sum((1, 2))
        cost = cost + self._cost.price_per_move * moves
        is_better = (cost < self._best_cost[rows]) & (moves <= self._most)
        self.best[rows[is_better]] = slots[is_better]
        self._best_cost[rows[is_better]] = cost[is_better]
        return moves, is_better

    def _scores(self, view: View, changes: Changes, moves: np.ndarray) -> np.ndarray:
        """``[L, S, Q]``: the merit of each change; -HUGE where it is not worth its price."""
        top = view.top_load[:, None, None]
        moving = self._cost.price_per_move * changes.moves
        price = moving + self._cost.price_per_crossing * changes.crossings
        relief = top - changes.touched
        is_allowed = (moves + changes.moves <= self._most)[:, None, None]
        is_worth = is_allowed & (relief - price > CLOSE * top)
        merit = top - changes.heaviest + TOUCHED_WEIGHT * relief - price
        return np.where(is_worth, merit / changes.moves, -HUGE)
