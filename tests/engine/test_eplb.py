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
NUM_NEW = 48
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
            "eplb_bytes_per_step": 2 * EXPERT_BYTES,
        }
        | flags
    )


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
def test_the_text_is_the_same(rank_pool, ep_size, flags, script, only_rank):
    requests = requests_for(ep_size, only_rank=only_rank)
    still, moving = (
        rank_pool.run(
            worker, ep_size, config_for(ep_size, enable_eplb=on, **flags), requests, script,
            timeout_s=100,
        )
        for on in (False, True)
    )  # fmt: skip
    assert texts_of(moving) == texts_of(still)
    assert {len(ids) for key, ids in texts_of(still).items() if key != ABORTED} == {NUM_NEW}
    if "aborts_at" in script:
        assert 0 < len(texts_of(still)[ABORTED]) < NUM_NEW
    for run in moving:
        assert run.error is None
        assert run.eplb.num_rebalances >= 2
        assert run.eplb.num_failures == 0
    assert all(run.eplb is None for run in still)
    assert sum(run.eplb.bytes_moved for run in moving) % EXPERT_BYTES == 0
    assert (sum(run.num_preemptions for run in moving) > 0) == ("num_kv_blocks" in flags)


def test_a_rank_without_room_costs_one_re_placement_and_no_text(rank_pool):
    requests = requests_for(4)
    config = config_for(4, enable_eplb=True)
    runs = rank_pool.run(worker, 4, config, requests, {"fault": (2, 3, False)}, timeout_s=100)
    still = rank_pool.run(worker, 4, config_for(4), requests, {}, timeout_s=100)
    assert texts_of(runs) == texts_of(still)
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
