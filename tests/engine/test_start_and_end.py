"""Ranks that take unlike times to load, or fail at it; and what an engine that failed still has."""

import pytest

from moe_ep.config import EngineConfig
from moe_ep.engine.engine import Engine, EngineError
from moe_ep.engine.request import EngineRequest
from tests.engine.driver import world_alone
from tests.engine.starts import LIMIT_S, PARAMS, failing_worker, late_for_good, late_worker
from tests.tiny import tiny_checkpoint

SIZES = {"num_kv_blocks": 8, "max_num_seqs": 2, "max_num_batched_tokens": 64}


def test_a_rank_that_loads_slowly_is_waited_for(rank_pool):
    model = str(tiny_checkpoint("v3").path)
    config = EngineConfig(model=model, ep_size=2, watchdog_timeout_s=LIMIT_S, **SIZES)
    results = rank_pool.run(late_worker, 2, config)
    assert [len(result.requests[str(r)].token_ids) for r, result in enumerate(results)] == [3, 3]


def test_a_rank_that_fails_to_load_is_named_to_its_peers_at_once(rank_pool):
    (of_0, seconds), (of_1, _), (of_2, _) = rank_pool.run(failing_worker, 3)
    assert of_0 == of_2 == "RuntimeError: rank 1 failed at loading: ValueError: no such file"
    assert of_1 == "ValueError: no such file"
    assert seconds < 30


def test_the_wait_has_a_limit(rank_pool):
    assert rank_pool.run(late_for_good, 2)[0] in ("DistStoreError", "RuntimeError")


def test_what_was_made_before_a_failure_comes_before_it():
    config = EngineConfig(model=str(tiny_checkpoint("v3").path), **SIZES)
    engine = Engine.create(config, world_alone(), num_threads=1)
    engine.submit([EngineRequest("a", (1, 2, 3), PARAMS)])
    while not engine._outbox.qsize():
        engine.step()
    engine._error = "rank 0 failed"
    assert engine.poll(0.01)[0].token_ids
    with pytest.raises(EngineError, match="rank 0 failed"):
        engine.poll(0.01)
