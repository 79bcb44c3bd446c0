"""Runs requests through real engines, in this process or on rank processes, without Ray."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch

from attention import new_tokens
from eplb.status import EplbStatus
from moe_ep import kernels
from moe_ep.config import EngineConfig
from moe_ep.engine.engine import Engine
from moe_ep.engine.request import EngineRequest, SampledToken, SamplingParams, StepOutput
from moe_ep.engine.sampler import Sampler
from moe_ep.engine.world import World
from tests.ranks import RankInfo


@dataclass
class RequestResult:
    """What one request got: tokens, the logits behind each of them, and its last output."""

    token_ids: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    outputs: list[StepOutput] = field(default_factory=list)


@dataclass(frozen=True)
class RankResult:
    requests: dict[str, RequestResult]
    num_preemptions: int
    num_steps: int
    slot_tokens: list[list[int]]
    eplb: EplbStatus | None


class RecordingSampler(Sampler):
    """Keeps the logits row of every sampled token."""

    def sample(self, logits, requests) -> list[SampledToken]:
        for row, request in zip(logits, requests, strict=True):
            RECORDED.setdefault(request.request_id, []).append(row.clone())
            PREEMPTIONS[request.request_id] = request.num_preemptions
        return super().sample(logits, requests)


RECORDED: dict[str, list[torch.Tensor]] = {}
PREEMPTIONS: dict[str, int] = {}


def greedy(max_tokens: int, **params) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0, **params)


def dealt(requests: list[EngineRequest], num_ranks: int) -> list[list[EngineRequest]]:
    """The requests of each rank, which take them in turn."""
    return [requests[rank::num_ranks] for rank in range(num_ranks)]


def run_engine(config: EngineConfig, world: World, requests: list[EngineRequest]) -> RankResult:
    """Create this rank's engine, submit ``requests`` to it, and step until all ranks are idle.

    Collective. An engine that is idle while others work takes part in their steps.
    """
    RECORDED.clear()
    PREEMPTIONS.clear()
    engine = Engine.create(config, world, num_threads=1)
    runner = engine._parts.runner
    runner.sampler = RecordingSampler(runner.sampler.eos_token_ids)
    results = {request.request_id: RequestResult() for request in requests}
    engine.submit(requests)
    engine._parts.sync.sleep = lambda has_work: engine._stopping.set()  # idle: all work is done
    engine.run()
    outputs = engine.poll(0.01) if requests else []
    for output in outputs:
        results[output.request_id].token_ids += output.token_ids
        results[output.request_id].outputs.append(output)
    for request_id, result in results.items():
        result.logits = RECORDED.get(request_id, [])
    status = engine.status()
    return RankResult(
        results,
        num_preemptions=sum(PREEMPTIONS.values()),
        num_steps=status.progress.step,
        slot_tokens=engine.slot_tokens(),
        eplb=status.eplb,
    )


def world_alone() -> World:
    """Of an engine of one rank, in this process."""
    return World(rank=0, num_ranks=1, store=None, timeout_s=30.0)


def world_of(info: RankInfo) -> World:
    """Of an engine of all ranks of a job, over the job's own group."""
    return World(
        rank=info.rank,
        num_ranks=info.num_ranks,
        store=info.store,
        timeout_s=30.0,
        group=info.group,
    )


def engine_worker(
    info: RankInfo, config: EngineConfig, requests_by_rank: list[list[EngineRequest]]
) -> RankResult:
    """Worker for ``RankPool.run``: one engine per rank, each with its own requests."""
    return run_engine(config, world_of(info), requests_by_rank[info.rank])


@contextmanager
def kernels_alone() -> Iterator[None]:
    """As on a GPU without libraries, where kernels do all that torch could do too."""
    with (
        patch.object(kernels, "are_used", lambda device: True),
        patch.object(new_tokens, "uses_kernel", lambda device: True),
    ):
        yield
