"""Engines that break at a known place; rank processes import them by name."""

import threading
from typing import Any

from moe_ep.config import EngineConfig
from moe_ep.engine.engine import Engine
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


def path(engine: type[Any]) -> str:
    """The name that ``EngineClient`` takes."""
    return f"{engine.__module__}:{engine.__name__}"
