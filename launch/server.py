"""The HTTP service: OpenAI-compatible endpoints, health and metrics over one engine.

Bodies are read and parsed here and not by the framework, so that every refusal has OpenAI's form,
names its field, and comes before a byte too many is read.
"""

import argparse
import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from launch.api_error import ApiError, internal_error
from launch.completions import Completions
from launch.expert_records import ExpertRecords, eplb_health
from launch.flags import from_args
from launch.http_io import EventStream, error_response, json_response, read_body, until_disconnect
from launch.launch_config import ClusterConfig, ServerConfig
from launch.lifetime import StopSignals, ignore, running_engine
from launch.metrics import Metrics
from launch.openai_api import ChatRequest, CompletionRequest, GenerationRequest, parse_request
from moe_ep.config import EngineConfig

if TYPE_CHECKING:
    from launch.client import EngineClient
    from moe_ep.engine.engine import RankStatus

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 5.0  # for the ranks to say where they stand
CLIENT_LEFT = 499  # nginx's status for it; nobody but the metrics sees it


def make_app(service: Completions, *, max_body_bytes: int, timeout_s: float) -> FastAPI:
    """The ASGI application; the caller owns the engine and its shutdown."""
    app = FastAPI(title="moe-ep", docs_url=None, redoc_url=None, openapi_url=None)
    endpoints = _Endpoints(service, max_body_bytes, timeout_s)
    app.post(CompletionRequest.url)(endpoints.completions)
    app.post(ChatRequest.url)(endpoints.chat_completions)
    app.get("/v1/models")(endpoints.models)
    app.get("/v1/models/{name:path}")(endpoints.model)
    app.get("/health")(endpoints.health)
    app.get("/metrics")(endpoints.metrics)
    app.exception_handler(ApiError)(_api_error)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(Exception)(_internal_error)
    return app


class _Endpoints:
    def __init__(self, service: Completions, max_body_bytes: int, timeout_s: float) -> None:
        self._service = service
        self._max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s
        self._created = int(time.time())

    async def completions(self, http: Request) -> Response:
        return await self._counted(http, CompletionRequest)

    async def chat_completions(self, http: Request) -> Response:
        return await self._counted(http, ChatRequest)

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, name: str) -> Response:
        self._service.check_model(name)
        return json_response(self._model_card())

    async def health(self) -> Response:
        self._service.check_alive()
        detail = {}
        if self._service.client.config.enable_eplb:
            detail = {"eplb": eplb_health(await self._statuses())}
        return json_response({"status": "ok"} | detail)

    async def metrics(self) -> Response:
        """The ranks' gauges keep their last values while the ranks do not answer."""
        text = self._service.metrics.render(await self._statuses())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _statuses(self) -> "list[RankStatus]":
        """Empty while the ranks do not answer."""
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                return await self._service.client.status()
        except (TimeoutError, RuntimeError) as error:
            logger.warning("no status from the ranks: %s", error)
            return []

    async def _counted(self, http: Request, kind: type[GenerationRequest]) -> Response:
        try:
            response = await self._complete(http, kind)
        except ApiError as error:
            response = error_response(error)
        except ClientDisconnect:
            response = Response(status_code=CLIENT_LEFT)
        requests = self._service.metrics.requests
        requests.labels(endpoint=kind.url, status=response.status_code).inc()
        return response

    async def _complete(self, http: Request, kind: type[GenerationRequest]) -> Response:
        body = await read_body(http, self._max_body_bytes)
        request = parse_request(kind, body)
        job = await self._service.prepare(request)
        if request.stream:
            return EventStream(job.events(), close=job.close, timeout_s=self._timeout_s)
        with contextlib.closing(job):
            answer = await until_disconnect(http.receive, job.answer(), self._timeout_s)
        return json_response(answer)

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._service.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "moe-ep",
            "max_model_len": self._service.client.info.max_model_len,
        }


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(_: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    return error_response(ApiError(error.status_code, str(error.detail)))


async def _internal_error(_: Request, __: Exception) -> Response:
    return error_response(internal_error())


def run(args: argparse.Namespace) -> int:
    """``moe-ep serve``."""
    engine, cluster = from_args(EngineConfig, args), from_args(ClusterConfig, args)
    asyncio.run(serve(engine, cluster, from_args(ServerConfig, args)))
    return 0


class Server(uvicorn.Server):
    """Uvicorn on a socket that is already bound; signals are left to ``serve``.

    ready: set once connections are accepted.
    """

    def __init__(self, app: FastAPI, shutdown_timeout_s: float) -> None:
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(shutdown_timeout_s),
        )
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    def stop(self) -> None:
        """Take no more requests and end when the running ones are done; the second call now."""
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Bind before anything is loaded, so that a taken port costs no time; OSError says which."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error
    return sock


def make_server(client: "EngineClient", config: ServerConfig) -> Server:
    """The service over a loaded engine."""
    engine = client.config
    max_open = engine.max_num_seqs * engine.ep_size + config.max_queued_requests
    metrics = Metrics()
    client.on_step = metrics.observe_step
    service = Completions(client, metrics, max_open=max_open)
    app = make_app(
        service, max_body_bytes=config.max_body_bytes, timeout_s=config.request_timeout_s
    )
    ExpertRecords(client, config.expert_distribution_recorder_dir).add_routes(app)
    return Server(app, config.shutdown_timeout_s)


@asynccontextmanager
async def serving(
    server: Server, sock: socket.socket
) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """Accepts connections from the start to the end of the block; yields the URL and the task that
    ends when the server is stopped."""
    ended = asyncio.create_task(server.serve(sockets=[sock]))
    ready = asyncio.create_task(server.ready.wait())
    host, port = sock.getsockname()[:2]
    try:
        await asyncio.wait({ended, ready}, return_when=asyncio.FIRST_COMPLETED)
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", ended
    finally:
        ready.cancel()
        server.should_exit = True
        await ended


async def serve(config: EngineConfig, cluster: ClusterConfig, settings: ServerConfig) -> None:
    """Load the engine and serve it until SIGTERM or Ctrl-C; a second signal does not wait."""
    with listen(settings.host, settings.port) as sock, StopSignals() as signals:
        async with running_engine(config, cluster) as client:
            server = make_server(client, settings)
            signals.action = server.stop
            async with serving(server, sock) as (url, ended):
                print(f"serving {client.config.served_model_name} on {url}", flush=True)
                await ended
            signals.action = ignore
