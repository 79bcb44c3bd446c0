"""The HTTP service on an event loop of its own, so that tests can be ordinary blocking clients."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from launch.launch_config import ServerConfig
from launch.server import Server, listen, make_server, serving

T = TypeVar("T")

TIMEOUT_S = 60.0


class ServiceThread:
    """Serves ``client``, which it loads and shuts down, at ``url``. Use as a context manager."""

    def __init__(self, client: Any, settings: ServerConfig | None = None) -> None:
        self.client = client
        self._settings = settings or ServerConfig()
        self._sock = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self._started: Future[Server] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> "ServiceThread":
        self._thread.start()
        self._server = self._started.result(TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the service's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self.client.load()
            server = make_server(self.client, self._settings)
            async with serving(server, self._sock) as (_, ended):
                self._started.set_result(server)
                await ended
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            raise
        finally:
            await self.client.shutdown()
            self._sock.close()
