"""How far the ranks' clocks are apart, from messages sent back and forth.

As in NTP: the answer to a ping says when the other side got it, which was half a round trip ago; of
many pings the quickest tells most. Rank r asks the rank whose number is r without its highest bit,
so that all ranks know after ``log2`` of their number turns, at most as many hops from rank 0.
"""

import time
from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup

NUM_PINGS = 16

Now = Callable[[], int]


def clock_offset_ns(group: ProcessGroup | None, now: Now = time.perf_counter_ns) -> int:
    """What this rank's clock shows more than rank 0's. Collective; 0 without a group.

    Clocks that agree as well as the pings can tell count as the same: on one host they are.
    """
    if group is None:
        return 0
    rank, offset, bit = group.rank(), 0, 1
    while bit < group.size():
        if rank < bit and rank + bit < group.size():
            _answer(group, rank + bit, offset, now)
        elif bit <= rank < 2 * bit:
            offset = _ask(group, rank - bit, now)
        bit *= 2
    return offset


def _ask(group: ProcessGroup, other: int, now: Now) -> int:
    pings = []
    for _ in range(NUM_PINGS):
        sent = now()
        _send(group, other, sent)
        theirs = _receive(group, other)
        received = now()
        pings.append((received - sent, (sent + received) // 2 - theirs))
    round_trip, ahead = min(pings)
    if abs(ahead) <= round_trip // 2:
        ahead = 0
    return ahead + _receive(group, other)


def _answer(group: ProcessGroup, other: int, own_offset: int, now: Now) -> None:
    for _ in range(NUM_PINGS):
        _receive(group, other)
        _send(group, other, now())
    _send(group, other, own_offset)


def _send(group: ProcessGroup, other: int, value: int) -> None:
    group.send([torch.tensor([value], dtype=torch.int64)], other, 0).wait()


def _receive(group: ProcessGroup, other: int) -> int:
    value = torch.zeros(1, dtype=torch.int64)
    group.recv([value], other, 0).wait()
    return int(value)
