"""Step shapes over all combinations of what ranks can be doing, and hand-worked cases."""

from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ep.dispatch.base import Mode
from moe_ep.engine.step_shape import (
    OverlapRules,
    StepKind,
    StepMismatch,
    StepRules,
    StepShape,
    Vote,
    derive,
)

STATES = {
    "decode": {"num_decode_tokens": 3},
    "prefill": {"num_prefill_tokens": 20},
    "mixed": {"num_decode_tokens": 2, "num_prefill_tokens": 5},
    "idle": {},
    "draining": {"is_draining": True},
    "draining decode": {"num_decode_tokens": 1, "is_draining": True},
    "stopping": {"num_decode_tokens": 1, "wants_stop": True},
}
AUTO = StepRules("auto", capacity=8, buckets=(1, 2, 4, 8))

numbers = st.integers(0, 2**40)
votes = st.builds(
    Vote,
    step=numbers,
    num_decode_tokens=numbers,
    num_prefill_tokens=numbers,
    is_draining=st.booleans(),
    wants_stop=st.booleans(),
    num_largest_part=numbers,
)


@given(votes)
def test_a_vote_survives_the_wire(vote):
    vector = vote.encode()
    assert all(type(number) is int for number in vector)
    assert len(vector) == len(Vote(0).encode())
    assert Vote.decode(vector) == vote


def test_a_vote_of_another_length_is_refused():
    with pytest.raises(ValueError, match="2 numbers given; 8 are needed"):
        Vote.decode([1, 2])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_combination_of_states_gives_the_shape_that_the_rules_say(num_ranks):
    for names in product(STATES, repeat=num_ranks):
        shape = derive([Vote(step=7, **STATES[name]) for name in names], AUTO)
        is_draining = any("draining" in name for name in names)
        if "stopping" in names or (is_draining and set(names) <= {"idle", "draining"}):
            assert shape.kind is StepKind.STOP, names
            continue
        if set(names) == {"idle"}:
            assert shape == StepShape(StepKind.IDLE), names
            continue
        has_prefill = "prefill" in names or "mixed" in names
        assert shape.kind is StepKind.RUN, names
        assert shape.is_draining is is_draining, names
        assert shape.mode is (Mode.NORMAL if has_prefill else Mode.LOW_LATENCY), names
        assert shape.max_tokens == max(sum(_counts(STATES[name])) for name in names), names
        expected = None if has_prefill else 4 if "decode" in names else 1
        assert shape.padded_tokens == expected, names


def _counts(state):
    return state.get("num_decode_tokens", 0), state.get("num_prefill_tokens", 0)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_shape_does_not_depend_on_which_rank_says_what(num_ranks):
    for names in product(STATES, repeat=num_ranks):
        cast = [Vote(step=7, **STATES[name]) for name in names]
        assert len({derive(order, AUTO) for order in permutations(cast)}) == 1, names


@pytest.mark.parametrize(
    ("tokens", "rules", "expected"),
    [
        # mode: one rank over the capacity is enough for normal mode
        ([8, 0], StepRules("auto", 8), (Mode.LOW_LATENCY, 8, None)),
        ([9, 0], StepRules("auto", 8), (Mode.NORMAL, 9, None)),
        ([3, 2], StepRules("normal", 8), (Mode.NORMAL, 3, None)),
        ([3, 2], StepRules("low_latency", 8), (Mode.LOW_LATENCY, 3, None)),
        # buckets: the smallest that holds the maximum; none when too small or over the capacity
        ([3, 4], StepRules("auto", 8, (2, 4, 8)), (Mode.LOW_LATENCY, 4, 4)),
        ([5, 4], StepRules("auto", 8, (2, 4, 8)), (Mode.LOW_LATENCY, 5, 8)),
        ([7, 4], StepRules("auto", 7, (2, 4, 8)), (Mode.LOW_LATENCY, 7, None)),
        ([9, 4], StepRules("auto", 8, (2, 4, 8)), (Mode.NORMAL, 9, None)),
        ([7, 4], StepRules("normal", 7, (2, 4, 8)), (Mode.NORMAL, 7, 8)),
    ],
)
def test_hand_worked_decode_steps(tokens, rules, expected):
    shape = derive([Vote(step=0, num_decode_tokens=number) for number in tokens], rules)
    assert (shape.mode, shape.max_tokens, shape.padded_tokens) == expected


def test_forced_low_latency_takes_prefill_up_to_the_capacity_and_refuses_more():
    rules = StepRules("low_latency", capacity=8, buckets=(8,))
    shape = derive([Vote(0, num_prefill_tokens=8), Vote(0, num_decode_tokens=1)], rules)
    assert (shape.mode, shape.padded_tokens) == (Mode.LOW_LATENCY, None)
    with pytest.raises(ValueError, match=r"\[1, 9\] tokens per rank given; at most 8"):
        derive([Vote(0, num_decode_tokens=1), Vote(0, 2, 7)], rules)


@pytest.mark.parametrize(
    ("mode", "expected"), [("low_latency", 8), ("auto", 2048), ("normal", 2048)]
)
def test_the_token_budget_keeps_forced_low_latency_within_the_capacity(mode, expected):
    assert StepRules(mode, capacity=8).token_budget(2048) == expected


OVERLAP = StepRules("auto", capacity=64, overlap=OverlapRules(decode=16, prefill=100))


def _overlaps(*votes: tuple[int, int, int]) -> bool:
    """votes: decode tokens, prefill tokens, and tokens of the larger part."""
    return derive([Vote(0, *vote) for vote in votes], OVERLAP).overlap


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([(16, 0, 8)], True),
        ([(15, 0, 8)], False),
        # the fullest rank decides for all, be they idle or busy with one request
        ([(16, 0, 8), (0, 0, 0)], True),
        ([(0, 0, 0), (1, 0, 1), (16, 0, 9)], True),
        # one rank that prefills is enough for the other threshold
        ([(16, 0, 8), (0, 20, 10)], False),
        ([(16, 0, 8), (0, 100, 50)], True),
        ([(16, 0, 8), (4, 96, 50)], True),
        # a part with more than 3/4 of the fullest rank's tokens leaves nothing to hide behind
        ([(16, 0, 12)], True),
        ([(16, 0, 13)], False),
        ([(0, 100, 76)], False),
        ([(0, 100, 50), (0, 80, 80)], False),
        ([(0, 200, 100), (0, 80, 80)], True),
    ],
)
def test_when_two_micro_batches_take_turns(votes, expected):
    assert _overlaps(*votes) is expected
    assert _overlaps(*reversed(votes)) is expected


def test_without_rules_nothing_overlaps():
    assert not derive([Vote(0, num_decode_tokens=4, num_largest_part=2)], AUTO).overlap


@pytest.mark.parametrize(
    ("padded", "overlap", "rows"),
    [(None, True, None), (16, False, 16), (16, True, 8), (5, True, 3), (1, True, 1)],
)
def test_every_micro_batch_is_padded_to_half_a_bucket(padded, overlap, rows):
    shape = StepShape(StepKind.RUN, padded_tokens=padded, overlap=overlap)
    assert shape.micro_batch_rows == rows


def test_ranks_at_different_steps_are_named():
    with pytest.raises(StepMismatch, match="rank 0 at 4, rank 1 at 5, rank 2 at 4"):
        derive([Vote(4), Vote(5), Vote(4, wants_stop=True)], AUTO)


def test_bad_rules_are_refused():
    with pytest.raises(ValueError, match=r"deepep_mode: 'fast' given; allowed: .*low_latency"):
        StepRules("fast", 8)
    with pytest.raises(ValueError, match=r"buckets: \(4, 2\) given"):
        StepRules("auto", 8, (4, 2))
