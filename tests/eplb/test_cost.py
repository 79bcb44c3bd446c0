"""What traffic between nodes costs, by hand and by drawing tokens; and what is chosen by it."""

import numpy as np
import pytest
import torch

from eplb import CostModel, rebalance
from eplb.cost import costs, traffic
from eplb.place import max_rank_load
from tests.eplb.placements import random_placement, slots_of

DEEPSEEK = {"num_groups": 8, "topk_group": 4, "num_experts_per_tok": 8}


def test_crossings_by_hand():
    """Two nodes of one rank, two experts of the four per token, chosen alike: 40 tokens."""
    loads = np.full((2, 4), 20.0)
    slots = np.array([[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
    plain = CostModel(num_nodes=2, num_experts_per_tok=2, price_per_crossing=1)
    # A node has half the load, so a token needs it with 1 - (1 - 1/2)^2 = 3/4, and comes from the
    # other one half of the time: 40 * 3/4 / 2 copies reach each rank.
    assert traffic(loads, slots, plain).crossings.tolist() == [15, 15]
    assert costs(loads, slots, plain).tolist() == [55, 55]
    grouped = CostModel(
        num_nodes=2, num_groups=2, topk_group=1, num_experts_per_tok=2, price_per_crossing=1
    )
    # Layer 0 has a group on each node, and half the tokens choose it. In layer 1 each node has
    # half of each group: 1 - (1 - 1/2 * 3/4)^2.
    expected = [40 * 0.5 / 2, 40 * (1 - (5 / 8) ** 2) / 2]
    assert np.allclose(traffic(loads, slots, grouped).crossings, expected)


def test_crossings_are_those_of_drawn_tokens():
    generator = np.random.default_rng(0)
    placement = random_placement(1, num_layers=1, num_ranks=6, num_experts=16, slots_per_rank=4)
    slots, num_tokens, picks = slots_of(placement), 40_000, 2
    # 1. Each of 4 groups is chosen with its probability; in it, two experts with replacement.
    chosen = generator.random((num_tokens, 4)) < [0.2, 0.6, 0.7, 0.5]
    inside = generator.dirichlet(np.ones(4), 4)
    loads, reached = np.zeros(16), np.zeros((num_tokens, 3), bool)
    for group in range(4):
        tokens = np.nonzero(chosen[:, group])[0].repeat(picks)
        experts = generator.choice(4, len(tokens), p=inside[group]) + 4 * group
        loads += np.bincount(experts, minlength=16)
        for expert in range(4 * group, 4 * group + 4):
            holders = np.nonzero((slots[0] == expert).any(1))[0]
            its_tokens = tokens[experts == expert]
            reached[its_tokens, generator.choice(holders, len(its_tokens)) // 2] = True
    # 2. A token starts on any of three nodes.
    starts = generator.integers(0, 3, num_tokens)
    drawn = reached.sum() - reached[np.arange(num_tokens), starts].sum()
    cost = CostModel(num_nodes=3, num_groups=4, topk_group=2, num_experts_per_tok=4)
    assert abs(traffic(loads[None], slots, cost).crossings[0] * 6 / drawn - 1) < 0.02


def test_rises_are_the_change_for_load_that_comes_or_goes():
    placement = random_placement(2, num_layers=1, num_ranks=4, num_experts=8, slots_per_rank=2)
    cost = CostModel(num_nodes=2, num_groups=4, topk_group=2, num_experts_per_tok=4)
    loads = np.random.default_rng(0).uniform(1, 2, (1, 8))
    slots = slots_of(placement)
    shares = np.zeros((2, 4))  # of each node and group
    for rank, held in enumerate(slots[0]):
        for expert in held:
            shares[rank // 2, expert // 2] += loads[0, expert]
    before = traffic(loads, slots, cost)
    assert np.isclose(before.crossings[0], _crossings(loads, shares))
    here = int(np.nonzero((slots[0] == 0).any(1))[0][0]) // 2
    for node, load in ((here, -0.7), (1 - here, 0.7)):
        moved = shares.copy()
        moved[node, 0] += load
        rises = before.rises(*np.array([[0], [node], [0]]), load)[0]
        assert np.isclose(rises, _crossings(loads, moved) - before.crossings[0])


def _crossings(loads: np.ndarray, shares: np.ndarray) -> float:
    """From the definition, for the load of each group on each of two nodes, ``[2, 4]``."""
    groups = loads.reshape(4, 2).sum(1)
    chance = np.minimum(2 * groups / loads.sum(), 1)
    misses = 1 - chance * (1 - (1 - shares / groups) ** 2)
    return float((1 - misses.prod(1)).sum() * loads.sum() / 4 / 2 / 4)


def test_hierarchical_or_not_is_weighed_for_each_layer():
    generator = torch.Generator().manual_seed(0)
    loads = torch.rand(6, 64, generator=generator)
    loads[0, :8] *= 6  # one group is hot: keeping it on a node costs balance
    free, dear = (
        CostModel(num_nodes=4, **DEEPSEEK, price_per_crossing=price) for price in (1e-6, 100.0)
    )
    spread, kept = (rebalance(loads, num_slots=72, num_ranks=8, cost=c) for c in (free, dear))
    array = loads.double().numpy()
    maxima = [max_rank_load(array, slots_of(placement)) for placement in (spread, kept)]
    crossings = [traffic(array, slots_of(p), dear).crossings for p in (spread, kept)]
    assert (maxima[0] <= maxima[1]).all()
    assert (crossings[0] > crossings[1]).all()
    node_of = kept.physical_to_logical.unflatten(1, (4, 18)) // 8
    assert all(len(node.unique()) == 2 for layer in node_of for node in layer)
    # At a price between, the first layer gives its groups up for balance, and the others do not.
    between = CostModel(num_nodes=4, **DEEPSEEK, price_per_crossing=5.0)
    mixed = rebalance(loads, num_slots=72, num_ranks=8, cost=between).physical_to_logical
    assert torch.equal(mixed[:1], spread.physical_to_logical[:1])
    assert torch.equal(mixed[1:], kept.physical_to_logical[1:])


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"num_nodes": 0}, "num_nodes: 0 given, 1 or more"),
        ({"price_per_move": -1}, "price_per_move: -1 given, 0 or more"),
        ({"price_per_crossing": float("nan")}, "price_per_crossing: nan given"),
        ({"num_groups": 2, "topk_group": 3}, "topk_group: 3 given, at most 1"),
        ({"num_groups": 8, "topk_group": 4}, "topk_group: 4 given, at most 1"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        CostModel(**numbers)


def test_models_of_another_cluster_or_router_are_refused():
    with pytest.raises(ValueError, match="num_nodes: 3 given, must divide 4 ranks"):
        rebalance(torch.ones(1, 8), num_slots=8, num_ranks=4, cost=CostModel(num_nodes=3))
    with pytest.raises(ValueError, match="num_groups: 3 given, must divide 8 experts"):
        rebalance(torch.ones(1, 8), num_slots=8, num_ranks=4, cost=CostModel(num_groups=3))
