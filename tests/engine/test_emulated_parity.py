"""The engine on the GPU libraries' stand-ins against ``transformers``, as in ``test_parity``.

Runs over several ranks have one idle rank, and replicas of half of the experts. Projections are FP8
products here, so their inputs are rounded to FP8 too.
"""

import pytest

from moe_ep.config import EngineConfig
from moe_ep.engine.request import EngineRequest
from tests.emulators.device import emulated_kernels
from tests.emulators.install import emulated
from tests.engine.driver import RankResult, dealt, engine_worker
from tests.engine.test_parity import (
    FP8,
    check_rows,
    config_for,
    prompt_requests,
    reference,
    shortened,
)
from tests.ranks import RankInfo, RankPool
from tests.tiny import tiny_checkpoint

CASE = "v3-wide"


def emulated_engine_worker(
    info: RankInfo, config: EngineConfig, requests: list[list[EngineRequest]], major: int
) -> RankResult:
    with emulated("deep_ep"), emulated_kernels(major=major):
        return engine_worker(info, config, requests)


def check(rank_pool: RankPool, *, ep_size: int, major: int = 9, **flags: str) -> None:
    checkpoint = tiny_checkpoint(CASE, dtype="bfloat16", fp8=True)
    config = config_for(
        checkpoint,
        ep_size=ep_size,
        ep_num_redundant_experts=8 if ep_size > 1 else 0,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        moe_runner_backend="deep_gemm",
        **flags,
    )
    num_busy = max(ep_size - 1, 1)
    requests = dealt(prompt_requests(), num_busy) + [[]] * (ep_size - num_busy)
    arguments = (config, requests, major)
    results = rank_pool.run(emulated_engine_worker, ep_size, *arguments, timeout_s=120)
    assert len({result.num_steps for result in results}) == 1, "ranks must run the same steps"
    check_rows(results[:num_busy], reference(CASE, fp8=True, dtype="bfloat16"), FP8)


# DeepEP v1 over four ranks: ``test_graphs_parity``.
@pytest.mark.parametrize(
    ("exchange", "mode", "ep_size"),
    [
        ("deepep", "auto", 2),
        ("deepep", "normal", 2),
        ("deepep_v2", "auto", 2),
        ("deepep_v2", "normal", 2),
        ("deepep_v2", "auto", 4),
        ("deepep_v2", "normal", 4),
    ],
)
def test_all_libraries_on_hopper(rank_pool, exchange: str, mode: str, ep_size: int):
    flags = {"moe_a2a_backend": exchange, "deepep_mode": mode}
    check(rank_pool, ep_size=ep_size, attention_backend="flash_mla", **flags)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_deep_gemm_behind_the_torch_exchange(rank_pool, ep_size: int):
    exchange = "local" if ep_size == 1 else "collective"  # they give the rows their alignment
    flags = {"moe_a2a_backend": exchange, "attention_backend": "flash_mla"}
    check(rank_pool, ep_size=ep_size, **flags)


@pytest.mark.parametrize("exchange", ["deepep", "deepep_v2"])
def test_packed_scales_on_blackwell(rank_pool, exchange: str):
    flags = {"moe_a2a_backend": exchange, "attention_backend": "torch"}
    check(rank_pool, ep_size=2, major=10, **flags)


def test_triton_kernels_in_their_interpreter(rank_pool):
    """One of the texts grows into a second block. One rank: ``test_graphs``."""
    num_prompts, num_new = 6, 3
    checkpoint = tiny_checkpoint("v3-steady", dtype="bfloat16", fp8=True)
    flags = {"moe_runner_backend": "triton", "attention_backend": "triton"}
    config = config_for(checkpoint, ep_size=2, **flags)
    requests = dealt(prompt_requests(num_new)[:num_prompts], 2)
    results = rank_pool.run(engine_worker, 2, config, requests, timeout_s=120)
    expected = reference("v3-steady", fp8=True, dtype="bfloat16")
    check_rows(results, shortened(expected, num_prompts, num_new), FP8)
