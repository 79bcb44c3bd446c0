"""Experts on the move under a real engine: the text is that of experts that stay where they are."""

from typing import Any

import pytest
import torch

from eplb.status import Phase
from moe_ep.config import EngineConfig
from moe_ep.engine.request import EngineRequest
from moe_ep.engine.step_shape import StepRules, Vote, derive
from tests.engine.driver import greedy
from tests.engine.moving import ABORTED, Run, worker
from tests.tiny import tiny_checkpoint

PROMPT_LENS = (3, 17, 61, 64, 5, 33, 90, 1)
NUM_NEW = 40
EXPERT_BYTES = (2 * 48 * 64 + 64 * 48) * 4


def requests_for(ep_size: int, *, only_rank: int | None = None) -> list[list[EngineRequest]]:
    generator = torch.Generator().manual_seed(3)
    found: list[list[EngineRequest]] = [[] for _ in range(ep_size)]
    for index, length in enumerate(PROMPT_LENS):
        prompt = tuple(torch.randint(2, 160, (length,), generator=generator).tolist())
        rank = index % ep_size if only_rank is None else only_rank
        request = EngineRequest(str(index), prompt, greedy(NUM_NEW, ignore_eos=True))
        found[rank].append(request)
    return found


def config_for(ep_size: int, **flags: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model": str(tiny_checkpoint("v3").path),
            "ep_size": ep_size,
            "num_kv_blocks": 64,
            "ep_num_redundant_experts": 8,
            "eplb_rebalance_num_iterations": 3,
            "eplb_bytes_per_step": 3 * EXPERT_BYTES,
        }
        | flags
    )


@pytest.fixture(scope="module")
def still(rank_pool) -> dict[str, list[int]]:
    """The texts where no expert moves. Neither ranks nor chunks change them: ``test_parity``."""
    runs = rank_pool.run(worker, 2, config_for(2), requests_for(2), {}, timeout_s=100)
    assert all(run.eplb is None for run in runs)
    texts = texts_of(runs)
    assert {len(ids) for ids in texts.values()} == {NUM_NEW}
    return texts


def texts_of(runs: list[Run]) -> dict[str, list[int]]:
    return {request_id: ids for run in runs for request_id, ids in run.texts.items()}


@pytest.mark.parametrize(
    ("ep_size", "flags", "script", "only_rank"),
    [
        (2, {}, {}, None),
        (4, {}, {}, None),
        (2, {"num_kv_blocks": 3, "max_num_batched_tokens": 64}, {}, None),  # preempts
        (4, {"max_num_seqs": 2, "max_num_batched_tokens": 16}, {"aborts_at": 12}, None),
        (4, {"ep_num_redundant_experts": 0}, {}, 3),  # three ranks have no work
        (4, {"ep_dispatch_algorithm": "balanced"}, {}, None),
    ],
    ids=["ep2", "ep4", "preemption", "abort-and-chunks", "idle-ranks", "balanced"],
)
def test_the_text_is_the_same(rank_pool, still, ep_size, flags, script, only_rank):
    requests = requests_for(ep_size, only_rank=only_rank)
    config = config_for(ep_size, enable_eplb=True, **flags)
    runs = rank_pool.run(worker, ep_size, config, requests, script, timeout_s=100)
    texts, expected = texts_of(runs), dict(still)
    if "aborts_at" in script:
        num_tokens = len(texts[ABORTED])
        assert 0 < num_tokens < NUM_NEW
        expected[ABORTED] = still[ABORTED][:num_tokens]
    assert texts == expected
    for run in runs:
        assert run.error is None
        assert run.eplb.num_rebalances >= 2
        assert run.eplb.num_failures == 0
    assert sum(run.eplb.bytes_moved for run in runs) % EXPERT_BYTES == 0
    assert (sum(run.num_preemptions for run in runs) > 0) == ("num_kv_blocks" in flags)


def test_a_rank_without_room_costs_one_re_placement_and_no_text(rank_pool, still):
    requests = requests_for(4)
    config = config_for(4, enable_eplb=True)
    runs = rank_pool.run(worker, 4, config, requests, {"fault": (2, 3, False)}, timeout_s=100)
    assert texts_of(runs) == still
    for run in runs:
        assert run.eplb.num_failures == 1
        assert run.eplb.num_rebalances >= 1
        assert run.eplb.alarm is None
    assert "rank 2" in runs[2].eplb.last_error
    assert "no room" in runs[2].eplb.last_error


def test_a_rank_that_dies_in_the_middle_of_a_move_ends_the_engine(rank_pool):
    config = config_for(2, enable_eplb=True)
    script = {"fault": (1, 2, True)}
    survivor, dead = rank_pool.run(worker, 2, config, requests_for(2), script, may_die=[1])
    assert dead is None
    assert survivor.error.startswith("rank 0 failed at step")
    assert survivor.eplb.phase in (Phase.MOVING, Phase.OFF)


def test_ranks_act_when_all_are_done_and_know_of_any_failure():
    rules = StepRules(deepep_mode="auto", capacity=8)

    def agreed(*votes: tuple[bool, bool]) -> tuple[bool, bool]:
        shape = derive([Vote(0, 1, eplb_done=d, eplb_failed=f) for d, f in votes], rules)
        return shape.eplb_done, shape.eplb_failed

    assert agreed((True, False), (False, False)) == (False, False)
    assert agreed((True, True), (False, False)) == (False, True)
    assert agreed((True, False), (True, False)) == (True, False)
    assert agreed((True, False), (True, True)) == (True, True)
