"""Recorded steps of real engines: a late rank shows as skew, a slow wire as transfer, bits stay."""

import time
from dataclasses import replace
from typing import Any

import pytest

from moe_ep.config import EngineConfig
from moe_ep.dispatch.base import Pending
from moe_ep.engine.engine import Engine
from moe_ep.engine.request import EngineRequest
from moe_ep.engine.step_times import Kind, RankTimes, step_times
from moe_ep.progress import Stage
from moe_ep.recorder import STAGES, StepRecord
from tests.engine.driver import engine_worker, greedy, world_of
from tests.ranks import RankInfo, RankPool
from tests.tiny import tiny_checkpoint

DELAY_S = 0.1
NUM_STEPS = 10  # of which each second one is recorded
EXCHANGE_WAITS = (Stage.DISPATCH_COUNTS, Stage.DISPATCH_WAIT, Stage.COMBINE_WAIT)
NUM_MOE_LAYERS = 2
# A layer sends 8 rows of 64 float32 values.
SECONDS_PER_BYTE = DELAY_S / (8 * 64 * 4)
OVERLAP: dict[str, Any] = {"enable_two_batch_overlap": True, "tbo_token_threshold": 2}


def config(**flags: Any) -> EngineConfig:
    return EngineConfig(
        model=str(tiny_checkpoint("v3").path),
        ep_size=2,
        num_kv_blocks=64,
        step_time_interval=2,
        **flags,
    )


class SlowWire(Pending):
    """What was sent arrives late by so much a byte."""

    def __init__(self, pending: Pending, num_bytes: int) -> None:
        self._pending, self._num_bytes = pending, num_bytes

    def wait(self):
        time.sleep(SECONDS_PER_BYTE * self._num_bytes)
        return self._pending.wait()


def recording_worker(info: RankInfo, config: EngineConfig, fault: str) -> list[StepRecord]:
    engine = Engine.create(config, world_of(info), num_threads=1)
    break_engine(engine, info.rank, fault)
    engine.submit(
        [
            EngineRequest(f"{info.rank}-{i}", tuple(range(2, 20 + i)), greedy(40, ignore_eos=True))
            for i in range(8)
        ]
    )
    for _ in range(NUM_STEPS):
        engine.step()
    return engine.take_records()


def break_engine(engine: Engine, rank: int, fault: str) -> None:
    if fault == "rank 1 is late" and rank == 1:
        attention = engine._parts.decoder.layers[1].attention
        project = attention.o_proj

        def late(x):
            time.sleep(DELAY_S)
            return project(x)

        attention.o_proj = late
    if fault == "the wire is slow":
        dispatcher = engine._parts.dispatcher
        dispatch = dispatcher.dispatch

        def slow(**given):
            return SlowWire(dispatch(**given), given["x"].nbytes)

        dispatcher.dispatch = slow


def recorded_steps(pool: RankPool, fault: str, **flags: Any) -> list[list[RankTimes]]:
    records = pool.run(recording_worker, 2, config(**flags), fault)
    steps = [step_times(step) for step in zip(*records, strict=True)]
    assert [step[0].record.step for step in steps] == [1, 3, 5, 7, 9]
    return steps


def waited_s(steps: list[list[RankTimes]], rank: int, kind: Kind) -> float:
    """What the rank waited in the layers of the quickest step: a busy machine slows others."""
    codes = [STAGES.index(stage) for stage in EXCHANGE_WAITS]
    quickest = min(steps, key=lambda step: max(times.total_s for times in step))
    return quickest[rank].table()[:-1, codes, kind].sum()


@pytest.mark.parametrize("flags", [{}, OVERLAP], ids=["one batch", "two batches"])
def test_a_late_rank_is_skew_on_the_other_and_not_on_itself(rank_pool: RankPool, flags: Any):
    steps = recorded_steps(rank_pool, "rank 1 is late", **flags)
    num_sleeps = 2 if flags else 1
    assert waited_s(steps, 0, Kind.SKEW) > 0.8 * num_sleeps * DELAY_S
    assert waited_s(steps, 1, Kind.SKEW) < 0.5 * num_sleeps * DELAY_S
    for rank in (0, 1):
        assert waited_s(steps, rank, Kind.TRANSFER) < 0.5 * num_sleeps * DELAY_S


def test_a_slow_wire_is_transfer_on_both(rank_pool: RankPool):
    steps = recorded_steps(rank_pool, "the wire is slow")
    for rank in (0, 1):
        assert waited_s(steps, rank, Kind.TRANSFER) > 0.8 * NUM_MOE_LAYERS * DELAY_S
        assert waited_s(steps, rank, Kind.SKEW) < 0.5 * NUM_MOE_LAYERS * DELAY_S


def test_a_step_is_seen_whole_and_in_every_layer(rank_pool: RankPool):
    for step in recorded_steps(rank_pool, "none"):
        for times in step:
            table = times.table(num_layers=3)
            assert table.sum() == pytest.approx(times.total_s)
            shown = {STAGES[code] for code in times.record.stages}
            missing = {Stage.LOADING, Stage.ASLEEP, Stage.GRAPH}
            assert shown == set(Stage) - missing
            assert (table[:3].sum(axis=(1, 2)) > 0).all()
            assert table[0, STAGES.index(Stage.DENSE_MLP), Kind.WORK] > 0
            assert table[1:3, STAGES.index(Stage.EXPERTS), Kind.WORK].all()


@pytest.mark.parametrize("flags", [{}, OVERLAP], ids=["one batch", "two batches"])
def test_recording_changes_no_bit(rank_pool: RankPool, flags: Any):
    requests = [
        [EngineRequest(f"{rank}-{i}", tuple(range(2, 9 + 5 * i)), greedy(6)) for i in range(3)]
        for rank in range(2)
    ]
    every, never = (
        rank_pool.run(
            engine_worker, 2, replace(config(**flags), step_time_interval=interval), requests
        )
        for interval in (1, 0)
    )
    for recorded, bare in zip(every, never, strict=True):
        for request_id, result in bare.requests.items():
            again = recorded.requests[request_id]
            assert again.token_ids == result.token_ids
            for row, expected in zip(again.logits, result.logits, strict=True):
                assert row.equal(expected)
