"""The balancer against hand-worked cases and against a recount from scratch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.balancer import Balancer


def make_balancer(num_ranks, num_blocks=100):
    return Balancer(num_ranks, block_size=4, num_blocks=num_blocks)


def test_least_tokens_wins_and_ties_go_to_the_lowest_rank():
    balancer = make_balancer(3)
    assert [balancer.assign(f"a{i}", 10) for i in range(3)] == [0, 1, 2]
    assert balancer.assign("small", 1) == 0
    assert balancer.assign("next", 5) == 1
    assert balancer.loads == (11, 15, 10)


def test_one_long_request_weighs_as_much_as_many_short_ones():
    balancer = make_balancer(2)
    balancer.assign("long", 1000)
    assert [balancer.assign(f"short{i}", 100) for i in range(10)] == [1] * 10
    assert balancer.assign("even", 1) == 0


def test_generated_tokens_count_and_finished_requests_do_not():
    balancer = make_balancer(2)
    balancer.assign("a", 10)
    balancer.assign("b", 11)
    balancer.grow("a", 2)
    assert balancer.assign("c", 1) == 1
    balancer.finish("a")
    assert balancer.loads == (0, 12)


def test_open_id_and_no_ranks_are_refused():
    balancer = make_balancer(1)
    balancer.assign("a", 1)
    with pytest.raises(ValueError, match="'a' is already open"):
        balancer.assign("a", 1)
    with pytest.raises(ValueError, match="num_ranks: 0"):
        make_balancer(0)


@given(
    num_ranks=st.integers(1, 5),
    events=st.lists(st.tuples(st.sampled_from("agf"), st.integers(0, 50), st.integers(0, 1000))),
)
def test_loads_are_always_the_sum_over_open_requests(num_ranks: int, events: list):
    balancer = make_balancer(num_ranks)
    held: dict[str, list[int]] = {}
    for event, number, tokens in events:
        ids = sorted(held)
        if event == "a":
            request_id = f"r{len(ids)}-{number}"
            if request_id in held:
                continue
            before = balancer.loads
            rank = balancer.assign(request_id, tokens)
            assert before[rank] == min(before)
            held[request_id] = [rank, tokens]
        elif ids and event == "g":
            balancer.grow(ids[number % len(ids)], tokens)
            held[ids[number % len(ids)]][1] += tokens
        elif ids:
            balancer.finish(ids[number % len(ids)])
            del held[ids[number % len(ids)]]
        expected = tuple(sum(n for rank, n in held.values() if rank == r) for r in range(num_ranks))
        assert balancer.loads == expected


def test_a_conversation_goes_on_where_it_was():
    balancer = make_balancer(2)
    assert balancer.assign("a", 9, [b"1", b"2"]) == 0
    assert balancer.assign("b", 9, [b"3", b"4"]) == 1
    balancer.finish("a")
    balancer.finish("b")
    assert balancer.assign("b again", 13, [b"3", b"4", b"5"]) == 1
    assert balancer.assign("a again", 13, [b"1", b"2", b"6"]) == 0


def test_a_known_token_outweighs_one_that_is_held():
    balancer = make_balancer(2)
    balancer.assign("a", 9, [b"1", b"2"])
    assert balancer.assign("eight known, nine held", 9, [b"1", b"2"]) == 1
    assert balancer.assign("both know it", 9, [b"1", b"2"]) == 0
    assert balancer.assign("the second one is held less", 9, [b"1", b"2", b"7"]) == 1
    assert balancer.assign("only the first block", 9, [b"1", b"8"]) == 0


def test_a_block_that_is_not_known_hides_those_behind_it():
    balancer = make_balancer(2)
    balancer.assign("a", 1, [b"1", b"2"])
    assert balancer.assign("b", 1, [b"3", b"2"]) == 1


def test_the_longest_unused_names_are_forgotten_last_blocks_first():
    balancer = make_balancer(3, num_blocks=3)
    balancer.assign("a", 1, [b"1", b"2"])
    balancer.assign("b", 1, [b"3", b"4"])  # in the place of 2
    assert balancer.assign("c", 1, [b"1"]) == 0  # known there, and used again
    assert balancer.assign("d", 1, [b"5", b"6"]) == 2  # in the place of 4 and 3
    balancer.grow("b", 3)
    assert balancer.loads == (2, 4, 1)
    assert balancer.assign("e", 10, [b"3"]) == 2  # or rank 1, less four known tokens
