"""Engines whose experts are on the move, for rank processes: nothing heavy is imported here.

The placement computed is another random one every time, which moves more and balances less than
any real algorithm would.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch

import moe_ep.engine.eplb as glue
from eplb.cost import CostModel
from eplb.placement import Placement
from eplb.status import EplbStatus
from moe_ep.config import EngineConfig
from moe_ep.engine.engine import Engine, EngineError
from moe_ep.engine.request import EngineRequest
from tests.engine.driver import PREEMPTIONS, RecordingSampler, world_of
from tests.eplb.placements import reshuffled
from tests.ranks import RankInfo

ABORTED = "2"  # the request that a script may abort


class ScriptedEngine(Engine):
    """Aborts one request before the step ``aborts_at``."""

    aborts_at: int | None = None

    def step(self) -> bool:
        if self._progress.step == self.aborts_at:
            self.abort([ABORTED])
        return super().step()


@dataclass(frozen=True)
class Run:
    texts: dict[str, list[int]]
    eplb: EplbStatus | None
    num_preemptions: int
    error: str | None


def shuffled(loads: torch.Tensor, current: Placement, cost: CostModel) -> Placement:
    return reshuffled(current)


class FaultySlots(glue.EngineSlots):
    """Counts what is staged; at ``fails_at`` it raises, or its process ends."""

    fails_at: int | None = None
    dies = False
    num_staged = 0

    def stage(self, layer: int, tensors: list[torch.Tensor]) -> object:
        FaultySlots.num_staged += 1
        if self.num_staged == self.fails_at:
            if self.dies:
                os._exit(1)
            raise MemoryError("no room")
        return super().stage(layer, tensors)


def worker(
    info: RankInfo,
    config: EngineConfig,
    requests: list[list[EngineRequest]],
    script: dict[str, Any],
) -> Run:
    """script: aborts_at, a step; fault: (rank, staging, whether it dies)."""
    rank, fails_at, dies = script.get("fault", (None, None, False))
    FaultySlots.num_staged = 0
    FaultySlots.dies = dies
    FaultySlots.fails_at = fails_at if rank == info.rank else None
    glue.EngineSlots = FaultySlots
    glue.next_placement = shuffled
    engine = ScriptedEngine.create(config, world_of(info), num_threads=1)
    engine.aborts_at = script.get("aborts_at")
    engine.submit(requests[info.rank])
    engine._parts.sync.sleep = lambda has_work: engine._stopping.set()
    PREEMPTIONS.clear()
    engine._parts.runner.sampler = RecordingSampler(engine.info.eos_token_ids)
    error = None
    try:
        engine.run()
    except EngineError as failure:
        error = str(failure)
    texts: dict[str, list[int]] = {request.request_id: [] for request in requests[info.rank]}
    while not engine._outbox.empty():
        for output in engine._outbox.get():
            texts[output.request_id] += output.token_ids
    return Run(texts, engine.status().eplb, sum(PREEMPTIONS.values()), error)


def loading_worker(info: RankInfo, config: EngineConfig) -> tuple[str, ...]:
    """Names of the tensors that the rank read."""
    engine = Engine.create(config, world_of(info), num_threads=1)
    engine._parts.dispatcher.destroy()
    return engine.info.load_report.loaded


def unlike_worker(info: RankInfo, configs: list[EngineConfig]) -> None:
    Engine.create(configs[info.rank], world_of(info), num_threads=1)
