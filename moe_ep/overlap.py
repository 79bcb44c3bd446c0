"""Drives the forward pass, which is a generator that yields wherever communication is in flight.

One micro-batch: its generator is drained. Two: they take turns, so that one computes while the
other's tokens travel. There is no second copy of the forward pass. This module knows neither
layers nor batches.
"""

from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")


def run(generators: Sequence[Generator[None, None, T]]) -> list[T]:
    """Run the generators in turns, always in the given order, and return their results.

    The turns depend only on how often each generator yields, so ranks whose generators yield
    alike issue their exchanges in the same order. An exception closes the other generators and
    goes on to the caller.
    """
    results: dict[int, T] = {}
    running = dict(enumerate(generators))
    try:
        while running:
            for index, generator in list(running.items()):
                try:
                    next(generator)
                except StopIteration as stop:
                    results[index] = stop.value
                    del running[index]
    finally:
        for generator in running.values():
            generator.close()
    return [results[index] for index in range(len(generators))]
