"""Which rank each slot goes to, once it is known how many replicas an expert has.

1. ``pack_greedily``: the heaviest first, each to the lightest rank with room; as DeepSeek's EPLB
   packs, so that what follows starts from its result and only ever betters it.
2. ``separate``: swaps replicas that met on a rank apart.
3. ``refold``: takes one slot out of every rank and hands them out anew, the heaviest to the
   emptiest rank, again and again with other slots. Of all ways to hand those slots out, none has
   a smaller maximum, so no round makes a row worse; a round costs two sorts for all layers, where
   one pairwise exchange costs a look at every pair.

Shape letters: L rows (a layer, or a layer's share of a node), E experts, R ranks, S slots per rank,
P = R * S slots. All arrays numpy; ``slots`` int64 ``[L, R, S]`` holds experts.
"""

import numpy as np

ROUNDS = 64  # by then nearly every row is as good as it gets
ROUNDS_PER_LOOK = 4  # rows that are done leave the others, which costs a copy
PATIENCE = 8  # looks in a row without gain after which a row is done


def pack_greedily(experts: np.ndarray, slot_loads: np.ndarray, num_ranks: int) -> np.ndarray:
    """Slots in falling order of load, each to the lightest rank with room; ties to the first.

    Args: ``experts`` int64 ``[L, P]``; ``slot_loads`` ``[L, P]`` above 0. Sums are in float32.
    Returns ``slots``; two replicas of an expert may be on a rank.
    """
    num_rows, num_slots = experts.shape
    slots_per_rank = num_slots // num_ranks
    order = np.argsort(-slot_loads, axis=1, kind="stable")
    # 1. [P, L]: a step reads one contiguous row.
    experts = np.take_along_axis(experts, order, 1).T.copy()
    slot_loads = np.take_along_axis(slot_loads, order, 1).T.astype(np.float32)
    # 2. All ranks are empty: the first R slots go to one each.
    slots = np.empty((num_rows * num_ranks, slots_per_rank), np.int64)
    slots[:, 0] = experts[:num_ranks].T.ravel()
    loads = slot_loads[:num_ranks].T.copy()
    filled = np.ones(num_rows * num_ranks, np.int64)
    row_starts = np.arange(num_rows) * num_ranks
    # 3. The others, one at a time in all rows at once. A full rank counts as infinitely loaded.
    if slots_per_rank > 1:
        flat_slots, flat_loads = slots.ravel(), loads.ravel()  # views
        for step in range(num_ranks, num_slots):
            rank = loads.argmin(1) + row_starts
            place = filled[rank]
            flat_slots[rank * slots_per_rank + place] = experts[step]
            filled[rank] = place + 1
            is_full = place + 1 == slots_per_rank
            flat_loads[rank] = np.where(is_full, np.inf, flat_loads[rank] + slot_loads[step])
    return slots.reshape(num_rows, num_ranks, slots_per_rank)


def separate(slots: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """``slots`` with at most one replica of an expert on a rank.

    Args: ``shares`` ``[L, E]``, load of a slot of each expert. No expert has more than R replicas
        and a rank no more slots than there are experts; else there is no such placement.

    One at a time, a surplus replica changes places with the slot of another rank that leaves the
    heavier of the two lightest. Such a slot exists: some rank lacks the expert, and if everything
    on that one were unique and on the first rank too, the first would have no surplus.
    """
    slots = slots.copy()
    rows = np.nonzero(_surplus(slots).any((1, 2)))[0]
    while len(rows):
        part = slots[rows]
        _swap_one_apart(part, shares[rows])
        slots[rows] = part
        rows = rows[_surplus(part).any((1, 2))]
    return slots


def _surplus(slots: np.ndarray) -> np.ndarray:
    """bool ``[L, R, S]``: slots whose expert an earlier slot of their rank holds."""
    order = slots.argsort(-1, kind="stable")
    by_expert = np.take_along_axis(slots, order, -1)
    repeats = np.zeros(slots.shape, bool)
    repeats[..., 1:] = by_expert[..., 1:] == by_expert[..., :-1]
    surplus = np.empty_like(repeats)
    np.put_along_axis(surplus, order, repeats, -1)
    return surplus


def _swap_one_apart(slots: np.ndarray, shares: np.ndarray) -> None:
    """One swap in every row, in place; each row has a surplus replica."""
    num_rows, _, slots_per_rank = slots.shape
    rows = np.arange(num_rows)
    flat = slots.reshape(num_rows, -1)
    surplus = _surplus(slots)
    ours = surplus.reshape(num_rows, -1).argmax(1)
    rank, expert = ours // slots_per_rank, flat[rows, ours]
    slot_loads = np.take_along_axis(shares, flat, 1).reshape(slots.shape)
    loads = slot_loads.sum(2)
    # 1. A partner's rank lacks our expert; its expert is not on our rank, or surplus on its own.
    lacks_ours = (slots != expert[:, None, None]).all(2, keepdims=True)
    is_here = (slots[..., None] == slots[rows, rank][:, None, None]).any(-1)
    allowed = lacks_ours & (~is_here | surplus)
    # 2. The partner that leaves the heavier of the two ranks lightest.
    gain = shares[rows, expert][:, None, None] - slot_loads  # [L, R, S], from our rank to theirs
    heavier = np.maximum(loads[rows, rank][:, None, None] - gain, loads[..., None] + gain)
    theirs = np.where(allowed, heavier, np.inf).reshape(num_rows, -1).argmin(1)
    flat[rows, ours], flat[rows, theirs] = flat[rows, theirs], expert


def refold(slots: np.ndarray, shares: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """``slots`` with a maximum rank load that is nowhere larger, and near ``goal`` or below.

    Args: ``slots`` without two replicas on a rank, and it stays so; ``shares`` ``[L, E]``, load of
        a slot of each expert; ``goal`` ``[L]``: rows whose maximum is at or below are left alone.

    Loads are whole numbers inside, so that the result depends on no rounding: a slot is one number,
    its load above its expert, which a sort moves as one.
    """
    num_rows, num_ranks, slots_per_rank = slots.shape
    if slots_per_rank == 1:
        return slots
    codec = _Codec(shares, slots)
    result = codec.encode(slots)
    keys, goal = result.copy(), np.floor(goal * codec.scale)
    loads = codec.loads(keys).sum(0)  # [L, R]
    rows, best, idle = np.arange(num_rows), np.full(num_rows, np.inf), np.zeros(num_rows, np.int64)
    generator = np.random.default_rng(0)
    for round_idx in range(ROUNDS):
        if round_idx % ROUNDS_PER_LOOK == 0:
            maxima = loads.max(1)
            idle = np.where(maxima < best, 0, idle + 1)
            is_open = (maxima > goal) & (idle < PATIENCE)
            result[:, rows[~is_open]] = keys[:, ~is_open]
            rows, best, idle, goal = rows[is_open], maxima[is_open], idle[is_open], goal[is_open]
            keys, loads = keys[:, is_open], loads[is_open]
            if not len(rows):
                break
        # Each rank gives the slot of one of two columns; which, is drawn for all rows alike.
        first, second = generator.choice(slots_per_rank, 2, replace=False)
        takes_first = generator.random((num_ranks,)) < 0.5
        loads = _refold_once(keys, loads, codec, first, second, takes_first)
    result[:, rows] = keys
    return codec.decode(result)


class _Codec:
    """Slots as keys, int64 ``[S, L, R]``: load times 2^bits plus expert."""

    def __init__(self, shares: np.ndarray, slots: np.ndarray) -> None:
        num_rows, num_ranks, _ = slots.shape
        self.bits = max(shares.shape[1], num_ranks).bit_length()
        totals = np.take_along_axis(shares, slots.reshape(num_rows, -1), 1).sum(1)
        self.scale = 2.0 ** (60 - self.bits) / totals  # [L]; leaves room for a row's sum
        whole = np.rint(shares * self.scale[:, None]).astype(np.int64)
        self._keys = (whole << self.bits) | np.arange(shares.shape[1])

    def encode(self, slots: np.ndarray) -> np.ndarray:
        keys = np.take_along_axis(self._keys, slots.reshape(len(slots), -1), 1)
        return keys.reshape(slots.shape).transpose(2, 0, 1).copy()

    def decode(self, keys: np.ndarray) -> np.ndarray:
        return (keys & ((1 << self.bits) - 1)).transpose(1, 2, 0).copy()

    def loads(self, keys: np.ndarray) -> np.ndarray:
        return keys >> self.bits

    def sort_ranks(self, loads: np.ndarray) -> np.ndarray:
        """int64 ``[L, R]``: ranks by falling ``loads`` ``[L, R]``, as places in the flat array."""
        num_ranks = loads.shape[1]
        keys = (-loads << self.bits) | np.arange(num_ranks)
        keys.sort(1)
        return (keys & ((1 << self.bits) - 1)) + np.arange(0, loads.size, num_ranks)[:, None]


def _refold_once(
    keys: np.ndarray,
    loads: np.ndarray,
    codec: _Codec,
    first: int,
    second: int,
    takes_first: np.ndarray,
) -> np.ndarray:
    """One round, ``keys`` in place; returns the new ``loads`` of the ranks, ``[L, R]``.

    Rows where two replicas would meet stay as they are.
    """
    taken = np.where(takes_first, keys[first], keys[second])  # [L, R]
    left = loads - codec.loads(taken)
    given = np.empty_like(taken)
    given.ravel()[codec.sort_ranks(left)] = np.sort(taken, 1)  # the heaviest to the emptiest
    meets = ((keys == given).sum(0) > (taken == given)).any(1)
    if meets.any():
        given[meets] = taken[meets]
    keys[first] = np.where(takes_first, given, keys[first])
    keys[second] = np.where(takes_first, keys[second], given)
    return left + codec.loads(given)
