"""How to split an expert's tokens over its replicas so that ranks are evenly loaded.

An even split ignores what else a replica's rank has to do; this one gives more to replicas on
light ranks. The same loads give the same split wherever it is computed.

Shape letters: L layers, E experts, R ranks, P slots; J experts with replicas, at most, in any
layer, and X replicas, at most, of any expert.
"""

import numpy as np
import torch

from eplb.balance import as_loads, check_loads
from eplb.placement import Placement

MAX_SWEEPS = 300
DRY = 1e300  # ground that nothing is poured on
STEADY = 1e-5  # of the mean: where no rank's load changes by more in a sweep, the split is found


def even_shares(placement: Placement) -> torch.Tensor:
    """The split where an expert's replicas get the same; float64 ``[L, P]``."""
    counts = placement.replica_counts.gather(1, placement.physical_to_logical)
    return counts.double().reciprocal()


def balanced_shares(placement: Placement, loads: torch.Tensor) -> torch.Tensor:
    """The split under which the heaviest rank is as light as it can be with this placement.

    Args: ``loads`` ``[L, E]``, any dtype, 0 or more.
    Returns float64 ``[L, P]``: the share of its expert's tokens that each slot gets, 0 to 1; the
    shares of an expert sum to 1.

    Expert by expert, the tokens are poured onto its ranks like water, to one level wherever any
    arrive. Each pouring lowers the sum of squares of the ranks' loads; where none does, that sum
    is least, and the loads are then as even as the flow of tokens allows, the heaviest included.
    """
    check_loads(loads, placement)
    array = as_loads(loads, "loads")
    pools = _Pools(placement, array)
    steady = STEADY * array.sum(1, keepdims=True) / placement.num_ranks
    layers = np.arange(len(array))  # that are not steady yet
    for _ in range(MAX_SWEEPS):
        before = pools.levels[layers]
        pools.pour_all(layers)
        layers = layers[(np.abs(pools.levels[layers] - before) > steady[layers]).any(1)]
        if not len(layers):
            break
    return torch.from_numpy(pools.shares())


class _Pools:
    """Loads of the ranks, ``levels`` ``[L, R + 1]``, and of the replicas, ``[J, L, X]``.

    Experts with replicas come in falling order of load. Where a layer has fewer of them, or an
    expert fewer replicas, the rank is R and the slot P, which nothing is poured on.
    """

    def __init__(self, placement: Placement, loads: np.ndarray) -> None:
        counts, num_ranks = placement.replica_counts.numpy(), placement.num_ranks
        self._layer = np.arange(len(loads))[:, None]
        self._shares = even_shares(placement).numpy()
        # 1. [L, J, X] slots of the experts with replicas, -1 where there is none.
        order = np.argsort(-np.where(counts > 1, loads, 0), axis=1, kind="stable")
        order = order[:, : max(1, (counts > 1).sum(1).max())]
        slots = placement.logical_to_physical.numpy()[self._layer, order]
        has_replicas = np.take_along_axis(counts, order, 1) > 1
        exists = (slots >= 0) & has_replicas[..., None]
        # 2. [J, L, X], with the layer's experts in turn.
        self._exists = exists.swapaxes(0, 1)
        self._slots = np.where(exists, slots, placement.num_slots).swapaxes(0, 1)
        self._ranks = self._slots // placement.num_slots_per_rank
        self._totals = np.take_along_axis(loads, order, 1).T  # [J, L]
        even = (loads / counts)[self._layer, order][..., None]
        self._parts = np.where(exists, even, 0).swapaxes(0, 1)
        # 3. [L, R + 1]
        slot_loads = np.take_along_axis(loads, placement.physical_to_logical.numpy(), 1)
        rank_loads = (slot_loads * self._shares).reshape(len(loads), num_ranks, -1).sum(2)
        self.levels = np.pad(rank_loads, ((0, 0), (0, 1)))

    def pour_all(self, layers: np.ndarray) -> None:
        """Pour every expert of some layers anew, once."""
        for ranks, exists, parts, total in zip(
            self._ranks, self._exists, self._parts, self._totals, strict=True
        ):
            place, is_one = (layers[:, None], ranks[layers]), exists[layers]
            ground = np.where(is_one, self.levels[place] - parts[layers], DRY)
            poured = _fill(ground, total[layers])
            parts[layers] = poured
            self.levels[place] = np.where(is_one, ground + poured, 0)

    def shares(self) -> np.ndarray:
        """``[L, P]``; even where a load is too small to be told from the others' rounding."""
        shares = np.pad(self._shares, ((0, 0), (0, 1)))
        for slots, parts in zip(self._slots, self._parts, strict=True):
            poured = parts.sum(1, keepdims=True)
            split = np.where(
                poured > 0, parts / np.maximum(poured, 1e-300), shares[self._layer, slots]
            )
            shares[self._layer, slots] = split
        return shares[:, :-1]


def _fill(ground: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """``[L, X]``: water on each place when ``amount`` ``[L]`` is poured over ``ground``."""
    rising = np.sort(ground, 1)
    num_wet = np.arange(1, ground.shape[1] + 1)
    levels = (amount[:, None] + rising.cumsum(1)) / num_wet  # if the n lowest places get wet
    wet = (rising < np.minimum(levels, DRY)).sum(1, keepdims=True)
    water = np.take_along_axis(levels, np.maximum(wet - 1, 0), 1) - ground
    return np.where(ground < DRY, np.maximum(water, 0), 0)


def shared_slot_loads(
    loads: torch.Tensor, placement: Placement, shares: torch.Tensor
) -> torch.Tensor:
    """float64 ``[L, P]``: tokens of each slot, of ``loads`` ``[L, E]``, split by ``shares``."""
    check_loads(loads, placement)
    return loads.cpu().double().gather(1, placement.physical_to_logical) * shares
