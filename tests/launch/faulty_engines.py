"""Engines that break or tell at a known place; rank processes import them by name.

Nothing heavy is imported here: it would be imported in every rank.
"""

import threading
import time
from typing import Any

from moe_ep.config import EngineConfig
from moe_ep.engine.engine import Engine
from moe_ep.engine.request import EngineRequest
from moe_ep.engine.world import World


class BrokenLoad(Engine):
    """Rank 1 cannot load; the others wait for it."""

    @classmethod
    def create(cls, config: EngineConfig, world: World, num_threads: int) -> Engine:
        if world.rank == 1:
            raise OSError("shard 3 is unreadable")
        threading.Event().wait()
        raise AssertionError("unreachable")


class BrokenStep(Engine):
    """The third step with work raises."""

    def step(self) -> bool:
        if self._progress.step == 2:
            raise ArithmeticError("a step went wrong")
        return super().step()


class StuckStep(Engine):
    """The third step with work never ends."""

    def step(self) -> bool:
        if self._progress.step == 2:
            self._progress.stage = "stuck here"
            threading.Event().wait()
        return super().step()


class CallJournal(Engine):
    """Its load records are the calls that it got, in order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._calls: list[str] = []

    def submit(self, requests: list[EngineRequest]) -> None:
        self._calls += [f"submit {request.request_id}" for request in requests]
        super().submit(requests)

    def abort(self, request_ids: list[str]) -> None:
        self._calls += [f"abort {request_id}" for request_id in request_ids]
        super().abort(request_ids)

    def load_records(self) -> Any:
        return list(self._calls)


class SlowText(str):
    """Takes its time where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _after_a_while, (str(self),)


def _after_a_while(text: str) -> str:
    time.sleep(0.1)
    return text


def path(engine: type[Any]) -> str:
    """The name that ``EngineClient`` takes."""
    return f"{engine.__module__}:{engine.__name__}"
