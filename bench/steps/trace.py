"""Steps in Chrome's trace format, which Perfetto and chrome://tracing open.

A process per rank; in it a row per micro-batch with what the rank does for it, and a row per
micro-batch with what is on its way meanwhile.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moe_ep.engine.step_times import Kind, RankTimes
from moe_ep.progress import Stage
from moe_ep.recorder import STAGES

_SENDS = (Stage.DISPATCH_SEND, Stage.DISPATCH_COUNTS, Stage.COMBINE_SEND)
_ARRIVALS = (Stage.DISPATCH_WAIT, Stage.COMBINE_WAIT)
_FLIGHT_ROW = 10  # of micro-batch 0; computing has row 0


def trace_json(steps: Mapping[str, Sequence[RankTimes]]) -> dict[str, Any]:
    """steps: by name, one step of all ranks; shown one after another."""
    events = list(_names(steps))
    start_us = 0.0
    for name, ranks in steps.items():
        first_ns = min(int(times.record.bounds_ns[0]) for times in ranks)
        last_ns = max(int(times.record.bounds_ns[-1]) for times in ranks)
        for rank, times in enumerate(ranks):
            for event in (*_pieces(times), *_flights(times)):
                at_us = start_us + (event.pop("start_ns") - first_ns) / 1e3
                spent_us = event.pop("duration_ns") / 1e3
                place = {"ph": "X", "pid": rank, "ts": at_us, "dur": spent_us}
                event["args"] |= {"step": times.record.step, "run": name}
                events.append(event | place)
        start_us += (last_ns - first_ns) / 1e3 * 1.05
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class Flight(NamedTuple):
    """An exchange on its way: from the end of what sends it to the end of the wait."""

    name: str
    micro_batch: int
    start_ns: int
    stop_ns: int


def flights(times: RankTimes) -> Iterator[Flight]:
    """In the order of their arrival."""
    record = times.record
    sent: dict[tuple[str, int, int], int] = {}
    for index, code in enumerate(record.stages):
        name = STAGES[code].split()[0]
        micro_batch, stop = int(record.micro_batches[index]), int(record.bounds_ns[index + 1])
        key = (name, int(record.layers[index]), micro_batch)
        if STAGES[code] in _SENDS:
            sent[key] = stop
        elif STAGES[code] in _ARRIVALS:
            yield Flight(name, micro_batch, sent.pop(key), stop)


def _names(steps: Mapping[str, Sequence[RankTimes]]) -> Iterator[dict[str, Any]]:
    num_ranks = max(len(ranks) for ranks in steps.values())
    used = {int(m) for ranks in steps.values() for times in ranks for m in _micro_batches(times)}
    for rank in range(num_ranks):
        yield _name("process_name", rank, 0, f"rank {rank}")
        for index in sorted(used):
            yield _name("thread_name", rank, index, f"micro-batch {index}")
            yield _name("thread_name", rank, _FLIGHT_ROW + index, f"in flight, {index}")


def _micro_batches(times: RankTimes) -> np.ndarray:
    return np.unique(times.record.micro_batches)


def _name(what: str, rank: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": row, "args": {"name": name}}


def _pieces(times: RankTimes) -> Iterator[dict[str, Any]]:
    """Every piece; a wait in its two parts, as far as they took time."""
    record, waits = times.record, times.is_wait
    for index, code in enumerate(record.stages):
        start, stop = (int(bound) for bound in record.bounds_ns[index : index + 2])
        arrived = start + int(times.skew_ns[index])
        rest = Kind.TRANSFER if waits[index] else Kind.WORK
        layer = int(record.layers[index])
        for kind, begin, end in ((Kind.SKEW, start, arrived), (rest, arrived, stop)):
            if end > begin or kind is Kind.WORK:
                yield {
                    "name": STAGES[code] if kind is Kind.WORK else f"{STAGES[code]}: {kind.name}",
                    "cat": kind.name.lower(),
                    "tid": int(record.micro_batches[index]),
                    "start_ns": begin,
                    "duration_ns": end - begin,
                    "args": {"layer": None if layer < 0 else layer},
                }


def _flights(times: RankTimes) -> Iterator[dict[str, Any]]:
    for flight in flights(times):
        yield {
            "name": flight.name,
            "cat": "in flight",
            "tid": _FLIGHT_ROW + flight.micro_batch,
            "start_ns": flight.start_ns,
            "duration_ns": flight.stop_ns - flight.start_ns,
            "args": {},
        }
