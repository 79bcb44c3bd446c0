"""Counting the experts that ranks must fetch, and their bytes."""

import pytest
import torch

from eplb import Placement, count_moves


def _placement(*layers: list[int]) -> Placement:
    return Placement(torch.tensor(layers), num_experts=4, num_ranks=4)


BEFORE = _placement([0, 1, 1, 2, 2, 3, 3, 0], [0, 1, 2, 3, 0, 1, 2, 3])


def test_what_a_rank_or_its_node_had_is_not_fetched():
    #                    rank 0  1     2     3
    after = _placement([1, 0, 2, 3, 2, 3, 3, 1], [0, 1, 2, 3, 0, 1, 2, 3])
    #          swapped in place; 3 new on rank 1, which has no rank with it on its node of two;
    #          1 new on rank 3, whose node had none
    moves = count_moves(BEFORE, after, num_nodes=2)
    assert moves.between_ranks.tolist() == [2, 0]
    assert moves.between_nodes.tolist() == [2, 0]
    assert (moves.num_bytes(10), moves.num_bytes_between_nodes(10)) == (20, 20)
    one_node = count_moves(BEFORE, after)
    assert (one_node.num_bytes(10), one_node.num_bytes_between_nodes(10)) == (20, 0)


def test_a_replica_on_the_node_is_fetched_from_there():
    after = _placement([0, 1, 1, 0, 2, 3, 3, 2], [0, 1, 2, 3, 0, 1, 2, 3])
    with_two = count_moves(BEFORE, after, num_nodes=2)
    # Rank 1 gets 0 from rank 0 beside it, rank 3 gets 2 from rank 2.
    assert with_two.between_ranks.tolist() == [2, 0]
    assert with_two.between_nodes.tolist() == [0, 0]


def test_what_does_not_fit_is_refused():
    other = Placement(torch.tensor([[0, 1, 2, 3]]), 4, 4)
    with pytest.raises(ValueError, match=r"after: .*\(1, 4, 4, 4\) given, \(2, 8, 4, 4\) needed"):
        count_moves(BEFORE, other)
    with pytest.raises(ValueError, match="num_nodes: 3 given, must divide 4 ranks"):
        count_moves(BEFORE, BEFORE, num_nodes=3)
