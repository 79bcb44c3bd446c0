"""Placing against the best there is: all placements of small problems, an ILP for larger ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.bounds import bound_for_any_replicas, bound_for_slots
from eplb.pack import pack_greedily, refold, separate
from eplb.place import max_rank_load, place
from eplb.replicate import count_replicas, replicate, replicate_to_level
from tests.eplb.optimum import (
    all_placements,
    bound_by_ilp,
    least_max_load,
    max_loads,
    replica_counts,
)

SMALL = [(4, 2, 3), (5, 3, 2), (6, 3, 3), (6, 4, 2), (7, 3, 4)]  # experts, ranks, slots per rank


def _loads(num_rows: int, num_experts: int, seed: int) -> np.ndarray:
    """Zipf's law with noise, its exponent from 0.3 to 1.5."""
    generator = np.random.default_rng(seed)
    skew = generator.uniform(0.3, 1.5, (num_rows, 1))
    falling = np.arange(1, num_experts + 1) ** -skew
    return 1000 * falling * generator.uniform(0.5, 1.5, (num_rows, num_experts))


@pytest.mark.parametrize("sizes", SMALL)
def test_small_problems_against_all_placements(sizes: tuple[int, int, int]):
    num_experts, num_ranks, slots_per_rank = sizes
    loads = _loads(40, num_experts, seed=num_experts)
    best = np.array([least_max_load(row, num_ranks, slots_per_rank) for row in loads])
    slots, maxima = place(loads, num_ranks * slots_per_rank, num_ranks)
    own = [max_loads(row, its[None])[0] for row, its in zip(loads, slots, strict=True)]
    assert np.allclose(maxima, own)
    assert (maxima >= best * (1 - 1e-9)).all()
    assert (maxima / best).mean() <= 1.02
    assert (maxima / best).max() <= 1.09


@pytest.mark.parametrize("sizes", SMALL)
def test_no_placement_is_below_the_bounds(sizes: tuple[int, int, int]):
    num_experts, num_ranks, slots_per_rank = sizes
    num_slots = num_ranks * slots_per_rank
    placements = all_placements(*sizes)
    counts = replica_counts(placements, num_experts)
    some = np.random.default_rng(0).choice(len(counts), 5)
    for loads in _loads(8, num_experts, seed=1):
        maxima = max_loads(loads, placements)
        bound = bound_for_any_replicas(loads[None], num_slots, num_ranks)[0]
        assert bound <= maxima.min() * (1 + 1e-9)
        for chosen in counts[some]:
            best = maxima[(counts == chosen).all(1)].min()
            slot_loads = (loads / chosen).repeat(chosen)[None]
            assert bound_for_slots(slot_loads, num_ranks)[0] <= best * (1 + 1e-9)


def test_with_two_slots_a_rank_the_bound_is_reached():
    loads = _loads(20, 40, seed=3)
    slots, maxima = place(loads, 48, 24)
    counts = count_replicas(slots.reshape(20, -1), 40)
    slot_loads = np.take_along_axis(loads / counts, slots.reshape(20, -1), 1)
    assert np.allclose(maxima, bound_for_slots(slot_loads, 24))


@pytest.mark.parametrize("skew", [1.2, 1.6, 2.0])
@pytest.mark.parametrize("sizes", [(8, 4, 3), (10, 4, 3), (10, 3, 4), (16, 3, 6), (24, 4, 7)])
def test_medium_problems_against_an_ilp(sizes: tuple[int, int, int], skew: float):
    num_experts, num_ranks, slots_per_rank = sizes
    noise = np.random.default_rng(0).uniform(0.5, 1.5, num_experts)
    loads = 1000 / np.arange(1, num_experts + 1) ** skew * noise
    bound = bound_by_ilp(loads, num_ranks, slots_per_rank, gap=5e-3)
    maximum = place(loads[None], num_ranks * slots_per_rank, num_ranks)[1][0]
    assert bound <= maximum * (1 + 1e-6)
    assert maximum <= 1.01 * bound


@st.composite
def _packings(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Loads of three rows and slots in which replicas may meet."""
    num_ranks, slots_per_rank = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    num_experts = draw(st.integers(slots_per_rank, num_ranks * slots_per_rank))
    values = st.lists(st.integers(1, 100), min_size=num_experts, max_size=num_experts)
    loads = np.array([draw(values) for _ in range(3)], dtype=float)
    experts = replicate(loads, num_ranks * slots_per_rank, max_replicas=num_ranks)
    shares = loads / count_replicas(experts, num_experts)
    order = np.array([draw(st.permutations(range(experts.shape[1]))) for _ in range(3)])
    mixed = np.take_along_axis(experts, order, 1)
    return shares, mixed.reshape(3, num_ranks, slots_per_rank)


@settings(max_examples=150, deadline=None)
@given(_packings())
def test_separating_and_refolding_keep_what_they_promise(problem):
    shares, mixed = problem
    num_experts = shares.shape[1]
    apart = separate(mixed, shares)
    folded = refold(apart, shares, np.zeros(3))
    before, after = (
        np.take_along_axis(shares[:, None], slots, 2).sum(2).max(1) for slots in (apart, folded)
    )
    assert (after <= before * (1 + 1e-9)).all()
    for slots in (apart, folded):
        assert (replica_counts(slots, num_experts) == replica_counts(mixed, num_experts)).all()
        by_rank = np.sort(slots, 2)
        assert (by_rank[..., 1:] != by_rank[..., :-1]).all()
    untouched = refold(apart, shares, before * (1 + 1e-9))
    assert (untouched == apart).all()


def test_the_heaviest_first_to_the_lightest_with_room():
    loads = np.array([[9.0, 7, 6, 5, 4, 1], [1, 1, 1, 1, 1, 1]])
    experts = np.tile(np.arange(6), (2, 1))
    slots = pack_greedily(experts, loads, num_ranks=2)
    assert slots.tolist() == [[[0, 3, 5], [1, 2, 4]], [[0, 2, 4], [1, 3, 5]]]


def test_replicas_up_to_a_level_and_the_rest_in_turn():
    loads = np.array([[8.0, 1, 2, 3]] * 3)
    experts = replicate_to_level(
        loads, np.array([4.0, 4.0, 1.0]), np.array([0, 3, 0]), num_slots=8, max_replicas=3
    )
    # Two of expert 0 and one of each other are needed; the three left over go to 1, 2, 3 in
    # rising order of load, or, from the fourth in that order, to 0, 1, 2.
    assert count_replicas(experts[:2], 4).tolist() == [[2, 2, 2, 2], [3, 2, 2, 1]]
    assert (experts[2] == -1).all()  # 8 replicas of expert 0 are needed, 3 possible
    greedy = replicate(loads, 8, max_replicas=3)
    assert count_replicas(greedy, 4).tolist() == [[3, 1, 2, 2]] * 3
    assert np.allclose(max_rank_load(loads, place(loads, 8, 4)[0]), 14 / 4, rtol=0.3)
