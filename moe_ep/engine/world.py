"""The process group that one engine's ranks share, made from a store that rank 0 serves.

Knows nothing of Ray or of models. Rank 0 binds the port itself, so that no port is guessed.
"""

import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store, TCPStore


def serve_store(host: str, timeout_s: float) -> TCPStore:
    """Bind a free port on ``host`` (see ``.port``) and serve the rendezvous store on it."""
    return TCPStore(
        host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Join the store that rank 0 serves; raises ``DistNetworkError`` after ``timeout_s``."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class World:
    """One rank's place among the ranks of an engine.

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
        self._owns_group = num_ranks > 1 and group is None
        if self._owns_group:
            limit = timedelta(seconds=timeout_s)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit
            )
            group = dist.group.WORLD
        self.group = group if num_ranks > 1 else None
        self.num_local_ranks = self._count_ranks_on_this_host()

    def _count_ranks_on_this_host(self) -> int:
        if self.group is None:
            return 1
        hosts: list[str | None] = [None] * self.num_ranks
        dist.all_gather_object(hosts, socket.gethostname(), group=self.group)
        return hosts.count(socket.gethostname())

    def destroy(self) -> None:
        """Leave the group if this object made it; may be called twice."""
        self.group = None  # a group that outlives the interpreter's shutdown aborts the process
        if self._owns_group:
            self._owns_group = False
            dist.destroy_process_group()
