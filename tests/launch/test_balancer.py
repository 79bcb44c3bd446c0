"""The balancer against hand-worked cases and against a recount from scratch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.balancer import Balancer


def test_least_tokens_wins_and_ties_go_to_the_lowest_rank():
    balancer = Balancer(3)
    assert [balancer.assign(f"a{i}", 10) for i in range(3)] == [0, 1, 2]
    assert balancer.assign("small", 1) == 0
    assert balancer.assign("next", 5) == 1
    assert balancer.loads == (11, 15, 10)


def test_one_long_request_weighs_as_much_as_many_short_ones():
    balancer = Balancer(2)
    balancer.assign("long", 1000)
    assert [balancer.assign(f"short{i}", 100) for i in range(10)] == [1] * 10
    assert balancer.assign("even", 1) == 0


def test_generated_tokens_count_and_finished_requests_do_not():
    balancer = Balancer(2)
    balancer.assign("a", 10)
    balancer.assign("b", 11)
    balancer.grow("a", 2)
    assert balancer.assign("c", 1) == 1
    balancer.finish("a")
    assert balancer.loads == (0, 12)


def test_open_id_and_no_ranks_are_refused():
    balancer = Balancer(1)
    balancer.assign("a", 1)
    with pytest.raises(ValueError, match="'a' is already open"):
        balancer.assign("a", 1)
    with pytest.raises(ValueError, match="num_ranks: 0"):
        Balancer(0)


@given(
    num_ranks=st.integers(1, 5),
    events=st.lists(st.tuples(st.sampled_from("agf"), st.integers(0, 50), st.integers(0, 1000))),
)
def test_loads_are_always_the_sum_over_open_requests(num_ranks: int, events: list):
    balancer = Balancer(num_ranks)
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
