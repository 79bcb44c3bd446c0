"""Decode steps replayed from graphs: the same bits as those steps run anew, and the right text.

Runs on the stand-ins of the libraries; ``tests/emulators/cuda_graph.py`` says what a replay repeats
and what a capture refuses. The last rank has no requests, half of the experts have replicas, and
the embedding of the token that stands in padding rows is NaN.
"""

import dataclasses
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch

from moe_ep.config import EngineConfig
from moe_ep.dispatch import deep_ep_v1
from moe_ep.engine.engine import Engine
from moe_ep.engine.request import EngineRequest
from moe_ep.engine.world import World
from tests.compare import assert_bits_equal
from tests.emulators.cuda_graph import EmulatedGraphMaker
from tests.emulators.device import emulated_kernels
from tests.emulators.install import emulated
from tests.engine.driver import RankResult, dealt, engine_worker, greedy
from tests.engine.graph_makers import AnewMaker, emulated_graphs
from tests.engine.test_parity import FP8, PROMPT_LENS, check_rows, config_for, prompts, reference
from tests.ranks import RankInfo, RankPool
from tests.tiny import tiny_checkpoint

CASE = "v3-wide"
NUM_TOPK = 4
OVERLAP = {"enable_two_batch_overlap": True, "tbo_token_threshold": 8}
PADDING_TOKEN = 0  # no prompt has it, and no text here


@dataclass(frozen=True)
class Run:
    """One rank's: what its requests got, and how often each of its graphs was replayed."""

    result: RankResult
    num_replays: list[int]


def create_poisoned(config: EngineConfig, world: World, num_threads: int) -> Engine:
    engine = REAL_CREATE(config, world, num_threads)
    engine._parts.decoder.embedding[PADDING_TOKEN] = torch.nan
    return engine


REAL_CREATE = Engine.create


def graph_worker(
    info: RankInfo, config: EngineConfig, requests: list[list[EngineRequest]], is_captured: bool
) -> Run:
    maker = EmulatedGraphMaker() if is_captured else AnewMaker()
    poisoned = patch.object(Engine, "create", create_poisoned)
    # As over several nodes: normal mode leaves the buffer dirty, and a replay does not clean it.
    one_buffer = patch.object(deep_ep_v1, "v1_has_one_buffer", lambda spec: True)
    with emulated("deep_ep"), emulated_kernels(), emulated_graphs(maker), poisoned, one_buffer:
        result = engine_worker(info, config, requests)
    return Run(result, [graph.num_replays for graph in getattr(maker, "graphs", [])])


def requests_for(ep_size: int, num_new: int | None = None) -> list[list[EngineRequest]]:
    """The prompts, dealt to all ranks but the last; texts of unlike lengths if none is given."""
    lengths = [num_new or 2 + 3 * index % 8 for index in range(len(PROMPT_LENS))]
    requests = [
        EngineRequest(str(index), tuple(prompt), greedy(length, ignore_eos=True))
        for index, (prompt, length) in enumerate(zip(prompts(), lengths, strict=True))
    ]
    return [*dealt(requests, ep_size - 1), []]


def graph_config(ep_size: int, **flags) -> EngineConfig:
    given = {
        "ep_size": ep_size,
        "ep_num_redundant_experts": 8,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "moe_runner_backend": "deep_gemm",
        "attention_backend": "flash_mla",
    }
    return config_for(tiny_checkpoint(CASE, dtype="bfloat16", fp8=True), **given | flags)


def run(pool: RankPool, config: EngineConfig, requests, *, is_captured: bool) -> list[Run]:
    arguments = (config, requests, is_captured)
    runs = pool.run(graph_worker, config.ep_size, *arguments, timeout_s=120)
    assert len({run.result.num_steps for run in runs}) == 1, "ranks must run the same steps"
    assert len({tuple(run.num_replays) for run in runs}) == 1, "ranks must replay the same steps"
    return runs


def assert_same_bits(runs: list[Run], others: list[Run]) -> None:
    for run_, other in zip(runs, others, strict=True):
        assert run_.result.slot_tokens == other.result.slot_tokens
        for request_id, request in run_.result.requests.items():
            same = other.result.requests[request_id]
            assert request.token_ids == same.token_ids
            assert_bits_equal(torch.stack(request.logits), torch.stack(same.logits))


@pytest.mark.parametrize(
    ("exchange", "ep_size", "flags"),
    [
        ("deepep", 2, {"cuda_graph_bs": (4, 8)}),
        ("deepep", 4, {"cuda_graph_bs": (4,)}),
        ("deepep_v2", 2, {"cuda_graph_bs": (8,)}),
        ("deepep", 2, OVERLAP | {"cuda_graph_bs": (8,)}),
    ],
    ids=["deepep", "deepep-4", "deepep_v2", "overlap"],
)
def test_replays_are_the_steps_and_right(rank_pool, exchange: str, ep_size: int, flags: dict):
    config = graph_config(ep_size, moe_a2a_backend=exchange, **flags)
    requests = requests_for(ep_size, num_new=6)
    captured = run(rank_pool, config, requests, is_captured=True)
    assert captured[0].num_replays[-1] > 1, captured[0].num_replays
    num_tokens = 6 * len(PROMPT_LENS)  # sampled from: the MoE layer is the last
    counted = sum(sum(run_.result.slot_tokens[0]) for run_ in captured)
    assert counted == NUM_TOPK * num_tokens, "padding, or what was tried before the first request"
    assert_same_bits(captured, run(rank_pool, config, requests, is_captured=False))
    results = [run_.result for run_ in captured[:-1]]
    check_rows(results, reference(CASE, fp8=True, dtype="bfloat16"), FP8)


def test_texts_equal_those_of_an_engine_without_graphs(rank_pool):
    """Requests end and others, of which there is no room for all at once, prefill in between."""
    config = graph_config(2, moe_a2a_backend="deepep", max_num_seqs=3, cuda_graph_bs=(1, 3))
    requests = requests_for(2)
    (captured, _) = run(rank_pool, config, requests, is_captured=True)
    assert min(captured.num_replays) > 2, captured.num_replays
    assert captured.result.num_steps > sum(captured.num_replays) + 4, "few eager steps between"
    eager_config = dataclasses.replace(config, enforce_eager=True, cuda_graph_bs=None)
    (eager, _) = run(rank_pool, eager_config, requests, is_captured=True)
    assert eager.num_replays == []
    for request_id, request in captured.result.requests.items():
        same = eager.result.requests[request_id]
        assert request.token_ids == same.token_ids
        torch.testing.assert_close(
            torch.stack(request.logits), torch.stack(same.logits), atol=0.05, rtol=0.05
        )
