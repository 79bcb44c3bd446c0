"""Who starts the exchanges of a rank, so that all ranks start them in the same order.

Starting one may mean to wait for the peers first: how much will come must be known. With one
micro-batch the caller's own thread does it, because it will wait for the result soon anyway, and
handing over would only cost. With two it has the other one to compute meanwhile. So whatever is
started while another exchange is in flight is started by a thread of the lane, one after another.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic

import torch

from moe_ep.dispatch.base import Pending, T


class Lane:
    """The order of one rank's exchanges. Its thread starts when it is first needed."""

    def __init__(self) -> None:
        self._num_in_flight = 0
        self._thread: ThreadPoolExecutor | None = None

    def open(self, *, may_hand_over: bool) -> "Exchange":
        """The next exchange. may_hand_over: whether another thread may start it."""
        if self._num_in_flight == 0 or not may_hand_over:
            return Exchange(self, None)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="exchange")
        return Exchange(self, self._thread)

    def enter(self) -> None:
        self._num_in_flight += 1

    def leave(self) -> None:
        self._num_in_flight -= 1

    def close(self) -> None:
        """Start nothing more, and wait for nothing. May be repeated."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None


class Exchange:
    """One exchange, which may take several steps to start."""

    def __init__(self, lane: Lane, thread: ThreadPoolExecutor | None) -> None:
        self._lane = lane
        self._thread = thread

    @property
    def is_handed_over(self) -> bool:
        """Whether the lane's thread takes the steps."""
        return self._thread is not None

    def start(self, step: Callable[[], T]) -> Callable[[], T]:
        """Take a step, now or after all earlier ones; the call that is returned waits for it, and
        returns or raises what it did."""
        if self._thread is None:
            value = step()
            return lambda: value
        is_inference = torch.is_inference_mode_enabled()  # threads do not inherit it

        def in_thread() -> T:
            with torch.inference_mode(is_inference):
                return step()

        return self._thread.submit(in_thread).result

    def pending(self, finish: Callable[[], T]) -> Pending[T]:
        """In flight from here on, until ``wait`` has called ``finish``."""
        self._lane.enter()
        return _InFlight(self._lane, finish)


@dataclass(frozen=True)
class _InFlight(Pending[T], Generic[T]):
    lane: Lane
    finish: Callable[[], T]

    def wait(self) -> T:
        try:
            return self.finish()
        finally:
            self.lane.leave()
