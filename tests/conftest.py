"""Fixtures shared by all tests."""

import os
from collections.abc import Iterator

import pytest
import torch

from attention import products
from launch.ray_cluster import RaySession
from moe_ep import kernels
from tests.ranks import RankPool

if not torch.cuda.is_available():
    # Before any test: triton reads it when it is first imported, by whomever.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(params=["as the CPU can", "without BF16"])
def bf16_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """BF16 products by this CPU's instructions, if it has any, and as CPUs without them do."""
    if request.param == "without BF16":
        monkeypatch.setattr(products, "cpu_has_bf16", lambda: False)


@pytest.fixture(params=["torch", "kernels"])
def kernels_or_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What both can do is done by torch, and by our kernels: in their interpreter on a CPU."""
    monkeypatch.setattr(kernels, "are_used", lambda device: request.param == "kernels")


@pytest.fixture
def sm90() -> Iterator[None]:
    """The stand-ins of ``deep_gemm`` and ``flash_mla`` over an emulated SM90."""
    from tests.emulators.device import emulated_kernels

    with emulated_kernels():
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Four live rank processes, started on first use and shared by the whole session."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray with room for eight ranks, which every engine of the session joins."""
    session = RaySession()
    session.acquire(None, 8)
    yield
    session.release()
