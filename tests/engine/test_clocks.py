"""Clocks of rank processes that are apart by what the test says."""

import time

import pytest

from moe_ep.engine.clocks import clock_offset_ns
from tests.ranks import RankInfo, RankPool

HOUR_NS = 3600 * 10**9


def offset_worker(info: RankInfo, ahead_ns: list[int]) -> int:
    return clock_offset_ns(info.group, lambda: time.perf_counter_ns() + ahead_ns[info.rank])


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_clocks_of_one_host_are_the_same(rank_pool: RankPool, num_ranks: int):
    assert rank_pool.run(offset_worker, num_ranks, [0] * num_ranks) == [0] * num_ranks


def test_offsets_are_found_and_are_to_rank_0(rank_pool: RankPool):
    ahead = [3 * HOUR_NS, -HOUR_NS, 5, 10 * HOUR_NS]
    found = rank_pool.run(offset_worker, 4, ahead)
    for rank in range(4):
        # Half the quickest round trip of sixteen, on a busy machine.
        assert abs(found[rank] - (ahead[rank] - ahead[0])) < 20_000_000, found


def test_a_single_rank_has_nobody_to_ask():
    assert clock_offset_ns(None) == 0
