"""From loads to slots: replicas, packing, and other replica counts where those balance badly.

``place_greedily`` is DeepSeek EPLB's rule. ``place`` starts from its result, so that it is never
worse where that keeps replicas apart, and ends near what the slots allow.

Shape letters: L rows (a layer, or a layer's share of a node), E experts, R ranks, S slots per rank,
P = R * S slots. All arrays numpy; ``slots`` int64 ``[L, R, S]`` holds experts.
"""

import numpy as np

from eplb.bounds import bound_for_slots
from eplb.pack import pack_greedily, refold, separate
from eplb.replicate import count_replicas, replicate, replicate_to_level

CLOSE = 1e-3  # a row whose maximum is within this share of its bound is packed well enough
WORTHWHILE = 5e-3  # and within this share, other replica counts are not worth a trial
# Slots, over rows and trials, for which other replica counts are tried; a row gets one at least.
TRIAL_SLOTS = 1 << 13
# Loads of a slot that are tried as a level, as shares of the heaviest rank's; likeliest first.
LEVELS = np.array([0.85, 0.75, 0.95, 0.65, 0.55, 0.45])


def place_greedily(loads: np.ndarray, num_slots: int, num_ranks: int) -> np.ndarray:
    """DeepSeek EPLB's global rule; two replicas of an expert may be on a rank.

    Args: ``loads`` ``[L, E]`` above 0. Returns ``slots``.
    """
    experts = replicate(loads, num_slots, max_replicas=num_slots)
    return pack_greedily(experts, _slot_loads(loads, experts), num_ranks)


def place(
    loads: np.ndarray, num_slots: int, num_ranks: int, num_together: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Slots with no two replicas on a rank and a small maximum rank load, and that maximum.

    Args: ``loads`` ``[L, E]`` above 0; each ``num_together`` rows are a layer, of which only the
        maximum over its rows counts. S is at most E.
    Returns ``slots`` and the maxima, float64 ``[L]``.
    """
    experts = replicate(loads, num_slots, max_replicas=num_ranks)
    slot_loads = _slot_loads(loads, experts)
    packed = pack_greedily(experts, slot_loads, num_ranks)
    floor = np.maximum(loads.sum(1) / num_ranks, slot_loads.max(1))
    floor, bounds, greedy = (
        values.reshape(-1, num_together).max(1).repeat(num_together)
        for values in (floor, bound_for_slots(slot_loads, num_ranks), max_rank_load(loads, packed))
    )
    slots = _settle(loads, packed, _goal(bounds, CLOSE, greedy))
    maxima = max_rank_load(loads, slots)
    _try_other_counts(loads, slots, maxima, _goal(floor, WORTHWHILE, greedy))
    return slots, maxima


def max_rank_load(loads: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """float64 ``[L]``: load of the heaviest rank when replicas share evenly."""
    return _slot_loads(loads, slots.reshape(len(slots), -1)).reshape(slots.shape).sum(2).max(1)


def _slot_loads(loads: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """``[L, P]``: load of each slot, for ``experts`` int64 ``[L, P]``."""
    return np.take_along_axis(loads / count_replicas(experts, loads.shape[1]), experts, 1)


def _goal(bounds: np.ndarray, tolerance: float, greedy: np.ndarray) -> np.ndarray:
    """``[L]``: within the tolerance of the bounds, and not above what the greedy rule reaches."""
    return np.maximum(bounds, np.minimum(bounds * (1 + tolerance), greedy))


def _settle(loads: np.ndarray, packed: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """``slots`` from greedily packed ones, with the same replicas."""
    shares = loads / count_replicas(packed.reshape(len(packed), -1), loads.shape[1])
    return refold(separate(packed, shares), shares, goal)


def _try_other_counts(
    loads: np.ndarray, slots: np.ndarray, maxima: np.ndarray, goal: np.ndarray
) -> None:
    """Better ``slots`` and ``maxima``, in place, where larger hot slots pack better."""
    _, num_ranks, slots_per_rank = slots.shape
    num_slots, num_experts = num_ranks * slots_per_rank, loads.shape[1]
    rows = np.nonzero(maxima > goal)[0]
    if not len(rows):
        return
    most = len(LEVELS) * num_experts
    num_trials = min(max(1, TRIAL_SLOTS // (len(rows) * num_slots)), most)
    trial = np.tile(np.arange(num_trials), len(rows))
    rows = rows.repeat(num_trials)
    # A trial is a level and the expert from where on the slots left over are given.
    num_starts = -(-num_trials // len(LEVELS))
    first = trial // len(LEVELS) * num_experts // num_starts
    level = maxima[rows] * LEVELS[trial % len(LEVELS)]
    experts = replicate_to_level(loads[rows], level, first, num_slots, num_ranks)
    possible = experts[:, 0] >= 0
    rows, experts = rows[possible], experts[possible]
    slot_loads = _slot_loads(loads[rows], experts)
    bounds = bound_for_slots(slot_loads, num_ranks)
    hopeful = bounds < maxima[rows] * (1 - CLOSE)
    rows, experts, bounds = rows[hopeful], experts[hopeful], bounds[hopeful]
    if not len(rows):
        return
    packed = pack_greedily(experts, slot_loads[hopeful], num_ranks)
    tried = _settle(loads[rows], packed, bounds * (1 + CLOSE))
    tried_maxima = max_rank_load(loads[rows], tried)
    # The best trial of a row comes last, and the last one written stays.
    for at in np.argsort(-tried_maxima, kind="stable"):
        if tried_maxima[at] < maxima[rows[at]]:
            slots[rows[at]], maxima[rows[at]] = tried[at], tried_maxima[at]
