"""Placements: the trivial one, replicas, slot tables, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb import Placement


def _two_layers() -> Placement:
    # 4 experts on 3 ranks of 2 slots; layer 0 doubles experts 0 and 1, layer 1 triples expert 3
    return Placement(
        torch.tensor([[0, 1, 2, 0, 3, 1], [3, 0, 1, 3, 2, 3]]), num_experts=4, num_ranks=3
    )


def test_inverse_and_replica_counts():
    placement = _two_layers()
    assert placement.replica_counts.tolist() == [[2, 2, 1, 1], [1, 1, 1, 3]]
    assert placement.logical_to_physical.tolist() == [
        [[0, 3, -1], [1, 5, -1], [2, -1, -1], [4, -1, -1]],
        [[1, -1, -1], [2, -1, -1], [4, -1, -1], [0, 3, 5]],
    ]


def test_slot_table_prefers_the_own_replica_then_spreads():
    placement = _two_layers()
    assert placement.slot_table(0).tolist() == [[0, 1, 2, 4], [1, 2, 4, 0]]
    assert placement.slot_table(1).tolist() == [[3, 5, 2, 4], [1, 2, 4, 3]]
    assert placement.slot_table(2).tolist() == [[0, 5, 2, 4], [1, 2, 4, 5]]


def test_local_experts_in_slot_order():
    assert _two_layers().local_experts(1, 0) == [3, 0]
    assert _two_layers().local_experts(0, 2) == [3, 1]


def test_trivial_without_and_with_redundant_slots():
    plain = Placement.trivial(num_layers=2, num_experts=4, num_ranks=2)
    assert plain.physical_to_logical.tolist() == [[0, 1, 2, 3]] * 2
    doubled = Placement.trivial(num_layers=1, num_experts=4, num_ranks=3, num_redundant=2)
    assert doubled.physical_to_logical.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert doubled.num_slots_per_rank == 2


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 12))
def test_trivial_is_valid_or_refused(num_experts: int, num_ranks: int, num_redundant: int):
    num_slots = num_experts + num_redundant
    possible = num_slots % num_ranks == 0 and num_slots // num_ranks <= num_experts
    sizes = {"num_experts": num_experts, "num_ranks": num_ranks, "num_redundant": num_redundant}
    if not possible:
        with pytest.raises(ValueError, match=r"num_redundant|two replicas"):
            Placement.trivial(num_layers=1, **sizes)
        return
    placement = Placement.trivial(num_layers=1, **sizes)
    for rank in range(num_ranks):
        table = placement.slot_table(rank)
        assert placement.physical_to_logical[0, table[0]].tolist() == list(range(num_experts))
        first = rank * placement.num_slots_per_rank
        for slot, expert in enumerate(placement.local_experts(0, rank)):
            assert int(table[0, expert]) == first + slot


def test_redundant_slots_that_do_not_divide_name_the_number_that_does():
    with pytest.raises(ValueError, match=r"num_redundant: 0 given.*3 ranks, 1 would"):
        Placement.trivial(num_layers=1, num_experts=32, num_ranks=3)


@pytest.mark.parametrize(
    ("table", "num_experts", "num_ranks", "message"),
    [
        ([[0, 1, 2, 2]], 3, 2, "two replicas of expert 2 on rank 1 in layer 0"),
        ([[0, 1, 2, 0]], 4, 2, "expert 3 of layer 0 has no slot"),
        ([[0, 1], [0, 0]], 2, 2, "expert 1 of layer 1 has no slot"),
        ([[0, 1, 2]], 3, 2, "num_ranks: 2 given, must divide the 3 slots"),
        ([[0, 4]], 4, 1, "experts 0 to 4 given, 0 to 3 allowed"),
        ([[-1, 0]], 1, 1, "experts -1 to 0 given"),
        ([0, 1], 2, 1, r"\[2\] given, non-empty int64 \[layers, slots\] needed"),
        ([[0.0, 1.0]], 2, 1, "float32"),
        ([[]], 0, 1, "non-empty"),
    ],
)
def test_bad_tables_are_refused(table, num_experts, num_ranks, message):
    with pytest.raises(ValueError, match=message):
        Placement(torch.tensor(table), num_experts, num_ranks)
