"""Where the time of a step went: work, transfer and skew of every piece, from all ranks' records.

Pure functions of records on one clock. A rank that waits for an exchange waits for the last peer to
hand its part over, which is **skew**, and then for the bytes, which is **transfer**. Everything
else is **work**.

Shape letters: n pieces of a record, L layers.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from moe_ep.progress import Stage
from moe_ep.recorder import STAGES, StepRecord

logger = logging.getLogger(__name__)


class Sends(NamedTuple):
    """The pieces in which a peer hands over its part of an exchange; of several, its last one.

    at_start: it has handed over when the piece begins, else when it ends.
    """

    stages: tuple[Stage, ...]
    at_start: bool


# Votes are sent at once, and counts before the rows are packed.
WAITS: Mapping[Stage, Sends] = {
    Stage.STEP_SHAPE: Sends((Stage.STEP_SHAPE,), at_start=True),
    Stage.DISPATCH_COUNTS: Sends((Stage.DISPATCH_SEND,), at_start=True),
    Stage.DISPATCH_WAIT: Sends((Stage.DISPATCH_SEND, Stage.DISPATCH_COUNTS), at_start=False),
    Stage.COMBINE_WAIT: Sends((Stage.COMBINE_SEND,), at_start=False),
}
_NEVER = np.iinfo(np.int64).min
_NS = 1e-9


class Kind(IntEnum):
    """What a piece's time is; see the module."""

    WORK = 0
    SKEW = 1
    TRANSFER = 2


@dataclass(frozen=True, eq=False)
class RankTimes:
    """One rank's step. skew_ns: int64 ``[n]``, the part of each piece that is skew; 0 but in
    waits."""

    record: StepRecord
    skew_ns: np.ndarray

    @property
    def total_s(self) -> float:
        return self.record.total_ns * _NS

    @property
    def is_wait(self) -> np.ndarray:
        """bool ``[n]``."""
        return np.isin(self.record.stages, [_code(stage) for stage in WAITS])

    def table(self, num_layers: int | None = None) -> np.ndarray:
        """Seconds, float64 ``[L + 1, stages, kinds]``; what is outside the layers comes last.

        num_layers: L; by default as many as the record shows.
        """
        record, durations = self.record, self.record.durations_ns
        size = int(record.layers.max()) + 1 if num_layers is None else num_layers
        seconds = np.zeros((size + 1, len(STAGES), len(Kind)))
        rest = np.where(self.is_wait, Kind.TRANSFER, Kind.WORK)
        place = (record.layers, record.stages)  # layer -1 is the last row
        np.add.at(seconds, (*place, rest), (durations - self.skew_ns) * _NS)
        np.add.at(seconds[:, :, Kind.SKEW], place, self.skew_ns * _NS)
        return seconds

    @property
    def exposed_share(self) -> float:
        """The share of the step in which the rank waited for others: skew and transfer."""
        waited = int(self.record.durations_ns[self.is_wait].sum())
        return waited / max(1, self.record.total_ns)


def step_times(records: Sequence[StepRecord]) -> list[RankTimes]:
    """One step of all ranks, in rank order, on one clock.

    Raises ValueError when the records are of different steps, or when a rank waits for an exchange
    that another's record does not show.
    """
    if len(steps := {record.step for record in records}) != 1:
        raise ValueError(f"records of one step are needed, those of {sorted(steps)} given")
    skews = [np.zeros(len(record.stages), dtype=np.int64) for record in records]
    num_keys = 1 + max(int(_keys(record).max()) for record in records)
    for wait, sends in WAITS.items():
        handed_over = np.array([_handed_over(record, sends, num_keys) for record in records])
        last, first = handed_over.max(axis=0), handed_over.min(axis=0)
        for record, skew in zip(records, skews, strict=True):
            index = np.flatnonzero(record.stages == _code(wait))
            keys = _keys(record)[index]
            if (first[keys] == _NEVER).any():
                raise ValueError(f"step {record.step}: not every rank's record shows each {wait}")
            late = last[keys] - record.bounds_ns[index]
            skew[index] = np.clip(late, 0, record.durations_ns[index])
    return [RankTimes(record, skew) for record, skew in zip(records, skews, strict=True)]


def _handed_over(record: StepRecord, sends: Sends, num_keys: int) -> np.ndarray:
    """int64 ``[num_keys]``: when this rank handed over its part of each exchange."""
    index = np.flatnonzero(np.isin(record.stages, [_code(stage) for stage in sends.stages]))
    times = np.full(num_keys, _NEVER, dtype=np.int64)
    times[_keys(record)[index]] = record.bounds_ns[index + (0 if sends.at_start else 1)]
    return times


def _keys(record: StepRecord) -> np.ndarray:
    """int64 ``[n]``: which of a step's exchanges of one kind a piece belongs to: layer (0 is
    outside of them) and micro-batch."""
    return (record.layers.astype(np.int64) + 1) * 2 + record.micro_batches


def _code(stage: Stage) -> int:
    return STAGES.index(stage)


class StepJoin:
    """Brings the records of all ranks together as they come in."""

    _MOST_OPEN = 16  # steps of which some rank's record is missing; the oldest goes

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: dict[int, dict[int, StepRecord]] = {}

    def add(self, rank: int, records: Sequence[StepRecord]) -> Iterator[list[RankTimes]]:
        """The steps that are complete with these records of one rank.

        One whose records do not fit together is left out: it is a fault, but none of serving.
        """
        for record in records:
            found = self._open.setdefault(record.step, {})
            found[rank] = record
            if len(found) == self._num_ranks:
                del self._open[record.step]
                try:
                    yield step_times([found[r] for r in range(self._num_ranks)])
                except ValueError:
                    logger.exception("no step times")
        while len(self._open) > self._MOST_OPEN:
            del self._open[min(self._open)]
