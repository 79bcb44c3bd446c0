"""Fixtures that skip with the reason, and the process group of the ranks that torchrun started."""

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.gpu.machine import Ranks, gpu_problem, ranks_problem

WAIT_S = 180  # of an exchange: libraries compile their kernels when they are first used


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """This process's GPU, made current: that of its local rank under torchrun, else the first."""
    if (problem := gpu_problem()) is not None:
        pytest.skip(problem)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@pytest.fixture(scope="session")
def one_gpu(request: pytest.FixtureRequest) -> torch.device:
    """For tests that need no peer: under torchrun the first rank alone runs them."""
    if os.environ.get("RANK", "0") != "0":
        pytest.skip("needs one GPU: rank 0 runs this")
    return request.getfixturevalue("gpu")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """The ranks, in a group made as the engine makes its own; torn down when both get there."""
    if (problem := ranks_problem(os.environ, torch.cuda.device_count())) is not None:
        pytest.skip(problem)
    device: torch.device = request.getfixturevalue("gpu")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", timeout=timedelta(seconds=WAIT_S), device_id=device
    )
    try:
        group = dist.group.WORLD
        assert group is not None
        yield Ranks(dist.get_rank(), dist.get_world_size(), device, group)
    finally:
        dist.destroy_process_group()
