"""Agreement and sleep between real rank processes: no lost wake-up, no burned core, no hang."""

import os
import random
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from moe_ep.engine import step_sync
from moe_ep.engine.step_sync import GroupSync, LocalSync
from tests.ranks import run_ranks


def make_sync(info, *, store=None, timeout_s=30.0):
    return GroupSync(
        group=info.group,
        store=store or info.store,
        rank=info.rank,
        num_ranks=info.num_ranks,
        timeout_s=timeout_s,
    )


def never():
    return False


class Inbox:
    """Work that another thread brings around the moment at which this rank falls asleep.

    That moment is when ``has_news`` is asked; each item comes a little after it, or much.
    """

    def __init__(self, sync, num_items, seed):
        self._sync = sync
        self._rng = random.Random(seed)
        self._num_to_come = num_items
        self._num_waiting = 0
        self._falls_asleep = threading.Event()
        self._is_taken = threading.Event()
        self._is_over = num_items == 0
        self.said_over = False
        self._thread = threading.Thread(target=self._produce, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()

    def has_news(self):
        self._falls_asleep.set()
        return self._num_waiting > 0 or self._is_over

    def vote(self):
        """[work taken, whether no more will come]; after the latter, the end is news no more."""
        self.said_over = self._is_over
        taken, self._num_waiting = self._num_waiting, 0
        if taken:
            self._is_taken.set()
        return [taken, self.said_over]

    def _produce(self):
        for _ in range(self._num_to_come):
            assert self._falls_asleep.wait(timeout=60), "the rank never slept"
            self._falls_asleep.clear()
            self._is_taken.clear()
            time.sleep(self._rng.choice([0, 0, 2e-5, 2e-4, 2e-3]))
            self._num_waiting += 1
            self._sync.wake()
            assert self._is_taken.wait(timeout=60), "a piece of work was lost"
        self._is_over = True
        self._sync.wake()


def engine_loop(sync, inbox):
    """Agree, work or sleep until all inboxes are over; returns (work seen anywhere, sleeps)."""
    num_seen = num_sleeps = 0
    while True:
        votes = sync.agree(inbox.vote())
        work = sum(vote[0] for vote in votes)
        num_seen += work
        if work == 0:
            if all(vote[1] for vote in votes):
                return num_seen, num_sleeps
            num_sleeps += 1
            sync.sleep(never if inbox.said_over else inbox.has_news)


def rapid_worker(info, items_per_rank):
    sync = make_sync(info)
    with Inbox(sync, items_per_rank[info.rank], seed=info.rank) as inbox:
        return engine_loop(sync, inbox)


@pytest.mark.parametrize("items_per_rank", [(600, 600), (0, 300, 0, 400)], ids=str)
def test_a_thousand_transitions_lose_nothing(rank_pool, items_per_rank):
    results = rank_pool.run(rapid_worker, len(items_per_rank), items_per_rank)
    assert len(set(results)) == 1, "ranks saw different waves"
    num_seen, num_sleeps = results[0]
    assert num_seen == sum(items_per_rank)
    assert num_sleeps >= max(items_per_rank)


def test_local_sync_loses_nothing_either():
    sync = LocalSync()
    with Inbox(sync, 1000, seed=0) as inbox:
        num_seen, num_sleeps = engine_loop(sync, inbox)
    assert num_seen == 1000
    assert num_sleeps >= 1000


def agree_worker(info):
    sync = make_sync(info)
    first = sync.agree([info.rank, -5, 2**40 + info.rank])
    return first, sync.agree([info.rank * 7])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_agree_gives_all_vectors_in_rank_order(rank_pool, num_ranks):
    first = [[rank, -5, 2**40 + rank] for rank in range(num_ranks)]
    second = [[rank * 7] for rank in range(num_ranks)]
    assert rank_pool.run(agree_worker, num_ranks) == [(first, second)] * num_ranks


def test_local_agreement_is_the_own_vector():
    assert LocalSync().agree([1, -2]) == [[1, -2]]


def wake_worker(info, waker, idle_s):
    """CPU seconds that a sleep of ``idle_s`` costs this process; ``waker`` ends it for all."""
    sync = make_sync(info)
    sync.agree([0])
    used = cpu_seconds_asleep(sync, idle_s if info.rank == waker else None)
    sync.agree([0])
    return used


def cpu_seconds_asleep(sync, wake_after_s):
    """Sleep until a timer, started once this rank counts as asleep, or a peer wakes it."""

    def starts_timer():
        if wake_after_s is not None:
            threading.Timer(wake_after_s, sync.wake).start()
        return False

    start = time.process_time()
    sync.sleep(starts_timer)
    return time.process_time() - start


def arrives_unseen(sync):
    """Work that comes right after this rank has looked for it."""
    sync.wake()
    return False


def unseen_worker(info):
    sync = make_sync(info)
    for waker in range(info.num_ranks):
        sync.agree([0])
        sync.sleep(lambda is_waker=info.rank == waker: arrives_unseen(sync) if is_waker else False)


@pytest.mark.timeout(60)
def test_work_that_comes_between_the_look_and_the_sleep_is_not_lost(rank_pool):
    rank_pool.run(unseen_worker, 2)
    sync = LocalSync()
    sync.sleep(lambda: arrives_unseen(sync))


@pytest.mark.parametrize("waker", [0, 1, 2])
def test_any_rank_wakes_all(rank_pool, waker):
    rank_pool.run(wake_worker, 3, waker, 0.05)


def test_sleep_burns_no_core(rank_pool):
    idle_s = 2.0
    used = [*rank_pool.run(wake_worker, 2, 1, idle_s), cpu_seconds_asleep(LocalSync(), idle_s)]
    assert max(used) < 0.05 * idle_s


def heartbeat_worker(info):
    usual, step_sync.HEARTBEAT_S = step_sync.HEARTBEAT_S, 0.05
    try:
        wake_worker(info, waker=1, idle_s=0.5)
    finally:
        step_sync.HEARTBEAT_S = usual


def test_heartbeats_end_no_sleep(rank_pool):
    rank_pool.run(heartbeat_worker, 2)


def keys_worker(info):
    sync = make_sync(info)
    sync.wake()  # awake: nothing to end, and nothing may be left behind for the next sleep
    was_left = info.store.check(["wake/0"])
    for _ in range(5):
        sync.agree([0])
        sync.sleep(lambda: info.rank == 1)
    sync.agree([0])
    return was_left, [info.store.check([f"wake/{wave}"]) for wave in range(5)]


def test_waking_the_awake_does_nothing_and_old_keys_go(rank_pool):
    expected = (False, [False, False, False, False, True])
    assert rank_pool.run(keys_worker, 2) == [expected, expected]


def late_worker(info):
    sync = make_sync(info, timeout_s=0.5)
    if info.rank == 1:
        info.store.wait(["rank 0 gave up"], timedelta(seconds=30))
        return None
    with pytest.raises(RuntimeError) as error:
        sync.agree([0])
    info.store.set("rank 0 gave up", "")
    return str(error.value)


def test_a_peer_that_does_not_come_is_an_error_within_the_limit(rank_pool):
    message = rank_pool.run(late_worker, 2)[0]
    assert "rank 0 got no agreement of all 2 ranks within 0.5 s" in message


def dead_peer_worker(info):
    sync = make_sync(info)
    sync.agree([0])
    if info.rank == 1:
        os._exit(1)
    with pytest.raises(RuntimeError) as error:
        sync.agree([0])
    return str(error.value)


def test_a_dead_peer_is_an_error():
    results = run_ranks(dead_peer_worker, 3, may_die=(1,))
    for rank in (0, 2):
        assert f"rank {rank} got no agreement of all 3 ranks" in results[rank]


def lost_store_worker(info):
    if info.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        info.store.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(info.store.get("port")), is_master=False)
    sync = make_sync(info, store=store)
    sync.agree([0])
    if info.rank == 0:
        time.sleep(0.2)  # the others are asleep by now; should one not be, it fails all the same
        os._exit(1)
    with pytest.raises(RuntimeError) as error:
        sync.sleep(never)
    return str(error.value)


def test_a_sleeper_notices_that_the_store_died():
    results = run_ranks(lost_store_worker, 3, may_die=(0,))
    for rank in (1, 2):
        assert f"rank {rank} lost the rendezvous store while asleep" in results[rank]
