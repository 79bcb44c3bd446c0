"""Changing the placement in force: how good, how few moves, and what each change promises."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb import CostModel, Placement, count_moves, improve, rebalance
from eplb.changes import HUGE, View
from eplb.cost import costs, traffic
from eplb.place import max_rank_load
from eplb.recount import recount
from eplb.replicate import count_replicas, replicate
from tests.eplb.placements import random_placement, slots_of


def _drifting(num_layers: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    loads = torch.arange(1, num_experts + 1).double() ** -0.9
    order = torch.rand(num_layers, num_experts, generator=generator).argsort(1)
    loads = loads.expand(num_layers, -1).gather(1, order) * 1000
    noise = torch.randn(loads.shape, generator=generator, dtype=torch.float64)
    return loads, loads * torch.exp(0.3 * noise)


def _maxima(placement: Placement, loads: torch.Tensor) -> np.ndarray:
    return max_rank_load(loads.numpy(), slots_of(placement))


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_slots"),
    # Three slots a rank cannot be balanced without the replica counts that the new loads need.
    [(64, 16, 80), (64, 8, 72), (64, 24, 72)],
)
def test_nearly_as_good_as_anew_with_few_moves(num_experts, num_ranks, num_slots):
    loads, drifted = _drifting(12, num_experts)
    before = rebalance(loads, num_slots=num_slots, num_ranks=num_ranks)
    anew = rebalance(drifted, num_slots=num_slots, num_ranks=num_ranks)
    better = improve(before, drifted)
    assert _maxima(before, drifted).mean() > 1.15 * _maxima(anew, drifted).mean()
    assert _maxima(better, drifted).mean() < 1.005 * _maxima(anew, drifted).mean()
    moves = [count_moves(before, after).between_ranks.sum() for after in (better, anew)]
    assert moves[0] < 0.5 * moves[1]


def test_moves_are_limited_and_each_helps():
    loads, drifted = _drifting(8, 48)
    before = rebalance(loads, num_slots=60, num_ranks=12)
    last = _maxima(before, drifted).mean()
    for limit in (0, 1, 2, 5, 12, None):
        after = improve(before, drifted, max_moves=limit)
        moves = count_moves(before, after).between_ranks
        assert limit is None or (moves <= limit).all()
        assert (_maxima(after, drifted) <= _maxima(before, drifted)).all()
        assert _maxima(after, drifted).mean() < last or limit == 0
        last = _maxima(after, drifted).mean()
    assert torch.equal(
        improve(before, drifted, max_moves=0).physical_to_logical, before.physical_to_logical
    )


def test_moves_have_a_price():
    loads, drifted = _drifting(8, 48)
    before = rebalance(loads, num_slots=60, num_ranks=12)
    gains = []
    for price in (0.0, 1.0, 10.0, 1e6):
        cost = CostModel(price_per_move=price)
        after = improve(before, drifted, cost=cost)
        moves = count_moves(before, after).between_ranks.numpy()
        gain = _maxima(before, drifted) - _maxima(after, drifted)
        assert (gain >= price * moves - 1e-9).all()
        gains.append((moves.sum(), gain.sum()))
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] == (0, 0)
    assert gains[0][0] > gains[2][0] > 0


def test_experts_that_stay_keep_their_slot():
    loads, drifted = _drifting(8, 48)
    before = rebalance(loads, num_slots=60, num_ranks=12)
    after = improve(before, drifted)
    changed = (before.physical_to_logical != after.physical_to_logical).sum(1)
    assert torch.equal(changed, count_moves(before, after).between_ranks)
    assert torch.equal(
        after.physical_to_logical, improve(before, drifted.clone()).physical_to_logical
    )


def test_crossings_have_a_price():
    loads, drifted = _drifting(8, 64)
    router = {"num_groups": 8, "topk_group": 4, "num_experts_per_tok": 8}
    free = CostModel(num_nodes=4, **router)
    dear = CostModel(num_nodes=4, **router, price_per_crossing=5.0)
    before = rebalance(loads, num_slots=80, num_ranks=16, cost=dear)
    by_balance, by_both = (improve(before, drifted, cost=cost) for cost in (free, dear))
    array = drifted.numpy()
    assert (
        traffic(array, slots_of(by_both), dear).crossings.sum()
        < traffic(array, slots_of(by_balance), dear).crossings.sum()
    )
    assert (costs(array, slots_of(by_both), dear) <= costs(array, slots_of(before), dear)).all()
    assert (
        costs(array, slots_of(by_both), dear).sum() < costs(array, slots_of(by_balance), dear).sum()
    )


def test_a_good_placement_and_idle_layers_stay():
    loads, _ = _drifting(4, 64)
    before = rebalance(loads, num_slots=72, num_ranks=8)
    after = improve(before, loads)
    assert count_moves(before, after).between_ranks.sum() <= 4
    skewed = random_placement(0)
    loads = torch.tensor([[0.0] * 10, [9.0] + [1] * 9])
    moves = count_moves(skewed, improve(skewed, loads)).between_ranks
    assert moves[0] == 0
    assert moves[1] > 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(2, 4))
def test_every_change_is_as_good_as_it_says(seed: int, num_ranks: int, slots_per_rank: int):
    generator = np.random.default_rng(seed)
    num_experts = int(generator.integers(slots_per_rank, num_ranks * slots_per_rank + 1))
    placement = random_placement(
        seed,
        num_layers=1,
        num_ranks=num_ranks,
        num_experts=num_experts,
        slots_per_rank=slots_per_rank,
    )
    loads = generator.uniform(1, 10, (1, num_experts))
    view = View(loads, slots_of(placement).copy(), CostModel())
    kinds = [view.swaps(), view.copies()]
    said = np.stack([kind.heaviest for kind in kinds], 1).reshape(-1)
    touched = np.stack([kind.touched for kind in kinds], 1).reshape(-1)
    assert (touched <= said).all()
    for place in np.nonzero(said < HUGE / 2)[0]:
        slots = slots_of(placement).copy()
        view = View(loads, slots, CostModel())
        view.change(np.array([place]), np.array([True]))
        table = torch.from_numpy(slots.reshape(1, -1))
        after = Placement(table, num_experts, num_ranks)  # all experts there, replicas apart
        assert max_rank_load(loads, slots)[0] <= said[place] * (1 + 1e-9)
        is_swap = place < len(said) // 2
        moves = int(count_moves(placement, after).between_ranks)
        assert moves == (2 if is_swap else 1)
        if not is_swap:
            assert (after.replica_counts != placement.replica_counts).sum() == 2


@pytest.mark.parametrize("groups", [(2, 1), (4, 2)])
def test_crossings_rise_nearly_as_each_change_says(groups: tuple[int, int]):
    loads, _ = _drifting(1, 64)
    cost = CostModel(4, *groups, num_experts_per_tok=8, price_per_crossing=1)
    placement, array = rebalance(loads, num_slots=72, num_ranks=8, cost=cost), loads.numpy()
    view = View(array, slots_of(placement).copy(), cost)
    before = traffic(array, slots_of(placement), cost).crossings[0]
    num_swaps = view.swaps().heaviest.size
    for first, kind in ((0, view.swaps()), (num_swaps, view.copies())):
        said, found = [], []
        for place in np.nonzero(kind.heaviest.ravel() < HUGE / 2)[0][::3]:
            slots = slots_of(placement).copy()
            View(array, slots, cost).change(np.array([first + place]), np.array([True]))
            said.append(np.ravel(kind.crossings)[place])
            found.append(traffic(array, slots, cost).crossings[0] - before)
        assert len(said) > 20
        assert np.corrcoef(said, found)[0, 1] > 0.9


def test_recounting_takes_the_new_counts_and_moves_no_more():
    loads, drifted = _drifting(6, 48)
    before = rebalance(loads, num_slots=60, num_ranks=12)
    table = recount(drifted.numpy(), slots_of(before)).reshape(6, -1)
    wanted = count_replicas(replicate(drifted.numpy(), 60, 12), 48)
    assert (count_replicas(table, 48) == wanted).all()
    after = Placement(torch.from_numpy(table), 48, 12)
    missing = np.maximum(wanted - before.replica_counts.numpy(), 0).sum(1)
    assert count_moves(before, after).between_ranks.tolist() == missing.tolist()


def test_what_does_not_fit_is_refused():
    before = random_placement(0)
    with pytest.raises(ValueError, match=r"loads: \[2, 9\] given"):
        improve(before, torch.ones(2, 9))
    with pytest.raises(ValueError, match="max_moves: -1 given, 0 or more"):
        improve(before, torch.ones(2, 10), max_moves=-1)
    with pytest.raises(ValueError, match="num_nodes: 3 given"):
        improve(before, torch.ones(2, 10), cost=CostModel(num_nodes=3))
    with pytest.raises(ValueError, match=r"loads: -1\.0 to 1\.0"):
        improve(before, torch.tensor([1.0, -1.0]).repeat(2, 5))
