"""Which replica of an expert a token goes to: the table that a rank's router reads.

A table is int64 ``[L, E, W]``: token number t of a rank's batch that chose expert e goes to slot
``table[layer, e, t % W]``. W is the number of ways: 1 where a rank always uses the same replica.
The choice depends on the expert, the rank and the token's row, and on nothing else: so it needs no
counting, no word from other ranks and no random number, and a captured step makes it, too.

Shape letters: L layers, E experts, W ways, P slots; X replicas, at most, of any expert.
"""

from collections.abc import Callable

import torch

from eplb.placement import Placement
from eplb.shares import balanced_shares, even_shares

NUM_WAYS = 64  # a power of two; shares are multiples of 1 / NUM_WAYS
# Odd, so that ranks and experts which few tokens come from or go to start at different ways.
RANK_STRIDE, EXPERT_STRIDE = 5, 23

# A placement, this rank and loads [L, E], None where none are known -> this rank's table.
MakeTable = Callable[[Placement, int, torch.Tensor | None], torch.Tensor]


def static_table(placement: Placement, rank: int, loads: torch.Tensor | None) -> torch.Tensor:
    """``[L, E, 1]``: every rank uses one replica, its own if it has one (``slot_table``)."""
    return placement.slot_table(rank).unsqueeze(-1)


def balanced_table(placement: Placement, rank: int, loads: torch.Tensor | None) -> torch.Tensor:
    """``[L, E, NUM_WAYS]``: every rank splits an expert's tokens over its replicas so that under
    these loads the heaviest rank is as light as it can be; evenly where there are none."""
    shares = even_shares(placement) if loads is None else balanced_shares(placement, loads)
    return split_table(placement, rank, shares)


DISPATCH_ALGORITHMS: dict[str, MakeTable] = {"static": static_table, "balanced": balanced_table}


def split_table(placement: Placement, rank: int, shares: torch.Tensor) -> torch.Tensor:
    """``[L, E, NUM_WAYS]``, in which each slot has its share of its expert's ways.

    shares: ``[L, P]``, those of an expert sum to 1. Any NUM_WAYS tokens in a row have them exactly,
    once rounded; fewer in a row nearly.
    """
    slots = placement.logical_to_physical  # [L, E, X]
    split = shares.gather(1, slots.clamp(min=0).flatten(1)).view(slots.shape)
    ends = _whole_ways(split.masked_fill(slots < 0, 0)).cumsum(-1)
    # Bits reversed, ways that follow each other lie far apart, so with different replicas.
    order = torch.tensor([_reversed(way) for way in range(NUM_WAYS)])
    shift = rank * RANK_STRIDE + torch.arange(placement.num_experts) * EXPERT_STRIDE
    places = order[(torch.arange(NUM_WAYS) + shift.unsqueeze(1)) % NUM_WAYS]  # [E, W]
    places = places.expand(placement.num_layers, -1, -1).contiguous()
    return slots.gather(-1, torch.searchsorted(ends, places, right=True))


def _whole_ways(split: torch.Tensor) -> torch.Tensor:
    """int64 ``[L, E, X]``: shares as numbers of ways, which sum to all of them; those which lose
    most by rounding down get one more."""
    exact = split * NUM_WAYS
    whole = exact.floor().long()
    by_loss = (whole - exact).argsort(dim=-1, stable=True).argsort(dim=-1)
    return whole + (by_loss < NUM_WAYS - whole.sum(-1, keepdim=True))


def _reversed(way: int) -> int:
    num_bits = NUM_WAYS.bit_length() - 1
    return int(f"{way:0{num_bits}b}"[::-1], 2)
