"""The placement in force with the replica counts that new loads ask for, and little else changed.

Shape letters: L layers, E experts, R ranks, S slots per rank, P = R * S slots. All arrays numpy.
"""

import numpy as np

from eplb.replicate import count_replicas, replicate


def recount(loads: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """``slots`` int64 ``[L, R, S]`` with surplus replicas replaced by those that are missing.

    Args: ``loads`` ``[L, E]`` above 0. What is missing and surplus is against the greedy counts.
    The hottest expert goes first, each to the rank that is lightest without the replica it
    replaces; one that is on all ranks with a surplus replica already does without.
    """
    (num_layers, num_ranks, _), num_experts = slots.shape, loads.shape[1]
    slots, layer = slots.copy(), np.arange(num_layers)
    flat = slots.reshape(num_layers, -1)  # a view
    wanted = count_replicas(replicate(loads, flat.shape[1], num_ranks), num_experts)
    share = loads / wanted
    missing = wanted - count_replicas(flat, num_experts)  # below 0 where surplus
    refused = np.zeros(missing.shape, bool)
    while ((missing > 0) & ~refused).any():
        expert = np.where((missing > 0) & ~refused, share, -1).argmax(1)
        slot_loads = np.take_along_axis(share, flat, 1).reshape(slots.shape)
        without = slot_loads.sum(2, keepdims=True) - slot_loads
        is_surplus = np.take_along_axis(missing, flat, 1).reshape(slots.shape) < 0
        lacks = (slots != expert[:, None, None]).all(2, keepdims=True)
        without = np.where(is_surplus & lacks, without, np.inf).reshape(num_layers, -1)
        slot = without.argmin(1)
        is_free = np.isfinite(without[layer, slot])
        is_free &= (missing[layer, expert] > 0) & ~refused[layer, expert]
        refused[layer[~is_free], expert[~is_free]] = True
        rows, slot, expert = layer[is_free], slot[is_free], expert[is_free]
        missing[rows, flat[rows, slot]] += 1
        missing[rows, expert] -= 1
        flat[rows, slot] = expert
    return slots
