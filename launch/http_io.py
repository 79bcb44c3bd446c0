"""Reading bodies and writing answers over ASGI, with limits and an eye on the client.

Knows neither endpoints nor engine.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from launch.api_error import ApiError, internal_error

T = TypeVar("T")

logger = logging.getLogger(__name__)

BODY_TIMEOUT_S = 30.0  # for a client to send all of its body
LAST_WORDS_S = 5.0  # to tell a client that its time is up


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body; ApiError 413 as soon as it is too large, 408 when it does not come."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise ApiError(413, f"the body is larger than {max_bytes} bytes")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    return bytes(body)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """The result of ``work``, which is cancelled when the client goes away or the time is up.

    Raises ClientDisconnect or ApiError 504 then. The body must have been read.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        both = {task, watch}
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if watch.done():
            raise ClientDisconnect
        raise ApiError(504, f"not finished within {timeout_s:g} s", type="timeout_error")
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def dump(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8")


def json_response(value: Any, status: int = 200) -> Response:
    return Response(dump(value), status, media_type="application/json")


def error_response(error: ApiError) -> Response:
    response = json_response(error.body(), error.status)
    if error.status in (429, 503):
        response.headers["retry-after"] = "1"
    return response


class EventStream(Response):
    """Server-sent events: one per item, an error event if it breaks off, then ``[DONE]``.

    ``close`` is called in every case, also when the client leaves or stops reading for too long.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any], None],
        *,
        close: Callable[[], None],
        timeout_s: float,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            async with aclosing(self._events):
                await until_disconnect(receive, self._send_events(send), self._timeout_s)
        except ClientDisconnect:
            logger.info("a client left in the middle of a stream")
        except ApiError as error:  # the time is up
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await _finish(send, error)
        finally:
            self._close()

    async def _send_events(self, send: Send) -> None:
        error = None
        try:
            async for event in self._events:
                await _send_event(send, dump(event))
        except ApiError as broken:
            error = broken
        except Exception:
            logger.exception("a stream failed")
            error = internal_error()
        await _finish(send, error)


async def _finish(send: Send, error: ApiError | None) -> None:
    if error is not None:
        await _send_event(send, dump(error.body()))
    await _send_event(send, b"[DONE]")
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_event(send: Send, data: bytes) -> None:
    body = b"data: " + data + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
