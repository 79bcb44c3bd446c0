"""The launcher of rank processes itself: results, failures, deaths, time limits, no orphans."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, RankInfo, RankPool, run_ranks


def _sum_of_ranks(info: RankInfo, base: int) -> tuple[int, int, int]:
    value = torch.tensor([base + info.rank])
    dist.all_reduce(value, group=info.group)
    return info.rank, int(value), os.getpid()


def _raise_on_rank_one(info: RankInfo) -> None:
    if info.rank == 1:
        raise ValueError("the reason")


def _die_on_rank_one(info: RankInfo) -> int:
    if info.rank == 1:
        info.store.wait(["rank 0 is connected"])
        os._exit(3)
    info.store.set("rank 0 is connected", "")
    return os.getpid()


def _sleep(info: RankInfo, path: str) -> None:
    with open(f"{path}/{info.rank}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)


def test_results_come_by_rank_and_processes_are_reused(rank_pool: RankPool) -> None:
    first = rank_pool.run(_sum_of_ranks, 2, 10)
    second = rank_pool.run(_sum_of_ranks, 4, 0)
    assert [r[:2] for r in first] == [(0, 21), (1, 21)]
    assert [r[:2] for r in second] == [(rank, 6) for rank in range(4)]
    assert [r[2] for r in first] == [r[2] for r in second[:2]]


def test_an_exception_is_reported_with_its_rank_and_the_pool_goes_on(rank_pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"\[rank 1\] ValueError: the reason") as failure:
        rank_pool.run(_raise_on_rank_one, 2)
    assert "[rank 0]" not in str(failure.value)
    assert rank_pool.run(_sum_of_ranks, 2, 0)[0][1] == 1


def test_a_dead_rank_is_reported_or_allowed() -> None:
    with RankPool(2) as pool:
        with pytest.raises(RankError, match=r"\[rank 1\] the process died"):
            pool.run(_die_on_rank_one, 2)
        assert pool.run(_die_on_rank_one, 2, may_die=(1,))[1] is None


def test_a_late_rank_is_ended(tmp_path) -> None:
    with pytest.raises(RankError, match=r"\[rank 1\] no result within"):
        run_ranks(_sleep, 2, str(tmp_path), timeout_s=2.0)
    for file in tmp_path.iterdir():
        assert not os.path.exists(f"/proc/{file.read_text()}")
