"""The recorder: what it keeps of a step, and times on a stream from events that are none."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from moe_ep.progress import Progress, Stage, Track
from moe_ep.recorder import STAGES, CudaClock, HostClock, Recorder


class Counter:
    """A clock that shows 10, 20, 30 and so on."""

    def __init__(self) -> None:
        self._now = 0

    def now(self) -> int:
        self._now += 10
        return self._now

    def resolve(self, moments) -> list[int]:
        return list(moments)


def test_pieces_tile_the_step_and_know_their_place():
    progress = Progress(step=7, num_tokens=5)
    recorder = Recorder(progress, Counter())
    recorder.start()
    progress.enter(Stage.SCHEDULING)
    track = Track(progress, micro_batch=1)
    track.layer = 2
    track.enter(Stage.GATE)
    progress.enter_within(Stage.DISPATCH_COUNTS)
    record = recorder.finish()
    assert (record.step, record.num_tokens) == (7, 5)
    assert record.bounds_ns.tolist() == [10, 20, 30, 40]
    assert record.durations_ns.sum() == record.total_ns == 30
    stages = [STAGES[code] for code in record.stages]
    assert stages == [Stage.SCHEDULING, Stage.GATE, Stage.DISPATCH_COUNTS]
    assert record.layers.tolist() == [-1, 2, 2]
    assert record.micro_batches.tolist() == [0, 1, 1]
    assert record.shifted(4).bounds_ns.tolist() == [6, 16, 26, 36]


def test_it_listens_between_start_and_finish_only():
    progress = Progress()
    recorder = Recorder(progress, Counter())
    progress.enter(Stage.LOADING)
    recorder.start()
    progress.enter(Stage.ASLEEP)  # nobody had work: the step begins anew
    recorder.start()
    progress.enter(Stage.SCHEDULING)
    record = recorder.finish()
    progress.enter(Stage.OUTPUTS)
    assert [STAGES[code] for code in record.stages] == [Stage.SCHEDULING]
    assert progress.listener is None


def test_the_host_clock_counts_nanoseconds_that_rise():
    clock = HostClock()
    moments = [clock.now() for _ in range(3)]
    assert clock.resolve(moments) == sorted(moments)


@dataclass
class FakeEvent:
    """Passes 1.5 ms after the one recorded before it."""

    enable_timing: bool
    passed_ms: float = -1.0

    def record(self) -> None:
        MADE.append(self)
        self.passed_ms = 1.5 * len(MADE)

    def synchronize(self) -> None:
        assert self.passed_ms > 0, "an event that was not recorded is waited for"

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.passed_ms - self.passed_ms


MADE: list[FakeEvent] = []


def test_events_are_put_on_the_host_clock_and_used_again(monkeypatch: pytest.MonkeyPatch):
    MADE.clear()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    clock = CudaClock()
    first = clock.resolve([clock.now() for _ in range(3)])
    assert np.diff(first).tolist() == [1_500_000, 1_500_000]
    assert abs(first[-1] - HostClock.now()) < 10**9  # the last one has just passed
    clock.resolve([clock.now() for _ in range(3)])
    assert len({id(event) for event in MADE}) == 3
    assert all(event.enable_timing for event in MADE)
