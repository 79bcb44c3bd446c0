"""A request that cannot go on ends alone: NaN on the way of one, no token left for another."""

from unittest.mock import patch

import pytest

from moe_ep.config import EngineConfig
from moe_ep.engine.engine import Engine
from moe_ep.engine.request import EngineRequest, FinishReason
from tests.engine.driver import RankResult, dealt, greedy, run_engine, world_of
from tests.ranks import RankInfo
from tests.tiny import SIZES, tiny_checkpoint

NUM_NEW = 6
POISON = 7  # the token whose embedding is NaN
VOCAB = SIZES["vocab_size"]


def good_requests() -> list[EngineRequest]:
    params = greedy(NUM_NEW, ignore_eos=True)
    prompts = [tuple(range(10 + i, 14 + 3 * i)) for i in range(4)]
    return [EngineRequest(f"good {i}", p, params) for i, p in enumerate(prompts)]


def bad_requests() -> list[EngineRequest]:
    no_token = greedy(NUM_NEW, min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    return [
        EngineRequest("NaN", (9, POISON, 11), greedy(NUM_NEW)),
        EngineRequest("no token", (9, 10, 11), no_token),
        EngineRequest("NaN prompt", (9, POISON, *range(20, 60)), greedy(9, prompt_logprobs=1)),
    ]


def poisoned_worker(info: RankInfo, config: EngineConfig, requests_by_rank) -> RankResult:
    create = Engine.create

    def create_poisoned(*args, **kwargs) -> Engine:
        engine = create(*args, **kwargs)
        engine._parts.decoder.embedding[POISON] = float("nan")
        return engine

    with patch.object(Engine, "create", create_poisoned):
        return run_engine(config, world_of(info), requests_by_rank[info.rank])


@pytest.mark.parametrize("flags", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}], ids=str)
def test_the_others_of_all_ranks_get_the_text_that_they_get_without_them(rank_pool, flags):
    checkpoint = tiny_checkpoint("v3")
    config = EngineConfig(model=str(checkpoint.path), num_kv_blocks=64, ep_size=2, **flags)

    def run(requests: list[EngineRequest]) -> dict:
        results = rank_pool.run(poisoned_worker, 2, config, dealt(requests, 2), timeout_s=120)
        return {name: r for result in results for name, r in result.requests.items()}

    good, bad = good_requests(), bad_requests()
    mixed = run([good[0], *bad, *good[1:]])
    alone = run(good)
    for request in bad:
        (output,) = mixed[request.request_id].outputs
        assert (output.token_ids, output.finish_reason) == ((), FinishReason.ABORT)
    for request in good:
        name = request.request_id
        assert len(mixed[name].token_ids) == NUM_NEW
        assert mixed[name].token_ids == alone[name].token_ids
