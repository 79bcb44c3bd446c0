"""Timing for the benchmarks: samples in turns, cold caches, and what a CPU's cores can do at most:
read memory, copy it, multiply.

A candidate is a list of calls that do the same work on different memory. One round makes every call
of every candidate once, in turns, so that a change of the machine's speed meets all of them, and so
that a call finds its data in memory, and not in the cache, as long as a candidate's calls together
touch much more than the cache holds.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch

from moe_ep.linear import Linear

COLD_BYTES = 256 << 20  # several times the last-level cache that one rank can reach
CHUNK_BYTES = 4 << 20
PRODUCT_SIZE = 1024

Call = Callable[[], object]


@dataclass(frozen=True)
class Samples:
    """Seconds of every call that was timed."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The span that holds the middle half of the samples: their spread."""
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third


def measure_in_turns(
    candidates: Mapping[str, Sequence[Call]], *, rounds: int
) -> dict[str, Samples]:
    """Time every candidate; one round before the first that counts warms up.

    Raises ValueError for fewer than two samples a candidate, which have no spread.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round_idx in range(rounds + 1):
        for calls in zip_longest(*candidates.values()):
            for name, call in zip(candidates, calls, strict=True):
                if call is not None:
                    elapsed = _time(call)
                    if round_idx > 0:
                        seconds[name].append(elapsed)
    if any(len(values) < 2 for values in seconds.values()):
        raise ValueError(f"{rounds} rounds of {candidates} give fewer than two samples")
    return {name: Samples(tuple(values)) for name, values in seconds.items()}


def memory_read_ceiling() -> float:
    """Bytes per second at which this process's threads read memory that is not cached.

    The fastest of many sums over chunks of a large array: interruptions only ever slow one down.
    """
    chunks = torch.ones(COLD_BYTES // CHUNK_BYTES, CHUNK_BYTES // 4).unbind()
    samples = measure_in_turns({"sum": [chunk.sum for chunk in chunks]}, rounds=5)["sum"]
    fastest = sorted(samples.seconds)[: len(chunks)]
    return CHUNK_BYTES / statistics.median(fastest)


def memory_copy_ceiling() -> float:
    """Bytes read and written per second when this process's threads copy what is not cached."""
    source = torch.ones(COLD_BYTES // CHUNK_BYTES, CHUNK_BYTES // 4).unbind()
    target = torch.empty(len(source), CHUNK_BYTES // 4).unbind()
    copies = [partial(to.copy_, chunk) for to, chunk in zip(target, source, strict=True)]
    samples = measure_in_turns({"copy": copies}, rounds=5)["copy"]
    fastest = sorted(samples.seconds)[: len(copies)]
    return 2 * CHUNK_BYTES / statistics.median(fastest)


def product_ceiling(dtype: torch.dtype) -> float:
    """FLOPs per second of a square product as the engine computes it, the fastest of several."""
    x, weight = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).to(dtype) for _ in range(2))
    product = partial(Linear(weight, dtype), x)
    samples = measure_in_turns({"product": [product]}, rounds=10)["product"]
    return 2 * PRODUCT_SIZE**3 / samples.best


def _time(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
