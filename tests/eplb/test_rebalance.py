"""``rebalance_experts`` and ``rebalance``: the contract, the published rule, refusals."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import published_eplb
from eplb import (
    Placement,
    balancedness,
    greedy_experts,
    load_bounds,
    load_bounds_like,
    rank_loads,
    rebalance,
    rebalance_experts,
)
from eplb.loads import expected_slot_loads

# DeepSeek's documented example, and what its function gives for it.
WEIGHT = torch.tensor(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
HIERARCHICAL = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]
HIERARCHICAL_SLOTS = [
    [12, 15, 11, 6, 7, 0, 1, 3, 4, 9, 8, 14, -1, 13, -1, -1, 5, 2, -1, -1, -1, -1, 10, -1],
    [13, 15, 8, 14, 9, 10, 2, 0, 6, 7, 1, 5, -1, 11, -1, -1, -1, 12, 4, -1, 3, -1, -1, -1],
]  # first replicas, then second ones
HIERARCHICAL_COUNTS = [[1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1], [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1]]
GLOBAL = [
    [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
    [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
]


def _slot_loads(table: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    ones = torch.ones(table.shape, dtype=torch.float64)
    counts = torch.zeros(weight.shape, dtype=torch.float64).scatter_add_(1, table, ones)
    return (weight.double() / counts).gather(1, table)


def _max_loads(table: torch.Tensor, weight: torch.Tensor, num_gpus: int) -> torch.Tensor:
    return rank_loads(_slot_loads(table, weight), num_gpus).amax(1)


def _keeps_apart(table: torch.Tensor, num_gpus: int) -> torch.Tensor:
    on_gpu = table.unflatten(1, (num_gpus, -1)).sort(-1).values
    return (on_gpu[..., 1:] != on_gpu[..., :-1]).flatten(1).all(1)


def test_the_plain_rule_and_ours_give_the_documented_vectors():
    plain = published_eplb.rebalance_experts(WEIGHT, 16, 4, 2, 8)
    assert plain[0].tolist() == HIERARCHICAL
    assert plain[1].swapaxes(1, 2).flatten(1).tolist() == HIERARCHICAL_SLOTS
    assert plain[2].tolist() == HIERARCHICAL_COUNTS
    for groups, nodes in ((1, 1), (3, 2)):  # 2 nodes do not divide 3 groups: the global policy
        assert published_eplb.rebalance_experts(WEIGHT, 16, groups, nodes, 8)[0].tolist() == GLOBAL
        assert greedy_experts(WEIGHT, 16, groups, nodes, 8).tolist() == GLOBAL
    assert greedy_experts(WEIGHT, 16, 4, 2, 8).tolist() == HIERARCHICAL


def test_outputs_for_the_documented_example():
    experts, slots, counts = rebalance_experts(WEIGHT, 16, 4, 2, 8)
    placement = Placement(experts, 12, 8)  # checks that all are there and replicas apart
    assert torch.equal(slots, placement.logical_to_physical)
    assert torch.equal(counts, placement.replica_counts)
    assert {part.dtype for part in (experts, slots, counts)} == {torch.int64}
    node_of_group = (experts.unflatten(1, (2, 8)) // 3).sort(-1).values
    for layer in node_of_group:
        assert [len(node.unique()) for node in layer] == [2, 2]
        assert layer.unique().tolist() == [0, 1, 2, 3]
    assert (
        _max_loads(experts, WEIGHT, 8) <= _max_loads(torch.tensor(HIERARCHICAL), WEIGHT, 8)
    ).all()


@st.composite
def _problems(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, int, int, int]]:
    """Loads of two layers, and sizes that fit: (slots, groups, nodes, GPUs)."""
    nodes, gpus_per_node = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    groups = draw(st.integers(1, 2)) * draw(st.sampled_from([1, nodes]))
    num_experts = groups * draw(st.integers(1, 4))
    gpus = nodes * gpus_per_node
    on_node = num_experts // nodes if groups % nodes == 0 else num_experts
    least = -(-num_experts // gpus)
    slots_per_gpu = draw(st.integers(least, max(least, min(on_node, 5))))
    loads = draw(
        st.lists(
            st.integers(0, 50) | st.integers(0, 10**6), min_size=num_experts * 2, max_size=None
        ).map(lambda values: values[: num_experts * 2])
    )
    weight = torch.tensor(loads).reshape(2, num_experts)
    return weight, (gpus * slots_per_gpu, groups, nodes, gpus)


@settings(max_examples=150, deadline=None)
@given(_problems())
def test_valid_deterministic_and_never_worse_than_published(problem):
    weight, sizes = problem
    experts, slots, counts = rebalance_experts(weight, *sizes)
    assert torch.equal(experts, rebalance_experts(weight.clone(), *sizes)[0])
    Placement(experts, weight.shape[1], sizes[3])
    assert counts.sum(1).tolist() == [sizes[0]] * 2
    for layer in range(2):
        for expert, row in enumerate(slots[layer].tolist()):
            held = [slot for slot in row if slot >= 0]
            assert held == (experts[layer] == expert).nonzero().flatten().tolist()
            assert len(held) == counts[layer, expert]
            assert set(row[len(held) :]) <= {-1}
    if sizes[1] % sizes[2] == 0:
        nodes = experts.unflatten(1, (sizes[2], -1)) // (weight.shape[1] // sizes[1])
        homes = [[set(node.tolist()) for node in layer] for layer in nodes]
        for layer in homes:
            assert sum(map(len, layer)) == sizes[1]  # no group is on two nodes
    published = published_eplb.rebalance_experts(weight, *sizes)[0]
    ours, theirs = (_max_loads(table, weight, sizes[3]) for table in (experts, published))
    apart = _keeps_apart(published, sizes[3])
    assert (ours <= theirs * (1 + 1e-6))[apart].all()


@settings(max_examples=100, deadline=None)
@given(_problems())
def test_the_greedy_start_is_the_published_rule(problem):
    """Up to the order of equal loads: the same loads on the same number of GPUs."""
    weight, sizes = problem
    weight = weight + 1  # zeros count next to nothing, not nothing
    ours = greedy_experts(weight, *sizes)
    theirs = published_eplb.rebalance_experts(weight, *sizes)[0]
    ours, theirs = (
        rank_loads(_slot_loads(table, weight), sizes[3]).sort(1).values for table in (ours, theirs)
    )
    assert torch.allclose(ours, theirs, rtol=1e-6)


def test_what_no_legal_placement_can_reach():
    """Two replicas of an expert on a GPU can balance better; the rule against them has a price."""
    weight = torch.tensor([[277, 126, 405]])
    published = published_eplb.rebalance_experts(weight, 4, 1, 1, 2)[0]
    assert not _keeps_apart(published, 2).any()
    assert _max_loads(published, weight, 2).tolist() == [405]
    # All there is: one expert on both GPUs, the others on one each.
    legal = [a / 2 + max(b, c) for a, b, c in ([277, 126, 405], [126, 277, 405], [405, 126, 277])]
    assert _max_loads(rebalance_experts(weight, 4, 1, 1, 2)[0], weight, 2).tolist() == [min(legal)]


def _zipf(num_layers: int, num_experts: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    loads = torch.arange(1, num_experts + 1).double() ** -0.9
    noise = 0.5 + torch.rand(num_layers, num_experts, generator=generator)
    order = torch.rand(num_layers, num_experts, generator=generator).argsort(1)
    return ((loads * noise).gather(1, order) * 1e5).round()


@pytest.mark.parametrize(
    ("num_experts", "sizes"),
    [
        (256, (288, 8, 4, 32)),
        (256, (288, 1, 1, 32)),
        (256, (288, 8, 9, 72)),
        (256, (288, 8, 18, 144)),
        (384, (480, 1, 12, 96)),
    ],
)
def test_large_cases_are_near_what_the_slots_allow(num_experts: int, sizes):
    weight = _zipf(58, num_experts, seed=num_experts + sizes[3])
    experts = rebalance_experts(weight, *sizes)[0]
    most = _max_loads(experts, weight, sizes[3])
    assert (most <= _max_loads(greedy_experts(weight, *sizes), weight, sizes[3]) * (1 + 1e-6)).all()
    if sizes[1] % sizes[2]:
        placement = Placement(experts, num_experts, sizes[3])
        above = most / load_bounds_like(placement, weight)
        assert above.max() <= 1.01
        assert above.mean() <= 1.004


def test_more_replicas_of_the_hottest_are_not_always_better():
    """Halves of 96 ranks' loads would have to meet in pairs; fewer, larger replicas need not."""
    weight = torch.arange(1, 385).double()[None] ** -1.1
    greedy = greedy_experts(weight, 480, 1, 1, 96)
    bound = load_bounds(weight, num_slots=480, num_ranks=96)
    assert float(_max_loads(greedy, weight, 96)) > 1.05 * bound
    assert float(_max_loads(rebalance_experts(weight, 480, 1, 1, 96)[0], weight, 96)) < 1.01 * bound


def test_groups_are_spread_over_nodes_better_than_greedily():
    """The heaviest first puts 29, 18, 15 on one node and 22, 19, 16 on the other … or worse."""
    weight = torch.tensor([[15, 18, 29, 22, 19, 16]]).repeat_interleave(2, 1)
    greedy = rank_loads(_slot_loads(greedy_experts(weight, 12, 6, 2, 4), weight), 2)
    ours = rank_loads(_slot_loads(rebalance_experts(weight, 12, 6, 2, 4)[0], weight), 2)
    assert greedy.amax().item() == 124
    assert ours.amax().item() == 120


@pytest.mark.parametrize("policy", [(1, 1), (2, 2)])
def test_no_load_one_hot_expert_and_ties(policy):
    weight = torch.zeros(4, 8)
    weight[1, 3], weight[2] = 1000, 7
    weight[3, :2] = 5
    placement = Placement(rebalance_experts(weight, 16, *policy, 4)[0], 8, 4)
    assert placement.replica_counts[0].max() == 2  # spread, where nothing is known
    assert placement.replica_counts[1, 3] == 4 // policy[0]  # one on each GPU that may hold it
    balance = balancedness(rank_loads(expected_slot_loads(weight, placement), 4))
    assert balance[[0, 2]].tolist() == [1, 1]


def test_any_dtype_and_a_single_gpu():
    for dtype in (torch.int32, torch.float16, torch.float64):
        weight = torch.tensor([[4, 3, 2, 1]], dtype=dtype)
        assert rebalance_experts(weight, 4, 1, 1, 1)[0].sort(1).values.tolist() == [[0, 1, 2, 3]]
        experts = rebalance_experts(weight, 6, 1, 1, 2)[0]
        assert _max_loads(experts, weight, 2).tolist() == [5.5]  # those on one rank differ by 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((17, 4, 2, 8), "num_replicas: 17 given, must be a multiple of num_gpus, 8"),
        ((8, 1, 1, 8), "num_replicas: 8 given, 12 experts need a slot each"),
        ((16, 8, 2, 8), "number of experts: 12 given, must be a multiple of num_groups, 8"),
        ((18, 4, 2, 9), "num_gpus: 9 given, must be a multiple of num_nodes, 2"),
        ((28, 1, 1, 2), "num_replicas: 28 given.* have use for 24, one on each of 2"),
        ((56, 4, 2, 8), "num_replicas: 56 given; with 6 experts on each of 2 nodes 48 at most"),
        ((0, 4, 2, 8), "num_replicas: 0 given"),
        ((16, 4, 0, 8), "num_nodes: 0 given"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(sizes, message):
    with pytest.raises(ValueError, match=message):
        rebalance_experts(WEIGHT, *sizes)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(4), r"weight: \[4\] given"),
        (torch.zeros(0, 4), "weight: .* non-empty"),
        (torch.tensor([[1.0, -1.0]]), "weight: -1.0 to 1.0 given"),
        (torch.tensor([[1.0, float("nan")]]), "weight: nan"),
        (torch.tensor([[1.0, 1e31]]), "weight: 1.0 to .* given"),
    ],
)
def test_loads_that_are_none_are_refused(weight, message):
    with pytest.raises(ValueError, match=message):
        rebalance_experts(weight, 4, 1, 1, 2)


def test_rebalance_gives_a_placement_and_names_its_arguments():
    placement = rebalance(WEIGHT, num_slots=16, num_ranks=8)
    assert torch.equal(placement.physical_to_logical, rebalance_experts(WEIGHT, 16, 1, 1, 8)[0])
    with pytest.raises(ValueError, match=r"loads: \[12\] given"):
        rebalance(WEIGHT[0], num_slots=16, num_ranks=8)
    for slots, message in (
        (15, "a multiple of num_ranks, 8"),
        (8, "need a slot each"),
        (104, "96"),
    ):
        with pytest.raises(ValueError, match=f"num_slots: {slots} given.*{message}"):
            rebalance(WEIGHT, num_slots=slots, num_ranks=8)


def test_the_layers_of_a_call_do_not_touch_each_other():
    weight = _zipf(3, 32, seed=5)
    together = rebalance_experts(weight, 40, 1, 1, 8)[0]
    alone = [rebalance_experts(row[None], 40, 1, 1, 8)[0][0] for row in weight]
    loads = [_max_loads(torch.stack(alone), weight, 8), _max_loads(together, weight, 8)]
    assert np.allclose(*loads, rtol=0.01)
