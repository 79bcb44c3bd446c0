"""Two micro-batches in turns against one batch: the same bits, whatever the batch is.

In BF16 and FP8, what a row of a product of these sizes becomes does not depend on how many rows
there are, so nothing may differ. In float32 MKL's product takes another kernel for fewer than four
rows, which an expert, or the last layer of a prefill, often has of half a batch and not of the
whole: there, and in the GPU
libraries' stand-ins, which compute in float32, products are given four rows at least, and then
nothing else may differ either.
"""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from attention import torch_prefill
from moe_ep import overlap
from moe_ep.config import EngineConfig
from moe_ep.engine import micro_batches
from moe_ep.engine.engine import Engine
from moe_ep.engine.request import EngineRequest, FinishReason
from moe_ep.gate import Gate
from moe_ep.linear import Linear
from tests.compare import assert_bits_equal
from tests.emulators.device import emulated_kernels
from tests.emulators.install import emulated
from tests.engine.driver import RankResult, engine_worker, greedy, world_alone
from tests.engine.test_parity import NUM_NEW, check_exact, config_for, prompt_requests, reference
from tests.ranks import RankInfo, RankPool
from tests.tiny import SIZES, tiny_checkpoint

ALWAYS = {"enable_two_batch_overlap": True, "tbo_token_threshold": 1}
KEY_ROWS = 128  # instead of 1024: prompts of a few hundred tokens are cut


@contextmanager
def _products_of_four_rows() -> Iterator[None]:
    def padded(real: Callable[..., torch.Tensor], rows: torch.Tensor, *args) -> torch.Tensor:
        return real(F.pad(rows, (0, 0, 0, max(0, 4 - len(rows)))), *args)[: len(rows)]

    def padded_batch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rows = F.pad(a, (0, 0, 0, max(0, 4 - a.shape[1])))
        return bmm(rows, b)[:, : a.shape[1]]

    linear, matmul, gate = Linear.__call__, torch.Tensor.__matmul__, Gate.logits
    bmm = torch.bmm
    with (
        patch.object(torch, "bmm", padded_batch),
        patch.object(Gate, "logits", lambda self, x: padded(partial(gate, self), x)),
        patch.object(Linear, "__call__", lambda self, x: padded(partial(linear, self), x)),
        patch.object(torch.Tensor, "__matmul__", lambda a, b: padded(matmul, a, b)),
    ):
        yield


def _worker(
    info: RankInfo,
    config: EngineConfig,
    requests: list[list[EngineRequest]],
    is_emulated: bool = False,
) -> tuple[RankResult, list[int]]:
    """This rank's results, and the number of micro-batches of each of its steps."""
    real, steps = overlap.run, []

    def counted(generators):
        steps.append(len(generators))
        return real(generators)

    with ExitStack() as stack:
        stack.enter_context(patch.object(overlap, "run", counted))
        stack.enter_context(patch.object(torch_prefill, "KEY_ROWS", KEY_ROWS))
        stack.enter_context(patch.object(micro_batches, "CUT_ROWS", KEY_ROWS))
        if is_emulated or config.dtype == "float32":
            stack.enter_context(_products_of_four_rows())
        if is_emulated:
            stack.enter_context(emulated("deep_ep"))
            stack.enter_context(emulated_kernels(major=9))
        return engine_worker(info, config, requests), steps


def _random_requests(seed: int, num_ranks: int) -> list[list[EngineRequest]]:
    """Unequal ranks, short and long prompts, and texts that end one after another."""
    draw = random.Random(seed)
    ranks = []
    for rank in range(num_ranks):
        requests = []
        for index in range(draw.randint(9, 14)):
            length = draw.choice((1, 2, 7, 40, 64, 65, 150, 300))
            prompt = tuple(draw.randrange(2, SIZES["vocab_size"]) for _ in range(length))
            params = greedy(draw.randint(1, 7), ignore_eos=True)
            requests.append(EngineRequest(f"{rank}.{index}", prompt, params))
        ranks.append(requests)
    return ranks


def _dummy_model(directory: Path, dtype: str) -> EngineConfig:
    """32 experts: with fewer, the last token's scores fall into the rest of a vector loop, whose
    exponential rounds otherwise, and which token is last depends on the split."""
    kind = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    config = SIZES | kind | {"n_routed_experts": 32, "torch_dtype": dtype}
    (directory / "config.json").write_text(json.dumps(config))
    return EngineConfig(str(directory), load_format="dummy", dtype=dtype, num_kv_blocks=128)


def _check_same(
    pool: RankPool, config: EngineConfig, requests: list[list[EngineRequest]], *more: bool
) -> list[int]:
    """Run without and with overlap; every logit of every request must have the same bits. Returns
    the number of micro-batches of each step."""
    runs = []
    for flags in ({}, ALWAYS):
        changed = replace(config, **flags)
        results = pool.run(_worker, config.ep_size, changed, requests, *more, timeout_s=120)
        runs.append(tuple(zip(*results, strict=True)))
    (alone, single_steps), (in_turns, double_steps) = runs
    assert all(set(steps) == {1} for steps in single_steps)
    assert len({tuple(steps) for steps in double_steps}) == 1, "ranks must decide alike"
    assert double_steps[0].count(2) > 1, double_steps
    for one, other in zip(alone, in_turns, strict=True):
        for name, result in one.requests.items():
            logits = other.requests[name].logits
            assert_bits_equal(torch.stack(logits), torch.stack(result.logits))
    return double_steps[0]


@pytest.mark.parametrize(
    ("dtype", "ep_size", "flags"),
    [
        ("float32", 1, {}),
        ("float32", 2, {"max_num_batched_tokens": 512}),
        ("bfloat16", 1, {"max_num_batched_tokens": 512}),
        ("bfloat16", 2, {"max_num_batched_tokens": 200, "max_num_seqs": 16}),  # chunks, mixed steps
        ("bfloat16", 2, {"deepep_mode": "normal"}),
        ("bfloat16", 2, {"deepep_mode": "low_latency", "max_num_seqs": 64}),  # of prefill too
        ("bfloat16", 2, {"cuda_graph_bs": (8, 16)}),  # both halves padded to half a bucket
        ("bfloat16", 4, {"max_num_batched_tokens": 512}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_random_batches_give_the_same_bits(
    rank_pool: RankPool, tmp_path: Path, dtype: str, ep_size: int, flags: dict
):
    config = replace(_dummy_model(tmp_path, dtype), ep_size=ep_size, **flags)
    _check_same(rank_pool, config, _random_requests(ep_size, ep_size))


@pytest.mark.parametrize("exchange", ["deepep", "deepep_v2"])
@pytest.mark.parametrize("mode", ["normal", "auto"])
def test_emulated_libraries_give_the_same_bits(rank_pool: RankPool, exchange: str, mode: str):
    checkpoint = tiny_checkpoint("v3-wide", dtype="bfloat16", fp8=True)
    config = config_for(
        checkpoint,
        ep_size=2,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        moe_runner_backend="deep_gemm",
        attention_backend="flash_mla",
        moe_a2a_backend=exchange,
        deepep_mode=mode,
    )
    steps = _check_same(rank_pool, config, [[], prompt_requests()], True)
    assert steps[4:6] == [2, 2], "all decode in these, in low-latency mode unless it is excluded"


def _run(pool: RankPool, requests: list[list[EngineRequest]], **flags: int | str):
    config = config_for(tiny_checkpoint("v3"), ep_size=len(requests), **ALWAYS, **flags)
    results = pool.run(_worker, len(requests), config, requests, timeout_s=120)
    return [result for result, _ in results], results[0][1]


def _requests(indices: list[int]) -> list[EngineRequest]:
    requests = prompt_requests()
    return [requests[index] for index in indices]


@pytest.mark.parametrize(
    "shares",
    [
        [[0, 1, 2, 3, 4, 5, 6, 7]],
        [[], [0, 1, 2, 3, 4, 5, 6, 7]],  # an idle rank
        [[3], [0, 1, 2, 4, 5, 6, 7]],  # one request, whose other half is empty; seven
        [[1, 2, 3, 4, 5, 6, 7], [], [0], []],
    ],
    ids=["one rank", "idle rank", "one request", "four ranks"],
)
def test_overlap_equals_transformers(rank_pool: RankPool, shares: list[list[int]]):
    results, steps = _run(rank_pool, [_requests(share) for share in shares])
    assert steps.count(2) >= (NUM_NEW if len(shares[-1]) == 8 else 1), steps
    check_exact(results, reference("v3"))


def test_preempted_requests_equal_transformers(rank_pool: RankPool):
    results, steps = _run(rank_pool, [_requests([0, 1, 2, 3, 4, 5, 6])], num_kv_blocks=7)
    assert results[0].num_preemptions > 0
    assert steps.count(2) > 1, steps
    check_exact(results, reference("v3"))


def test_a_single_request_runs_as_one_batch(rank_pool: RankPool):
    results, steps = _run(rank_pool, [_requests([3]), []])
    assert steps == [1] * NUM_NEW, "there is nothing to take turns with"
    check_exact(results, reference("v3"))


def test_requests_aborted_in_between_leave_the_others_alone():
    config = config_for(tiny_checkpoint("v3"), **ALWAYS)
    engine = Engine.create(config, world_alone(), 1)
    kept = prompt_requests()
    engine.submit([*kept, *(replace(r, request_id=f"{r.request_id} aborted") for r in kept)])
    outputs = []
    for step in range(NUM_NEW):
        engine.step()
        outputs += engine.poll(1.0)
        engine.abort([f"{step} aborted", "7 aborted"])
    for index, (token_ids, _) in enumerate(reference("v3")):
        mine = [output for output in outputs if output.request_id == str(index)]
        assert [token for output in mine for token in output.token_ids] == token_ids
    assert [output.finish_reason for output in outputs].count(FinishReason.ABORT) == NUM_NEW
    engine._scheduler.check_integrity()
