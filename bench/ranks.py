"""One process per rank on this machine, as the benchmarks of several ranks need them."""

from collections.abc import Callable
from typing import Concatenate, ParamSpec

from torch import multiprocessing

from moe_ep.engine.world import World, connect_store, serve_store

P = ParamSpec("P")


def run_ranks(
    num_ranks: int,
    timeout_s: float,
    work: Callable[Concatenate[World, P], None],
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    """``work(world, *args, **kwargs)`` on every rank, each in a fresh process; returns when all are
    done. ``work`` must be importable by name. timeout_s: of an exchange between ranks. Raises
    torch's ProcessException when a rank fails."""
    store = serve_store("127.0.0.1", timeout_s)
    multiprocessing.spawn(
        _rank_main, args=(store.port, work, num_ranks, timeout_s, args, kwargs), nprocs=num_ranks
    )


def _rank_main(
    rank: int,
    port: int,
    work: Callable[..., None],
    num_ranks: int,
    timeout_s: float,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> None:
    store = connect_store("127.0.0.1", port, timeout_s)
    world = World(rank=rank, num_ranks=num_ranks, store=store, timeout_s=timeout_s)
    try:
        work(world, *args, **kwargs)
    finally:
        world.destroy()
