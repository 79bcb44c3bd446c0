"""Who starts an exchange: the caller while nothing is in flight, else one thread, in order."""

import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moe_ep.dispatch import Mode, create_dispatcher
from moe_ep.dispatch.lane import Lane
from tests.dispatch.cases import Case, arguments
from tests.ranks import RankInfo, RankPool, run_ranks

WAIT_S = 10.0


@pytest.fixture
def lane():
    lane = Lane()
    yield lane
    lane.close()


def _open(lane: Lane, step, *, may_hand_over: bool = True):
    """An exchange of one step, in flight."""
    exchange = lane.open(may_hand_over=may_hand_over)
    result = exchange.start(step)
    return exchange.pending(result)


def test_alone_the_caller_starts_it(lane: Lane):
    for _ in range(2):  # and again once the first has been waited for
        assert _open(lane, threading.get_ident).wait() == threading.get_ident()


def test_while_another_is_in_flight_a_thread_starts_it_and_the_caller_goes_on(lane: Lane):
    peer_has_come = threading.Event()
    first = _open(lane, lambda: "first")
    second = _open(lane, lambda: peer_has_come.wait(WAIT_S))  # would block the caller
    third = _open(lane, threading.get_ident)
    peer_has_come.set()
    assert first.wait() == "first"
    assert second.wait() is True
    assert third.wait() != threading.get_ident()
    assert _open(lane, threading.get_ident).wait() == threading.get_ident()


def test_steps_are_taken_in_the_order_in_which_they_were_given(lane: Lane):
    order: list[int] = []
    _open(lane, lambda: None)
    gate = threading.Event()
    pendings = [_open(lane, lambda: gate.wait(WAIT_S))]
    pendings += [_open(lane, lambda i=i: order.append(i)) for i in range(20)]
    gate.set()
    pendings[-1].wait()
    assert order == list(range(20))


def test_who_may_not_hand_over_starts_it_itself(lane: Lane):
    _open(lane, lambda: None)
    assert _open(lane, threading.get_ident, may_hand_over=False).wait() == threading.get_ident()


def test_an_error_comes_out_of_wait_and_the_next_exchange_is_not_lost(lane: Lane):
    def fails() -> None:
        raise RuntimeError("the peer is gone")

    first = _open(lane, lambda: None)
    second, third = _open(lane, fails), _open(lane, lambda: "third")
    first.wait()
    with pytest.raises(RuntimeError, match="the peer is gone"):
        second.wait()
    assert third.wait() == "third"


@pytest.mark.parametrize("is_inference", [True, False])
def test_the_thread_computes_in_the_mode_of_the_caller(lane: Lane, is_inference: bool):
    with torch.inference_mode(is_inference):
        first = _open(lane, lambda: None)
        second = _open(lane, lambda: torch.empty(1).is_inference())
        first.wait()
        assert second.wait() is is_inference


def test_after_close_nothing_waits_for_what_hangs(lane: Lane):
    hangs = threading.Event()
    _open(lane, lambda: None)
    _open(lane, lambda: hangs.wait(WAIT_S))
    start = time.monotonic()
    lane.close()
    assert time.monotonic() - start < WAIT_S / 2
    hangs.set()


class _Spy:
    """A process group that keeps what was started."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.works: list[dist.Work] = []

    def alltoall_base(self, *args) -> dist.Work:
        self.works.append(self.group.alltoall_base(*args))
        return self.works[-1]


def _travel_without_waiting(info: RankInfo) -> list[int]:
    """Exchanges that have ended, though nobody has waited: with one, then with two in flight."""
    case = Case("uniform", (4, 4))
    dispatcher = create_dispatcher("collective", case.spec, info.group)
    dispatcher._group = spy = _Spy(info.group)
    given = arguments(case, info.rank, Mode.NORMAL)
    pending, ended = [], []
    for num_works in (2, 4):  # counts and payload of each
        pending.append(dispatcher.dispatch(**given))
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if len(spy.works) == num_works and all(w.is_completed() for w in spy.works):
                break
            time.sleep(0.01)
        ended.append(sum(work.is_completed() for work in spy.works))
    for one in pending:
        one.wait()
    return ended


def test_tokens_travel_while_nobody_waits(rank_pool: RankPool):
    assert rank_pool.run(_travel_without_waiting, 2) == [[2, 4], [2, 4]]


def _lose_rank_one_with_two_in_flight(info: RankInfo, is_dead: bool) -> str:
    case = Case("uniform", (4, 4))
    dispatcher = create_dispatcher(
        "collective", case.spec, dist.new_group(timeout=timedelta(seconds=3))
    )
    given = arguments(case, info.rank, Mode.NORMAL)
    first = dispatcher.dispatch(**given)
    if info.rank == 1:
        first.wait()  # its tokens have left
        if is_dead:
            os._exit(1)
        time.sleep(5)
        return "late"
    second = dispatcher.dispatch(**given)  # its counts will not be answered
    first.wait()
    try:
        second.wait()
    except RuntimeError as error:
        dispatcher.destroy()
        return str(error)
    return "no error"


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_peer_lost_under_the_second_of_two_gives_an_error_in_time(is_dead: bool):
    start = time.monotonic()
    worker = _lose_rank_one_with_two_in_flight
    message = run_ranks(worker, 2, is_dead, timeout_s=30, may_die=(1,))[0]
    assert "rank 0: the counts exchange failed" in message
    assert time.monotonic() - start < 20
