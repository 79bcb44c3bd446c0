"""The process group that one engine's ranks share, made from a store that rank 0 serves.

Knows nothing of Ray or of models. Rank 0 binds the port itself, so that no port is guessed.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store, TCPStore

T = TypeVar("T")

_DONE = "done"


def serve_store(host: str, timeout_s: float) -> TCPStore:
    """Bind a free port on ``host`` (see ``.port``) and serve the rendezvous store on it."""
    return TCPStore(
        host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Join the store that rank 0 serves; raises ``DistNetworkError`` after ``timeout_s``."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def rank_device() -> torch.device:
    """The device of a rank in this process: its current GPU where it sees one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class World:
    """One rank's place among the ranks of an engine.

    device: where the rank computes, see ``rank_device``.
    store: None only for a single rank, which needs no group.
    timeout_s: limit of every exchange between ranks.
    group: a group of all ranks that exists already; made from the store when not given.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        store: Store | None,
        timeout_s: float,
        group: ProcessGroup | None = None,
    ) -> None:
        if num_ranks > 1 and store is None:
            raise ValueError(f"store: None given for {num_ranks} ranks; a store is needed")
        self.rank = rank
        self.num_ranks = num_ranks
        self.store = store
        self.timeout_s = timeout_s
        self.device = rank_device()
        self._owns_group = num_ranks > 1 and group is None
        if self._owns_group:
            is_gpu = self.device.type == "cuda"
            dist.init_process_group(
                # Votes and names stay in host memory whatever the device.
                "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
                store=store,
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=timeout_s),
                device_id=self.device if is_gpu else None,
            )
            group = dist.group.WORLD
        self.group = group if num_ranks > 1 else None
        # Of each rank; and a name for the keys of this world among others' in the store.
        self.hosts = self.gather(socket.gethostname())
        self._name = self.gather(uuid4().hex)[0]
        self.num_local_ranks = self.hosts.count(socket.gethostname())

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order. Collective."""
        if self.group is None:
            return [value]
        values = [value] * self.num_ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    @contextmanager
    def together(self, what: str, timeout_s: float) -> Iterator[None]:
        """On leaving, wait until all ranks have done ``what``, which may take them longer than an
        exchange does. Collective; once for each ``what``.

        Raises RuntimeError that names the first rank that failed, and what torch raises after
        ``timeout_s``.
        """
        keys = [f"{self._name}/{what}/{rank}" for rank in range(self.num_ranks)]
        try:
            yield
        except BaseException as error:
            if self.store is not None:
                self.store.set(keys[self.rank], f"{type(error).__name__}: {error}")
            raise
        if self.store is None:
            return
        self.store.set(keys[self.rank], _DONE)
        for rank, key in enumerate(keys):
            self.store.wait([key], timedelta(seconds=timeout_s))
            if (answer := self.store.get(key).decode()) != _DONE:
                raise RuntimeError(f"rank {rank} failed at {what}: {answer}")

    def destroy(self) -> None:
        """Leave the group if this object made it; may be called twice."""
        self.group = None  # a group that outlives the interpreter's shutdown aborts the process
        if self._owns_group:
            self._owns_group = False
            dist.destroy_process_group()
