"""The one launcher of rank processes for tests: gloo on 127.0.0.1, a free port, no orphans.

A worker is a plain top-level function ``worker(info: RankInfo, *args)``; what it returns comes back
by rank. Ranks are forked from a server that has torch and transformers loaded, so a fresh set costs
a fraction of a second; ``RankPool`` keeps them alive over many tests and gives every job a new
process group, so a job that broke its group does no harm to the next.
"""

import datetime
import io
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

EXIT_GRACE_S = 2.0  # time for an idle rank to leave by itself before it is killed


@dataclass(frozen=True)
class RankInfo:
    """What a worker knows about its place.

    group: process group of all ranks of this job, which is also the default group.
    store: key-value store shared by the ranks of this job. port: TCP port of that store.
    """

    rank: int
    num_ranks: int
    group: dist.ProcessGroup
    store: dist.Store
    port: int


class RankError(AssertionError):
    """At least one rank raised, died or ran out of time; the message has each rank's account."""


class RankPool:
    """Live rank processes; a context manager. ``run`` may use fewer ranks than the pool has."""

    def __init__(self, max_ranks: int) -> None:
        self.max_ranks = max_ranks
        self._context = multiprocessing.get_context("forkserver")
        # With transformers, which most workers' modules import: once here, not in every rank.
        self._context.set_forkserver_preload(["torch.distributed", "tests.tiny", __name__])
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._store: dist.TCPStore | None = None
        self._num_jobs = 0

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(
        self,
        worker: Callable[..., Any],
        num_ranks: int,
        *args: Any,
        timeout_s: float = 60.0,
        may_die: Collection[int] = (),
    ) -> list[Any]:
        """Run ``worker(info, *args)`` on ranks 0 to num_ranks - 1 and return the results by rank.

        timeout_s bounds the job, and every wait between its ranks. may_die: ranks whose death is
        part of the test; their result is None. Any other failure raises RankError, after which the
        processes of a job that died or timed out are gone and the next run starts new ones.
        """
        assert 1 <= num_ranks <= self.max_ranks, f"{num_ranks} of at most {self.max_ranks} ranks"
        self._start(num_ranks)
        assert self._store is not None
        self._num_jobs += 1
        for rank, (_, connection) in enumerate(self._ranks[:num_ranks]):
            job = _Job(worker, args, rank, num_ranks, self._num_jobs, self._store.port, timeout_s)
            connection.send_bytes(_dumps(job))
        replies = self._collect(num_ranks, time.monotonic() + timeout_s)
        if len(replies) < num_ranks or any(reply.is_dead for reply in replies.values()):
            self.close()
        return _results(replies, num_ranks, timeout_s, may_die)

    def close(self) -> None:
        """End all ranks, by request first and by signal after a grace period. May be repeated."""
        for _, connection in self._ranks:
            connection.close()
        deadline = time.monotonic() + EXIT_GRACE_S
        for process, _ in self._ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks = []
        self._store = None

    def _start(self, num_ranks: int) -> None:
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._ranks) < num_ranks:
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, mine))

    def _collect(self, num_ranks: int, deadline: float) -> dict[int, "_Reply"]:
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks[:num_ranks])}
        replies: dict[int, _Reply] = {}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), timeout=left):
                assert isinstance(connection, Connection)
                replies[waiting.pop(connection)] = _receive(connection)
        return replies


def run_ranks(
    worker: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 60.0,
    may_die: Collection[int] = (),
) -> list[Any]:
    """``RankPool.run`` on fresh processes that end with the call."""
    with RankPool(num_ranks) as pool:
        return pool.run(worker, num_ranks, *args, timeout_s=timeout_s, may_die=may_die)


@dataclass(frozen=True)
class _Job:
    worker: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    num_ranks: int
    job_id: int
    port: int
    timeout_s: float


@dataclass(frozen=True)
class _Reply:
    value: Any = None
    error: str | None = None
    is_dead: bool = False


def _dumps(value: object) -> bytes:
    # torch.save, because plain pickle cannot restore FP8 tensors.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _loads(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _receive(connection: Connection) -> _Reply:
    try:
        return _loads(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        return _Reply(error="the process died", is_dead=True)


def _results(
    replies: dict[int, _Reply], num_ranks: int, timeout_s: float, may_die: Collection[int]
) -> list[Any]:
    late = _Reply(error=f"no result within {timeout_s} s")
    ordered = [replies.get(rank, late) for rank in range(num_ranks)]
    failures = [
        "\n".join(f"[rank {rank}] {line}" for line in reply.error.splitlines())
        for rank, reply in enumerate(ordered)
        if reply.error is not None and not (reply.is_dead and rank in may_die)
    ]
    if failures:
        raise RankError("\n" + "\n".join(failures))
    return [reply.value for reply in ordered]


def _serve(connection: Connection) -> None:
    """Main of a rank process: run jobs until the other end closes or the parent is gone."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        connection.send_bytes(_run_job(message))


def _run_job(message: bytes) -> bytes:
    try:
        return _dumps(_Reply(_in_group(_loads(message))))
    except Exception:
        return _dumps(_Reply(error=traceback.format_exc()))


def _in_group(job: _Job) -> Any:
    limit = datetime.timedelta(seconds=job.timeout_s)
    client = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=limit)
    store = dist.PrefixStore(f"job{job.job_id}", client)
    dist.init_process_group(
        "gloo", store=store, rank=job.rank, world_size=job.num_ranks, timeout=limit
    )
    group = dist.group.WORLD
    assert group is not None
    try:
        info = RankInfo(job.rank, job.num_ranks, group, store, job.port)
        return job.worker(info, *job.args)
    finally:
        dist.destroy_process_group()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
