"""How long a command's engine lives: from its start to the end of a block, signals included."""

import asyncio
import dataclasses
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from launch.launch_config import ClusterConfig
from moe_ep.config import EngineConfig

if TYPE_CHECKING:
    from launch.client import EngineClient

logger = logging.getLogger(__name__)

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

    with _raising_interrupt():
        client = EngineClient(config, ray_address=cluster.ray_address)
    await client.load()
    try:
        _log_settings(client)
        yield client
    finally:
        await client.shutdown()


def _log_settings(client: "EngineClient") -> None:
    """What runs: every count with its scope, and every setting that was left open with its reason.

    What a default cannot tell, the size of the cache, comes from the ranks.
    """
    for field in dataclasses.fields(client.config):
        if field.metadata["scope"] is not None:
            value = getattr(client.config, field.name)
            logger.info("%s = %s (%s)", field.name, value, field.metadata["scope"])
    for choice in client.infos[0].choices:
        logger.info("%s = %s: %s", choice.field, choice.value, choice.reason)
    limits = client.limits
    logger.info("cache = %d blocks of %d tokens (per rank)", limits.num_blocks, limits.block_size)


@contextmanager
def _raising_interrupt() -> Iterator[None]:
    """Stop signals raise KeyboardInterrupt: for work that blocks the loop, and with it the loop's
    own handlers."""
    before = [(number, signal.signal(number, _interrupt)) for number in STOP_SIGNALS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
