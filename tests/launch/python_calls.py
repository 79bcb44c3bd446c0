"""Counts calls of Python functions, where a test of time would depend on the machine."""

import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


class PythonCalls:
    """The calls that this thread makes within the ``with``."""

    def __init__(self) -> None:
        self._counts: Counter[CodeType] = Counter()

    def of(self, function: Callable[..., Any]) -> int:
        return self._counts[function.__code__]

    @property
    def total(self) -> int:
        return self._counts.total()

    def __enter__(self) -> "PythonCalls":
        self._before = sys.getprofile()
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self._counts[frame.f_code] += 1
