"""Steps before the first request change nothing that a request reads."""

from unittest.mock import patch

import pytest
import torch

from moe_ep.config import EngineConfig
from moe_ep.engine.engine import Engine
from moe_ep.engine.request import EngineRequest
from moe_ep.engine.warm_up import warm_up
from moe_ep.progress import Stage
from tests.compare import assert_bits_equal
from tests.engine.driver import RankResult, dealt, engine_worker, greedy, run_engine, world_of
from tests.ranks import RankInfo
from tests.tiny import tiny_checkpoint

REQUESTS = [
    EngineRequest(
        str(number), tuple(range(3 + number, 90 + 7 * number)), greedy(4, ignore_eos=True)
    )
    for number in range(4)
]


def warm_worker(info: RankInfo, config: EngineConfig, requests_by_rank) -> RankResult:
    create = Engine.create

    def create_warm(*args, **kwargs) -> Engine:
        engine = create(*args, **kwargs)
        parts = engine._parts
        parts.runner.cache.tensor.fill_(float("nan"))  # as nobody has written it
        counted: list[Stage] = []
        parts.progress.listener = lambda progress: counted.append(progress.stage)
        warm_up(
            parts.runner,
            parts.step_rules,
            num_ranks=info.num_ranks,
            most_tokens=config.max_num_batched_tokens,
        )
        parts.progress.listener = None
        assert counted.count(Stage.HEAD) == 2, "a prefill and a decode are run to their ends"
        assert not any(any(layer) for layer in engine.slot_tokens())
        assert parts.pool.num_free == parts.pool.num_blocks
        assert torch.isfinite(parts.runner.cache.tensor[:, 0].float()).any()
        return engine

    with patch.object(Engine, "create", create_warm):
        return run_engine(config, world_of(info), requests_by_rank[info.rank])


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"cuda_graph_bs": (2, 8), "enable_two_batch_overlap": True, "tbo_token_threshold": 4},
        {"max_num_batched_tokens": 8, "max_num_seqs": 8, "deepep_mode": "low_latency"},
        {"num_kv_blocks": 3, "max_num_batched_tokens": 300},
    ],
    ids=str,
)
def test_requests_do_not_notice(rank_pool, flags):
    checkpoint = tiny_checkpoint("v3")
    config = EngineConfig(model=str(checkpoint.path), ep_size=2, **{"num_kv_blocks": 16} | flags)

    def run(worker) -> dict:
        results = rank_pool.run(worker, 2, config, dealt(REQUESTS, 2), timeout_s=120)
        return {name: r for result in results for name, r in result.requests.items()}

    warm, cold = run(warm_worker), run(engine_worker)
    for request in REQUESTS:
        name = request.request_id
        assert len(warm[name].token_ids) == 4
        for logits, expected in zip(warm[name].logits, cold[name].logits, strict=True):
            assert_bits_equal(logits, expected)
