"""What no placement can beat: lower bounds of the load of a layer's heaviest rank.

Shape letters: L rows (a layer, or a layer's share of a node), E experts, R ranks, S slots per rank,
P = R * S slots. All arrays numpy.
"""

import numpy as np

from eplb.replicate import count_replicas, replicate

NUM_SIZES = 16  # how many sizes of sets of heaviest slots are looked at, where each costs


def bound_for_any_replicas(loads: np.ndarray, num_slots: int, num_ranks: int) -> np.ndarray:
    """``[L]``: the larger of the mean load of a rank and the least possible load of a hot slot.

    The second is the largest share of an expert when the slots are shared out so that it is as
    small as can be, which the greedy rule achieves. Args: ``loads`` ``[L, E]`` above 0.
    """
    counts = count_replicas(replicate(loads, num_slots, num_ranks), loads.shape[1])
    return np.maximum(loads.sum(1) / num_ranks, (loads / counts).max(1))


def bound_for_slots(slot_loads: np.ndarray, num_ranks: int) -> np.ndarray:
    """``[L]``: a bound for given replica counts, so for the loads of slots, ``[L, P]``.

    The largest of two bounds, which both look at the h heaviest slots, of any number up to R:

    - They lie on some m ranks, m <= h, which have m * S - h slots more, at best the lightest ones.
      The mean over those ranks, at the best m. This holds the mean of all ranks, too.
    - Two of them meet, or they have (S - 1) * h slots beside them, and the heaviest of these is at
      least the one which that many slots do not exceed. It meets at least the h-th heaviest slot,
      and beside the two there are S - 2 more. With two slots a rank no bound can be higher.
    """
    num_rows, num_slots = slot_loads.shape
    slots_per_rank = num_slots // num_ranks
    rising = np.sort(slot_loads, axis=1)
    lightest = np.zeros((num_rows, num_slots + 1))  # [:, n]: load of the n lightest slots
    rising.cumsum(1, out=lightest[:, 1:])
    totals = lightest[:, -1:]
    heaviest = totals - lightest[:, ::-1]
    # 1. For some h and every m.
    size = np.unique(np.linspace(1, num_ranks, NUM_SIZES).astype(np.int64))[:, None]
    ranks = np.arange(1, num_ranks + 1)
    others = ranks * slots_per_rank - size  # [h, m]
    means = (heaviest[:, size] + lightest[:, np.maximum(others, 0)]) / ranks
    means[:, (others < 0) | (ranks > size)] = np.inf
    bound = np.maximum(means.min(2).max(1), totals[:, 0] / num_ranks)
    # 2. For every h.
    if slots_per_rank == 1:
        return bound
    beside = rising[:, (slots_per_rank - 1) * ranks - 1]
    meetings = rising[:, num_slots - ranks] + beside + lightest[:, slots_per_rank - 2, None]
    return np.maximum(bound, meetings.max(1))
