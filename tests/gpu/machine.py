"""What the tests of this directory need of a machine, and the ranks that torchrun started.

Importing this touches no device: whether tests can run is decided when they ask for it.
"""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

NUM_RANKS = 2
TORCHRUN = f"torchrun --nproc-per-node {NUM_RANKS} -m pytest tests/gpu"
T = TypeVar("T")


def gpu_problem() -> str | None:
    """None when this process has a GPU, else the reason why not."""
    return None if torch.cuda.is_available() else "needs a GPU: torch sees no CUDA device"


def ranks_problem(environ: Mapping[str, str], num_gpus: int) -> str | None:
    """None when torchrun started this process as one of two ranks on one machine with a GPU each,
    else the reason why not. Every rank gets the same answer."""
    if "RANK" not in environ or "LOCAL_RANK" not in environ:
        return f"needs {NUM_RANKS} ranks: run {TORCHRUN}"
    started = environ.get("WORLD_SIZE"), environ.get("LOCAL_WORLD_SIZE")
    if started != (str(NUM_RANKS), str(NUM_RANKS)):
        return f"needs {NUM_RANKS} ranks on one machine, torchrun started {started[0]}"
    if num_gpus < NUM_RANKS:
        return f"needs {NUM_RANKS} GPUs, torch sees {num_gpus}"
    return None


@dataclass(frozen=True)
class Ranks:
    """This process among its peers. group: carries tensors of the device and host objects."""

    rank: int
    num_ranks: int
    device: torch.device
    group: dist.ProcessGroup

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank. Collective."""
        values: list[T | None] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

    def together(self, work: Callable[[], T]) -> T:
        """Do the work on every rank and fail on all when it fails on one, with each one's account:
        a rank that passed would wait in the next test for one that has stopped. Collective."""
        value, problem = None, None
        try:
            value = work()
        except Exception:
            problem = traceback.format_exc()
        problems = enumerate(self.gather(problem))
        accounts = [f"[rank {rank}] {found}" for rank, found in problems if found]
        assert not accounts, "\n".join(accounts)
        return value  # type: ignore[return-value]
