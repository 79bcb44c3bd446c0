"""What fits is said before it is allocated, in numbers, with the field that would help."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attention import products
from moe_ep.config import EngineConfig, ModelConfig
from moe_ep.engine import room
from moe_ep.engine.assemble import assemble
from moe_ep.engine.memory import WeightStorage, weight_bytes
from moe_ep.engine.room import Room
from tests.engine.driver import world_alone

CONFIG = EngineConfig(
    model="deepseek-v3",
    ep_size=4,
    dtype="bfloat16",
    max_num_seqs=2,
    moe_a2a_backend="collective",
    moe_runner_backend="torch",
    gpu_memory_utilization=0.5,
)
MODEL = ModelConfig.from_path("deepseek-v3")


def make_room(monkeypatch: pytest.MonkeyPatch, free: int, **changes: object) -> Room:
    """Of rank 1 of two on a host with so many bytes free."""
    monkeypatch.setattr(room.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    world = SimpleNamespace(rank=1, num_local_ranks=2, device=torch.device("cpu"))
    return Room(replace(CONFIG, **changes), MODEL, world)


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch):
    assert make_room(monkeypatch, 1001).free_bytes() == 500


@pytest.mark.parametrize("has_bf16", [True, False])
def test_weights_fit_or_the_numbers_are_told(monkeypatch: pytest.MonkeyPatch, has_bf16: bool):
    monkeypatch.setattr(products, "cpu_has_bf16", lambda: has_bf16)
    storage = WeightStorage(dtype="bfloat16", is_cpu=True, is_widened=not has_bf16)
    needed = weight_bytes(MODEL, storage, num_slots=64)
    make_room(monkeypatch, 2 * needed.total).check_weights(64)
    with pytest.raises(MemoryError) as refused:
        make_room(monkeypatch, 2 * needed.total - 2).check_weights(64)
    told = str(refused.value)
    for part in ("ep_size: 4 given", str(needed.total), str(needed.total - 1), "rank 1"):
        assert part in told


def test_buffers_fit_or_the_numbers_are_told(monkeypatch: pytest.MonkeyPatch):
    make_room(monkeypatch, 200).check_buffers(100)
    with pytest.raises(MemoryError, match=r"collective take 101 bytes, 100 are free on rank 1"):
        make_room(monkeypatch, 200).check_buffers(101)


def test_the_cache_gets_its_share_but_no_more_than_is_of_use(monkeypatch: pytest.MonkeyPatch):
    # Half of a rank's half: 250 of 1000 bytes; a block of 10 is for padding.
    assert make_room(monkeypatch, 1000).cache_blocks(10, max_model_len=10_000) == 24
    # Two sequences of 65 tokens: two blocks each.
    assert make_room(monkeypatch, 1000).cache_blocks(10, max_model_len=65) == 4
    assert make_room(monkeypatch, 1000, num_kv_blocks=7).cache_blocks(10, max_model_len=65) == 7
    with pytest.raises(MemoryError, match=r"gpu_memory_utilization: 0.5 given.* 126 bytes"):
        make_room(monkeypatch, 1000).cache_blocks(126, max_model_len=65)


def test_a_model_that_cannot_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch):
    make_room(monkeypatch, 1 << 30)
    config = replace(CONFIG, ep_size=1, load_format="dummy", moe_a2a_backend="auto")
    with pytest.raises(MemoryError, match="ep_size: 1 given"):
        assemble(config, world_alone())
