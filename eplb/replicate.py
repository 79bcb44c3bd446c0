"""How many replicas each expert gets. Knows nothing of ranks but how many replicas one can have.

Two rules. The greedy one makes the largest load of a slot as small as it can be; it needs many
replicas of the hottest experts. The other stops at a given load, and spends what is left on other
experts: where two hot slots would have to meet on a rank, fewer and larger ones balance better.

Shape letters: L rows (a layer, or a layer's share of a node), E experts, P slots. All arrays numpy.
"""

import numpy as np


def replicate(loads: np.ndarray, num_slots: int, max_replicas: int) -> np.ndarray:
    """Replicas by which the largest load of a slot is least: each to where that load is now.

    Args: ``loads`` ``[L, E]`` above 0; ``max_replicas`` of an expert, at least ``num_slots / E``.
    Returns int64 ``[L, P]``: the expert of each slot, experts 0 to E - 1 first and then the added
    ones in order. In float32 and with ties to the lower expert, as DeepSeek's EPLB does it, so
    that both agree to the last replica.
    """
    num_rows, num_experts = loads.shape
    total = loads.astype(np.float32).ravel()
    slot_load, counts = total.copy(), np.ones_like(total)
    experts = np.empty((num_rows, num_slots), np.int64)
    experts[:, :num_experts] = np.arange(num_experts)
    row_starts = np.arange(num_rows) * num_experts
    for slot in range(num_experts, num_slots):
        experts[:, slot] = slot_load.reshape(loads.shape).argmax(1)
        at = experts[:, slot] + row_starts
        counts[at] += 1
        slot_load[at] = np.where(counts[at] < max_replicas, total[at] / counts[at], -1)
    return experts


def replicate_to_level(
    loads: np.ndarray, level: np.ndarray, first: np.ndarray, num_slots: int, max_replicas: int
) -> np.ndarray:
    """As many replicas as keep slots at or below a level, and what is left in turn to others.

    Args: ``loads`` ``[L, E]``; ``level`` ``[L]``, a load of a slot; ``first`` int64 ``[L]``, the
        place among the experts in rising order of load from where the slots left over are given,
        one each, going round.
    Returns int64 ``[L, P]`` as ``replicate`` does, by expert; rows of -1 where the level needs
    more slots than there are.
    """
    num_experts = loads.shape[1]
    counts = np.clip(np.ceil(loads / level[:, None]), 1, max_replicas).astype(np.int64)
    spare = num_slots - counts.sum(1)
    possible = spare >= 0
    turn = (first[:, None] + np.arange(num_experts)) % num_experts
    order = np.take_along_axis(loads.argsort(1, kind="stable"), turn, 1)
    while (spare > 0).any():
        has_room = np.take_along_axis(counts, order, 1) < max_replicas
        given = has_room & (has_room.cumsum(1) <= spare[:, None])
        np.put_along_axis(counts, order, np.take_along_axis(counts, order, 1) + given, 1)
        spare -= given.sum(1)
    experts = np.full((len(loads), num_slots), -1)
    which = np.tile(np.arange(num_experts), possible.sum())
    experts[possible] = which.repeat(counts[possible].ravel()).reshape(-1, num_slots)
    return experts


def count_replicas(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """int64 ``[L, E]``: slots of each expert; ``experts`` int64 ``[L, P]``."""
    row_starts = np.arange(len(experts))[:, None] * num_experts
    counts = np.bincount((experts + row_starts).ravel(), minlength=len(experts) * num_experts)
    return counts.reshape(len(experts), num_experts)
