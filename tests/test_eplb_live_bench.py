"""The live benchmark of EPLB: its sums by hand, and a short run of its ranks."""

import argparse
from dataclasses import replace

import pytest
import torch

from bench import eplb_live
from bench.eplb_live_run import BALANCED, OFF, ON, RankRun, Run, config_of, make_requests, run_rank
from tests.engine.driver import world_of
from tests.ranks import RankInfo

NUM_TOPK, NUM_MOE_LAYERS = 4, 4  # of the demo model
ARGS = argparse.Namespace(
    dtype="float32", ep_size=2, batch=4, output_len=6, ep_num_redundant_experts=2, window=2
)


def test_balance_and_savings_by_hand():
    tokens = torch.tensor([[[3], [1]], [[1], [3]], [[6], [4]], [[9], [9]]])  # [N, R, L]
    seconds = tokens.double() / 2
    ranks = [
        RankRun([1.0, 2.0, 4.0, 1.0], tokens[:, 0], seconds[:, 0], 3, {"a": [1]}, None),
        RankRun([2.0, 1.0, 3.0, 1.0], tokens[:, 1], seconds[:, 1], 2, {"b": [2]}, None),
    ]
    run = Run.of(OFF, ranks)
    assert run.step_s == [2.0, 2.0, 4.0, 1.0]
    assert run.turn == 2
    assert run.texts == {"a": [1], "b": [2]}
    assert run.balance(1).flatten().tolist() == pytest.approx([2 / 3, 2 / 3, 5 / 6, 1])
    assert run.balance(2).flatten().tolist() == pytest.approx([1, 14 / 15])
    assert run.balance(3).shape == (1, 1)
    assert run.decodes.tolist() == [True, True, False, False]
    even = replace(run, rank_tokens=torch.tensor([[[2, 2]], [[2, 2]], [[5, 5]], [[9, 9]]]))
    # Of the slowest rank: 3 + 3 + 6 + 9 tokens, and 2 + 2 + 5 + 9; as much time.
    assert even.saved(run, decodes_only=False) == pytest.approx((1 - 18 / 21, 0))
    assert even.saved(run, decodes_only=True) == pytest.approx((1 - 4 / 6, 0))
    faster = replace(run, expert_s=run.expert_s / 4)
    found = eplb_live.summary([even, faster], [run, run], 1)
    assert found["tokens_saved"] == pytest.approx([1 - 18 / 21, 0])
    assert found["expert_time_saved_in_decodes"] == pytest.approx([0, 0.75])
    assert found["same_text"]


def worker(info: RankInfo, arm: str) -> RankRun:
    requests = make_requests(2, 3, ARGS.output_len)[info.rank]
    return run_rank(config_of(arm, ARGS), world_of(info), requests)


def test_every_arm_runs_the_same_steps_and_gives_the_same_text(rank_pool):
    runs = [Run.of(arm, rank_pool.run(worker, 2, arm)) for arm in (OFF, ON, BALANCED)]
    requests = [request for rank in make_requests(2, 3, ARGS.output_len) for request in rank]
    computed = sum(len(r.prompt_token_ids) + ARGS.output_len - 1 for r in requests)
    for run in runs:
        assert len(run.step_s) == len(run.rank_tokens) == len(runs[0].step_s)
        *by_layer, last = run.rank_tokens.sum((0, 2)).tolist()
        assert by_layer == [computed * NUM_TOPK] * (NUM_MOE_LAYERS - 1)
        assert 0 < last <= computed * NUM_TOPK, "it may leave out what nobody asks for"
        assert run.texts == runs[0].texts
        assert (run.expert_s > 0)[run.rank_tokens > 0].all()
        assert len(run.statuses) == (0 if run.arm == OFF else 2)
    assert {len(ids) for ids in runs[0].texts.values()} == {ARGS.output_len}
    assert 0 < runs[0].turn < len(runs[0].step_s)
