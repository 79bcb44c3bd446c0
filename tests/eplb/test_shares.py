"""Uneven splits against linear programming, and what every split must be."""

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from eplb import Placement, balanced_shares, even_shares, rank_loads, rebalance, shared_slot_loads
from tests.eplb.placements import random_placement


def _least_max_load(experts: np.ndarray, loads: np.ndarray, num_ranks: int) -> float:
    """Columns: tokens of each slot, and the largest load of a rank, which is minimised."""
    num_slots = len(experts)
    of_rank = np.arange(num_slots) // (num_slots // num_ranks) == np.arange(num_ranks)[:, None]
    of_expert = experts == np.arange(len(loads))[:, None]
    result = linprog(
        np.arange(num_slots + 1) == num_slots,
        A_ub=np.hstack([of_rank, -np.ones((num_ranks, 1))]),
        b_ub=np.zeros(num_ranks),
        A_eq=np.hstack([of_expert, np.zeros((len(loads), 1))]),
        b_eq=loads,
    )
    assert result.status == 0, result.message
    return float(result.fun)


def _check(placement: Placement, loads: torch.Tensor) -> None:
    shares = balanced_shares(placement, loads)
    slot_loads = shared_slot_loads(loads, placement, shares)
    sums = torch.zeros(loads.shape, dtype=torch.float64)
    sums.scatter_add_(1, placement.physical_to_logical, shares)
    assert torch.allclose(sums, torch.ones_like(sums), atol=1e-12)
    assert ((shares >= 0) & (shares <= 1 + 1e-12)).all()
    most = rank_loads(slot_loads, placement.num_ranks).amax(1)
    for layer, experts in enumerate(placement.physical_to_logical.numpy()):
        least = _least_max_load(experts, loads[layer].double().numpy(), placement.num_ranks)
        assert abs(float(most[layer]) - least) <= 2e-4 * least + 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_no_split_is_better(seed: int):
    generator = torch.Generator().manual_seed(seed)
    placement = random_placement(seed, num_layers=4, num_ranks=5, num_experts=11)
    _check(placement, torch.randint(0, 1000, (4, 11), generator=generator))
    skewed = torch.rand(4, 11, generator=generator) ** 6
    _check(placement, skewed)


def test_no_split_of_a_large_placement_is_better():
    generator = torch.Generator().manual_seed(0)
    loads = torch.rand(3, 64, generator=generator) ** 4
    placement = rebalance(loads, num_slots=96, num_ranks=24)
    _check(placement, loads * (0.5 + torch.rand(3, 64, generator=generator)))


def test_water_runs_along_a_ring():
    """Each expert on two neighbours: all the load of one spreads over every rank."""
    table = torch.tensor([[expert for rank in range(12) for expert in (rank, (rank - 1) % 12)]])
    loads = torch.full((1, 12), 10.0)
    loads[0, 3] = 500
    _check(Placement(table, 12, 12), loads)


def test_layers_without_replicas_or_load():
    table = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 2]])
    with pytest.raises(ValueError, match="expert 3 of layer 1"):
        Placement(table, 4, 2)
    alone = Placement(torch.tensor([[0, 1, 2, 3], [3, 1, 2, 0]]), 4, 2)
    assert balanced_shares(alone, torch.rand(2, 4)).tolist() == [[1] * 4] * 2
    doubled = Placement(torch.tensor([[0, 1, 0, 2], [0, 1, 2, 1]]), 3, 2)
    idle = balanced_shares(doubled, torch.zeros(2, 3))
    assert torch.allclose(idle, even_shares(doubled))
    hot = balanced_shares(doubled, torch.tensor([[8, 6, 2], [6, 8, 2]]))
    # Rank loads of 8 each: experts 1 and 2 fill 6 and 2 of them. Then 2 + 6 of 8 tokens; 2 + 6.
    assert torch.allclose(hot, torch.tensor([[0.25, 1, 0.75, 1], [1, 0.25, 1, 0.75]]).double())


def test_loads_of_another_model_are_refused():
    placement = random_placement(0)
    with pytest.raises(ValueError, match=r"loads: \[2, 9\] given.*\[2, 10\]"):
        balanced_shares(placement, torch.ones(2, 9))
    with pytest.raises(ValueError, match=r"loads: \[2, 9\] given"):
        shared_slot_loads(torch.ones(2, 9), placement, even_shares(placement))
