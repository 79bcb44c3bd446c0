"""Keeps when each piece of a step began: the listener of a rank's ``Progress`` in recorded steps.

Knows neither ranks nor what the pieces mean. While it does not listen it costs nothing; while it
does, one look at a clock and one entry of a list per piece.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from moe_ep.progress import Progress, Stage

if TYPE_CHECKING:
    import torch

STAGES = tuple(Stage)
_CODES = {stage: code for code, stage in enumerate(STAGES)}


@dataclass(frozen=True, eq=False)
class StepRecord:
    """One rank's step, cut into n pieces without a gap.

    bounds_ns: int64 ``[n + 1]``, rising; piece i lasts from bound i to bound i + 1. stages: int8
    ``[n]``, positions in ``STAGES``. layers: int16 ``[n]``, -1 outside the layers. micro_batches:
    int8 ``[n]``. num_tokens: real tokens of this rank.
    """

    step: int
    num_tokens: int
    bounds_ns: np.ndarray
    stages: np.ndarray
    layers: np.ndarray
    micro_batches: np.ndarray

    @property
    def durations_ns(self) -> np.ndarray:
        """int64 ``[n]``."""
        return np.diff(self.bounds_ns)

    @property
    def total_ns(self) -> int:
        return int(self.bounds_ns[-1] - self.bounds_ns[0])

    def shifted(self, offset_ns: int) -> "StepRecord":
        """The same step on a clock that shows ``offset_ns`` less."""
        return replace(self, bounds_ns=self.bounds_ns - offset_ns)


class Clock(Protocol):
    def now(self) -> Any:
        """A moment, which ``resolve`` turns into a time later."""

    def resolve(self, moments: Sequence[Any]) -> list[int]:
        """Nanoseconds of ``time.perf_counter_ns``, in the same order."""


class HostClock:
    """For devices that compute when they are told to."""

    now = staticmethod(time.perf_counter_ns)

    def resolve(self, moments: Sequence[int]) -> list[int]:
        return list(moments)


class CudaClock:
    """Events on the current stream: a piece lasts as long as the stream works on it, however far
    ahead the host is. Where the stream has nothing to do, an event passes when it is recorded, so
    that what only the host does counts too.
    """

    def __init__(self) -> None:
        from torch.cuda import Event

        self._create = partial(Event, enable_timing=True)
        self._idle: list[torch.cuda.Event] = []  # making one costs more than recording it

    def now(self) -> "torch.cuda.Event":
        event = self._idle.pop() if self._idle else self._create()
        event.record()
        return event

    def resolve(self, moments: "Sequence[torch.cuda.Event]") -> list[int]:
        """Waits for the last of them; all must be of one stream."""
        last = moments[-1]
        last.synchronize()
        end_ns = time.perf_counter_ns()
        times = [end_ns - round(1e6 * moment.elapsed_time(last)) for moment in moments]
        self._idle += moments
        return times


def create_clock(device: "torch.device") -> Clock:
    return CudaClock() if device.type == "cuda" else HostClock()


class Recorder:
    """``start`` before a step and ``finish`` after it, in the thread that runs the step.

    A step that is started again, because nobody had work, is recorded anew.
    """

    def __init__(self, progress: Progress, clock: Clock) -> None:
        self._progress = progress
        self._clock = clock
        self._step = 0
        self._marks: list[tuple[Any, Stage, int | None, int]] = []

    def start(self) -> None:
        self._step = self._progress.step
        self._marks = marks = []
        now = self._clock.now

        def listen(progress: Progress) -> None:
            marks.append((now(), progress.stage, progress.layer, progress.micro_batch))

        self._progress.listener = listen

    def finish(self) -> StepRecord:
        """Call where the last piece ends."""
        end = self._clock.now()
        self._progress.listener = None
        moments, stages, layers, micro_batches = zip(*self._marks, strict=True)
        return StepRecord(
            step=self._step,
            num_tokens=self._progress.num_tokens,
            bounds_ns=np.array(self._clock.resolve([*moments, end]), dtype=np.int64),
            stages=np.array([_CODES[stage] for stage in stages], dtype=np.int8),
            layers=np.array([-1 if layer is None else layer for layer in layers], dtype=np.int16),
            micro_batches=np.array(micro_batches, dtype=np.int8),
        )
