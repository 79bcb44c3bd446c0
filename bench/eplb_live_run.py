"""What ``bench.eplb_live`` runs and what it counts: one rank's steps, and those of all ranks."""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eplb import balancedness
from eplb.loads import work_of_slowest
from eplb.status import EplbStatus
from moe_ep.config import EngineConfig
from moe_ep.dispatch import Dispatched
from moe_ep.engine.engine import Engine
from moe_ep.engine.request import EngineRequest, SamplingParams
from moe_ep.engine.world import World
from moe_ep.layer import MoELayer

TIMEOUT_S = 120.0
DEMO = Path(__file__).parent.parent / "launch" / "demo"
OFF, ON, BALANCED = "off", "on", "on, balanced"
KINDS = ("verse", "code")
PROMPT_TOKENS = 200


@dataclass(frozen=True)
class RankRun:
    """One rank's steps. tokens: int64 ``[N, L]``, that its experts got in each step, and expert_s,
    float64, CPU seconds that they took. turn: the step in which its first request of the second
    kind gave a token."""

    step_s: list[float]
    tokens: torch.Tensor
    expert_s: torch.Tensor
    turn: int
    texts: dict[str, list[int]]
    eplb: EplbStatus | None


@dataclass(frozen=True, eq=False)
class Run:
    """All ranks of one engine. rank_tokens, expert_s: ``[N, L, R]``. step_s: of the slowest rank.
    statuses: one per rank, empty without EPLB. turn: before it no rank continues code."""

    arm: str
    rank_tokens: torch.Tensor
    expert_s: torch.Tensor
    step_s: list[float]
    turn: int
    texts: dict[str, list[int]]
    statuses: list[EplbStatus]

    @classmethod
    def of(cls, arm: str, ranks: Sequence[RankRun]) -> "Run":
        return cls(
            arm=arm,
            rank_tokens=torch.stack([rank.tokens for rank in ranks], dim=-1),
            expert_s=torch.stack([rank.expert_s for rank in ranks], dim=-1),
            step_s=[max(times) for times in zip(*(rank.step_s for rank in ranks), strict=True)],
            turn=min(rank.turn for rank in ranks),
            texts={key: ids for rank in ranks for key, ids in rank.texts.items()},
            statuses=[rank.eplb for rank in ranks if rank.eplb is not None],
        )

    @property
    def median_step_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def longest_stall_s(self) -> float:
        return max((status.longest_stall_s for status in self.statuses), default=0.0)

    def balance(self, window: int) -> torch.Tensor:
        """``[W, L]``: balancedness of the tokens of each window of steps."""
        whole = self.rank_tokens[: len(self.rank_tokens) // window * window]
        windows = whole.unflatten(0, (-1, window)).sum(1)
        return balancedness(windows.flatten(0, 1)).unflatten(0, windows.shape[:2])

    @property
    def decodes(self) -> torch.Tensor:
        """bool ``[N]``: steps without a prompt, which have no more tokens than most."""
        totals = self.rank_tokens.sum((1, 2))
        return totals <= totals.median()

    def saved(self, base: "Run", *, decodes_only: bool) -> tuple[float, float]:
        """Share of the base's tokens, and of its expert time, that fall away, both of the slowest
        rank of each layer and step."""

        def totals(run: Run) -> torch.Tensor:
            steps = run.decodes if decodes_only else torch.ones_like(run.decodes)
            parts = (run.rank_tokens[steps], run.expert_s[steps])
            return torch.tensor([work_of_slowest(part.flatten(0, 1)) for part in parts])

        tokens, seconds = (1 - totals(self) / totals(base)).tolist()
        return tokens, seconds


def make_requests(num_ranks: int, per_kind: int, num_new: int) -> list[list[EngineRequest]]:
    """By rank: as many of each kind, one kind behind the other."""
    prompts = json.loads((DEMO / "prompts.json").read_text(encoding="utf-8"))
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=num_new, ignore_eos=True)
    requests: list[list[EngineRequest]] = [[] for _ in range(num_ranks)]
    for kind in KINDS:
        texts = [prompt["prompt"] for prompt in prompts if prompt["kind"] == kind]
        for index in range(per_kind * num_ranks):
            ids = tuple(texts[index % len(texts)].encode())[:PROMPT_TOKENS]
            request = EngineRequest(f"{kind} {index}", ids, params)
            requests[index % num_ranks].append(request)
    return requests


def config_of(arm: str, args: argparse.Namespace) -> EngineConfig:
    config = EngineConfig(
        model=str(DEMO / "model"),
        dtype=args.dtype,
        ep_size=args.ep_size,
        max_num_seqs=args.batch,
        num_kv_blocks=args.batch * (2 + (PROMPT_TOKENS + args.output_len) // 64),
        watchdog_timeout_s=TIMEOUT_S,
        enable_prefix_caching=False,  # every request's tokens are part of the load
    )
    if arm == OFF:
        return config
    return replace(
        config,
        enable_eplb=True,
        ep_num_redundant_experts=args.ep_num_redundant_experts,
        eplb_rebalance_num_iterations=args.window,
        ep_dispatch_algorithm="balanced" if arm == BALANCED else "static",
    )


def run_rank(config: EngineConfig, world: World, requests: list[EngineRequest]) -> RankRun:
    """Steps until all ranks are idle. Collective."""
    engine = Engine.create(config, world, num_threads=1)
    parts = engine._parts
    parts.sync.sleep = lambda has_work: engine.stop()  # type: ignore[method-assign]
    texts: dict[str, list[int]] = {request.request_id: [] for request in requests}
    step_s: list[float] = []
    timed = [_TimedExperts(layer) for layer in parts.decoder.moe_layers]
    counts, seconds = [_slot_tokens(engine)], [_seconds(timed)]
    turn = 0
    try:
        engine.submit(requests)
        while True:
            start = time.perf_counter()
            if not engine.step():
                break
            step_s.append(time.perf_counter() - start)
            counts.append(_slot_tokens(engine))
            seconds.append(_seconds(timed))
            for output in engine.poll(0.0):
                texts[output.request_id] += output.token_ids
                if not turn and output.request_id.startswith(KINDS[1]):
                    turn = len(step_s) - 1
        eplb = parts.balancer.status()
    finally:
        parts.balancer.close()
        parts.dispatcher.destroy()
    # The last step is the sleep: it has no tokens.
    tokens, expert_s = (torch.stack(totals[:-1]).diff(dim=0) for totals in (counts, seconds))
    return RankRun(step_s[:-1], tokens, expert_s, turn, texts, eplb)


class _TimedExperts:
    """A layer's experts, whose CPU time is added up."""

    def __init__(self, layer: MoELayer) -> None:
        self.seconds = 0.0
        self._experts = layer.experts
        layer.experts = self  # type: ignore[assignment]

    def __call__(self, dispatched: Dispatched) -> torch.Tensor:
        start = time.thread_time()
        y = self._experts(dispatched)
        self.seconds += time.thread_time() - start
        return y

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


def _seconds(timed: Sequence[_TimedExperts]) -> torch.Tensor:
    """float64 ``[L]``"""
    return torch.tensor([experts.seconds for experts in timed], dtype=torch.float64)


def _slot_tokens(engine: Engine) -> torch.Tensor:
    """int64 ``[L]``"""
    return torch.stack([layer.slot_tokens.sum() for layer in engine._parts.decoder.moe_layers])
