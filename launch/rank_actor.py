"""The process of one rank: a Ray actor around an ``Engine`` whose loop runs in a thread of its own.

Knows Ray only as its host. Calls come in one by one, in order, but ``poll`` and ``status`` on other
threads; the engine's own methods are thread-safe. The actor belongs to the front end: when that
dies, Ray ends this process.
"""

import contextlib
import fcntl
import importlib
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from launch.topology import PlacedBundle
from moe_ep.config import EngineConfig
from moe_ep.engine.request import EngineRequest, StepOutput

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from eplb.loads import SlotRecords
    from moe_ep.engine.engine import Engine, EngineInfo, RankStatus
    from moe_ep.engine.world import World
    from moe_ep.recorder import StepRecord

ENGINE = "moe_ep.engine.engine:Engine"

_STATUS_INTERVAL_S = 1.0
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class RankStart:
    """What a rank needs to start. store: address of rank 0's store, None for a single rank.
    engine: ``module:class`` of the engine."""

    config: EngineConfig
    rank: int
    num_ranks: int
    num_threads: int
    store: tuple[str, int] | None
    interface: str | None
    engine: str = ENGINE


class RankReport(NamedTuple):
    """Answer to a poll. status: where the rank stands, None if the last one is still fresh.
    records: of the steps that were recorded since the last answer."""

    outputs: list[StepOutput]
    status: "RankStatus | None"
    records: "list[StepRecord]"


class RankActor:
    """One rank. Order of calls: ``where``, ``bind_store`` on rank 0, ``start``, then the rest."""

    def __init__(self, bundle: int) -> None:
        # Imported before any rank waits for another, so that a slow disk is no timeout.
        import moe_ep.engine.world  # noqa: F401

        self._bundle = bundle
        self._store: TCPStore | None = None
        self._world: World | None = None
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        self._next_status_s = 0.0

    def where(self) -> PlacedBundle:
        import ray

        ip = ray.util.get_node_ip_address()
        gpus = ray.get_gpu_ids()
        return PlacedBundle(
            bundle=self._bundle,
            node_id=ray.get_runtime_context().get_node_id(),
            host=socket.gethostname(),
            ip=ip,
            pid=os.getpid(),
            num_cores=len(os.sched_getaffinity(0)),
            gpu=gpus[0] if gpus else None,
            interface=interface_of(ip),
        )

    def bind_store(self, timeout_s: float) -> tuple[str, int]:
        """On rank 0: serve the rendezvous store on a free port of this node; (ip, port)."""
        import ray

        from moe_ep.engine.world import serve_store

        ip = ray.util.get_node_ip_address()
        self._store = serve_store(ip, timeout_s)
        return ip, self._store.port

    def start(self, start: RankStart) -> "EngineInfo":
        """Join the other ranks, load this rank's share and start the loop. Collective."""
        from moe_ep.engine.world import World, connect_store

        timeout_s = start.config.watchdog_timeout_s
        if start.interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", start.interface)
        if self._store is None and start.store is not None:
            self._store = connect_store(*start.store, timeout_s)
        self._world = World(
            rank=start.rank, num_ranks=start.num_ranks, store=self._store, timeout_s=timeout_s
        )
        module, name = start.engine.split(":")
        engine_class = getattr(importlib.import_module(module), name)
        self._engine = engine_class.create(start.config, self._world, start.num_threads)
        self._thread = threading.Thread(
            target=_run, args=(self._engine, start.num_threads), name="engine", daemon=True
        )
        self._thread.start()
        return self._engine.info

    def submit(self, requests: list[EngineRequest]) -> None:
        self._started().submit(requests)

    def abort(self, request_ids: list[str]) -> None:
        self._started().abort(request_ids)

    def poll(self, timeout_s: float) -> RankReport:
        """Outputs as soon as there are some, at the latest after ``timeout_s``. One caller only."""
        engine = self._started()
        outputs = engine.poll(timeout_s)
        records = engine.take_records()
        if outputs and time.monotonic() < self._next_status_s:
            return RankReport(outputs, None, records)
        self._next_status_s = time.monotonic() + _STATUS_INTERVAL_S
        return RankReport(outputs, engine.status(), records)

    def status(self) -> "RankStatus | None":
        """Where the rank stands; None before it has started."""
        return None if self._engine is None else self._engine.status()

    def slot_tokens(self) -> list[list[int]]:
        return self._started().slot_tokens()

    def record_loads(self, is_on: bool) -> None:
        self._started().record_loads(is_on)

    def load_records(self) -> "SlotRecords":
        return self._started().load_records()

    def stop(self, timeout_s: float) -> bool:
        """End the loop together with the other ranks; whether it ended within ``timeout_s``."""
        if self._engine is None or self._thread is None or self._world is None:
            return True
        self._engine.stop()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._world.destroy()
        return True

    def _started(self) -> "Engine":
        if self._engine is None:
            raise RuntimeError("the rank has not started")
        return self._engine


def interface_of(ip: str) -> str | None:
    """The network interface that has this IPv4 address; None when none of this host has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # the interface has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == ip:
                return name
    return None


def _run(engine: "Engine", num_threads: int) -> None:
    import torch

    from moe_ep.engine.engine import EngineError

    torch.set_num_threads(num_threads)  # the OpenMP setting belongs to the thread that makes it
    with contextlib.suppress(EngineError):  # the engine has logged it, and its poll raises it
        engine.run()
