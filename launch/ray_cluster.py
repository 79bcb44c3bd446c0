"""This process's use of Ray: a local cluster or a joined one, and one placed actor per rank.

Knows nothing of models or requests. Rank order, threads and addresses come from what the placed
actors say of themselves; nothing about the cluster is assumed. A cluster started here lives no
longer than this process, whatever way that ends (``launch.reaper``), and no longer than the thread
that starts it, to which Ray ties its processes: the main thread, as a rule.
"""

import logging
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from launch.reaper import Reaper
from launch.topology import PlacedBundle, TopologyRow, order_ranks

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

# A process that starts on a busy machine imports torch for many seconds.
ACTOR_START_TIMEOUT_S = 120.0

# Requests and tokens are small; Ray's default of a third of the memory is for data sets.
_OBJECT_STORE_BYTES = 100 * 2**20

# What a rank takes; the GPU where the cluster has any, even if too few of them.
_CPU_BUNDLE = {"CPU": 1.0}
_GPU_BUNDLE = {"CPU": 1.0, "GPU": 1.0}


class ClusterError(RuntimeError):
    """The cluster cannot be reached or cannot hold the ranks; the message says what is missing."""


class RaySession:
    """Ray is one per process: its users are counted, and the last one shuts down what was started.

    A Ray that was initialised by the caller's own code is used and left alone.
    """

    def __init__(self) -> None:
        self._num_users = 0
        self._is_ours = False
        self._reaper: Reaper | None = None

    def acquire(self, address: str | None, num_ranks: int) -> None:
        """Join the cluster at ``address`` (else ``RAY_ADDRESS``), or start a local one.

        A local one offers as many CPUs as there are ranks even on fewer cores.
        """
        import ray

        if not ray.is_initialized():
            self._num_users = 0
            self._is_ours = True
            try:
                with _keeping_sigterm_handler():
                    self._init(address or os.environ.get("RAY_ADDRESS"), num_ranks)
            except Exception as error:
                self._reap()
                where = f"join the Ray cluster at {address}" if address else "start a local Ray"
                raise ClusterError(f"cannot {where}: {error}") from error
        self._num_users += 1

    def release(self) -> None:
        """Give back one ``acquire``."""
        import ray

        self._num_users -= 1
        if self._num_users == 0 and self._is_ours:
            self._is_ours = False
            ray.shutdown()
            self._reap()

    def _init(self, address: str | None, num_ranks: int) -> None:
        import ray

        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True}
        if address is not None:
            ray.init(address, **quiet)
            return
        # Short, because the paths of Unix sockets below it are limited to 107 bytes.
        self._reaper = Reaper(tempfile.mkdtemp(prefix="moe-ep-ray-", dir="/tmp"))
        ray.init(
            "local",
            num_cpus=max(os.cpu_count() or 1, num_ranks),
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            _temp_dir=self._reaper.directory,
            **quiet,
        )

    def _reap(self) -> None:
        if self._reaper is not None:
            self._reaper.finish()
            self._reaper = None


_session = RaySession()


@dataclass
class RankGroup:
    """The placed ranks: ``actors[r]`` is rank r, at ``rows[r]``.

    Both ``stop`` and ``close`` may be called twice.
    """

    actors: Sequence["ActorHandle"]
    rows: Sequence[TopologyRow]
    placement: "PlacementGroup | None"
    is_closed: bool = False

    def stop(self) -> None:
        """Kill the ranks and free their place."""
        placement, self.placement = self.placement, None
        if placement is not None:
            _remove(self.actors, placement)

    def close(self) -> None:
        """``stop``, and let go of Ray."""
        self.stop()
        if not self.is_closed:
            self.is_closed = True
            _session.release()


def place_ranks(
    *, num_ranks: int, num_slots_per_rank: int, address: str | None, timeout_s: float
) -> RankGroup:
    """Start one ``RankActor`` per rank, as close together as the cluster allows.

    timeout_s: limit of the wait for resources. Raises ``ClusterError``; nothing is left then.
    """
    import ray

    _session.acquire(address, num_ranks)
    placement: PlacementGroup | None = None
    actors: list[ActorHandle] = []
    try:
        bundle = _GPU_BUNDLE if ray.cluster_resources().get("GPU", 0.0) else _CPU_BUNDLE
        placement = ray.util.placement_group([bundle] * num_ranks, strategy="PACK")
        if not placement.wait(timeout_s):
            raise ClusterError(_shortage(num_ranks, bundle, timeout_s))
        actors = [_create_actor(placement, index, bundle) for index in range(num_ranks)]
        rows = order_ranks(
            _ask_where(actors),
            first_node_id=ray.get_runtime_context().get_node_id(),
            num_slots_per_rank=num_slots_per_rank,
        )
        return RankGroup([actors[row.placed.bundle] for row in rows], rows, placement)
    except BaseException:
        _remove(actors, placement)
        _session.release()
        raise


@contextmanager
def _keeping_sigterm_handler() -> Iterator[None]:
    """Ray sets a handler that exits. That is better than the default, which skips all clean-up, but
    it must not replace one that the program has set."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread and before not in (signal.SIG_DFL, None):
        signal.signal(signal.SIGTERM, before)


def _create_actor(
    placement: "PlacementGroup", index: int, bundle: dict[str, float]
) -> "ActorHandle":
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from launch.rank_actor import RankActor

    strategy = PlacementGroupSchedulingStrategy(
        placement_group=placement, placement_group_bundle_index=index
    )
    # Poll blocks, and status must answer next to it and next to a start that loads for minutes.
    for method in (RankActor.poll, RankActor.status):
        ray.method(concurrency_group="watch")(method)
    remote: Any = ray.remote  # whose types know no concurrency groups
    # No abort may overtake the submit of a long prompt. With a max_concurrency above 1 Ray would
    # let it while that prompt is on its way, even within a group of one thread.
    actor = remote(concurrency_groups={"watch": 2})(RankActor).options(
        num_cpus=bundle["CPU"],
        num_gpus=bundle.get("GPU", 0.0),
        max_concurrency=1,
        max_restarts=0,
        scheduling_strategy=strategy,
    )
    return cast("ActorHandle", actor.remote(index))


def _ask_where(actors: Sequence["ActorHandle"]) -> list[PlacedBundle]:
    import ray

    answers: list[Any] = [actor.where.remote() for actor in actors]
    try:
        return ray.get(answers, timeout=ACTOR_START_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        done, _ = ray.wait(answers, num_returns=len(answers), timeout=0)
        silent = [bundle for bundle, answer in enumerate(answers) if answer not in done]
        raise ClusterError(
            f"rank processes of bundles {silent} did not start within {ACTOR_START_TIMEOUT_S:.0f} s"
        ) from None
    except ray.exceptions.RayError as error:
        raise ClusterError(f"a rank process could not start: {error}") from error


def _shortage(num_ranks: int, bundle: dict[str, float], timeout_s: float) -> str:
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    counts = " and ".join(
        f"{total.get(name, 0.0):g} {name}s ({free.get(name, 0.0):g} free)" for name in bundle
    )
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    hint = "; or hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on CPUs" if "GPU" in bundle else ""
    return (
        f"no place for {num_ranks} ranks within {timeout_s:g} s: {num_ranks} bundles of"
        f" {' and '.join(f'1 {name}' for name in bundle)} were asked; the cluster has {counts} on"
        f" {num_nodes} node(s). Add nodes, free some, or lower --ep-size{hint}."
    )


def _remove(actors: Sequence["ActorHandle"], placement: "PlacementGroup | None") -> None:
    import ray

    if not ray.is_initialized():
        return
    for actor in actors:
        ray.kill(actor, no_restart=True)
    if placement is not None:
        ray.util.remove_placement_group(placement)
