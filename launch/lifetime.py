"""How long a command's engine lives: from its start to the end of a ``with``, signals included."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from launch.launch_config import ClusterConfig
from moe_ep.config import EngineConfig

if TYPE_CHECKING:
    from launch.client import EngineClient

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Calls ``action`` on Ctrl-C and SIGTERM; at first it cancels the task that entered this.

    Cancelling lets every ``finally`` on the way out run, where the default would skip them all.
    """

    action: Callable[[], object]

    def __enter__(self) -> "StopSignals":
        task = asyncio.current_task()
        assert task is not None
        self.action = task.cancel
        self._loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            self._loop.add_signal_handler(number, lambda: self.action())
        return self

    def __exit__(self, *_: object) -> None:
        for number in STOP_SIGNALS:
            self._loop.remove_signal_handler(number)


def ignore() -> None:
    """The action while everything is being shut down anyway."""


@asynccontextmanager
async def running_engine(
    config: EngineConfig, cluster: ClusterConfig
) -> AsyncIterator["EngineClient"]:
    """A loaded engine that is gone afterwards, however the block ends."""
    from launch.client import EngineClient

    client = await EngineClient.start(config, ray_address=cluster.ray_address)
    try:
        yield client
    finally:
        await client.shutdown()
