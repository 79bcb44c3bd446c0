"""Experts re-placed under a real service's steps, when the text turns from verse to code.

``python -m bench.eplb_live``. The demo model on ranks of one thread each: every rank's queue holds
requests that continue verse and, behind them, as many that continue code; so the experts in demand
change in mid-run. Engines without EPLB (and without redundant experts), with it, and with balanced
dispatch, too, take turns, all over the same requests: steps are the same in all, and texts must be,
in float32. Ranks share the machine's cores, so step times tell of stalls more than of balance;
balance is in what is counted: tokens of each rank, layer and step.

Prints tables, and one JSON object last.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.ranks import run_ranks
from eplb import balancedness
from eplb.loads import work_of_slowest
from eplb.status import EplbStatus
from moe_ep.config import EngineConfig
from moe_ep.engine.engine import Engine
from moe_ep.engine.request import EngineRequest, SamplingParams
from moe_ep.engine.world import World

TIMEOUT_S = 120.0
DEMO = Path(__file__).parent.parent / "launch" / "demo"
OFF, ON, BALANCED = "off", "on", "on, balanced"
KINDS = ("verse", "code")
PROMPT_TOKENS = 200
TABLE_WIDTH = 110


@dataclass(frozen=True)
class RankRun:
    """One rank's steps. tokens: int64 ``[N, L]``, that its experts got in each step. turn: the step
    in which its first request of the second kind gave a token."""

    step_s: list[float]
    tokens: torch.Tensor
    turn: int
    texts: dict[str, list[int]]
    eplb: EplbStatus | None


@dataclass(frozen=True, eq=False)
class Run:
    """All ranks of one engine. rank_tokens: ``[N, L, R]``. step_s: of the slowest rank. statuses:
    one per rank, empty without EPLB. turn: before it no rank continues code."""

    arm: str
    rank_tokens: torch.Tensor
    step_s: list[float]
    turn: int
    texts: dict[str, list[int]]
    statuses: list[EplbStatus]

    @classmethod
    def of(cls, arm: str, ranks: Sequence[RankRun]) -> "Run":
        return cls(
            arm=arm,
            rank_tokens=torch.stack([rank.tokens for rank in ranks], dim=-1),
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

    def work(self, *, decodes_only: bool = False) -> float:
        """Tokens of the slowest rank of each layer and step. Steps with a prompt have more tokens
        than most."""
        totals = self.rank_tokens.sum((1, 2))
        steps = totals <= totals.median() if decodes_only else totals >= 0
        return work_of_slowest(self.rank_tokens[steps].flatten(0, 1))


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
    counts = [_slot_tokens(engine)]
    turn = 0
    try:
        engine.submit(requests)
        while True:
            start = time.perf_counter()
            if not engine.step():
                break
            step_s.append(time.perf_counter() - start)
            counts.append(_slot_tokens(engine))
            for output in engine.poll(0.0):
                texts[output.request_id] += output.token_ids
                if not turn and output.request_id.startswith(KINDS[1]):
                    turn = len(step_s) - 1
        eplb = parts.balancer.status()
    finally:
        parts.balancer.close()
        parts.dispatcher.destroy()
    # The last step is the sleep: it has no tokens.
    return RankRun(step_s[:-1], torch.stack(counts[:-1]).diff(dim=0), turn, texts, eplb)


def _slot_tokens(engine: Engine) -> torch.Tensor:
    """int64 ``[L]``"""
    return torch.stack([layer.slot_tokens.sum() for layer in engine._parts.decoder.moe_layers])


def _run(world: World, args: argparse.Namespace) -> None:
    """Rank 0 reports."""
    requests = make_requests(args.ep_size, args.requests, args.output_len)[world.rank]
    runs = []
    for turn in range(args.rounds):
        for arm in args.arms if turn % 2 == 0 else reversed(args.arms):
            found = world.gather(run_rank(config_of(arm, args), world, requests))
            runs.append(Run.of(arm, found))
    if world.rank == 0:
        _report(runs, args)


def summary(runs: Sequence[Run], base: Run, window: int) -> dict[str, Any]:
    """runs: of one arm; what is counted is the same in all, but for the steps in which experts
    move."""
    first = runs[0]
    balance = first.balance(window)
    turn = first.turn // window
    statuses = first.statuses
    return {
        "arm": first.arm,
        "num_steps": len(first.step_s),
        "turn_step": first.turn,
        "balancedness": float(balance.mean()),
        "balancedness_by_window": balance.tolist(),
        "balancedness_before_turn": float(balance[max(0, turn - 2) : turn].mean()),
        "balancedness_of_turn": float(balance[turn : turn + 2].mean()),
        "balancedness_at_end": float(balance[-3:-1].mean()),
        "saved": [1 - run.work() / base.work() for run in runs],
        "saved_in_decodes": [
            1 - run.work(decodes_only=True) / base.work(decodes_only=True) for run in runs
        ],
        "median_step_ms": [run.median_step_s * 1e3 for run in runs],
        "longest_stall_ms": [run.longest_stall_s * 1e3 for run in runs],
        "num_rebalances": [run.statuses[0].num_rebalances if statuses else 0 for run in runs],
        "bytes_moved": [sum(status.bytes_moved for status in run.statuses) for run in runs],
        "same_text": all(run.texts == base.texts for run in runs),
    }


def _report(runs: Sequence[Run], args: argparse.Namespace) -> None:
    by_arm = {arm: [run for run in runs if run.arm == arm] for arm in args.arms}
    base = by_arm[args.arms[0]][0]
    found = [summary(by_arm[arm], base, args.window) for arm in args.arms]
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(_overview(found), _over_time(found, args.window), sep="\n")
    report = {"bench": "eplb_live", "results": found} | vars(args)
    result = json.dumps(report, default=str)  # of files
    if args.plot is not None:
        from bench.eplb_live_plot import draw

        draw([by_arm[arm][0] for arm in args.arms], args.window, args.plot)
    if args.json is not None:
        args.json.write_text(result + "\n", encoding="utf-8")
    print(result)


def _overview(found: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="the first arm is the base; lists: one value per round")
    table.add_column("")
    for arm in found:
        table.add_column(f"EPLB {arm['arm']}", justify="right")

    def row(title: str, key: str, form: str) -> None:
        cells = []
        for arm in found:
            values = arm[key] if isinstance(arm[key], list) else [arm[key]]
            cells.append(", ".join(form.format(value) for value in values))
        table.add_row(title, *cells)

    row("steps", "num_steps", "{}")
    row("balancedness, mean", "balancedness", "{:.3f}")
    row("  end of verse", "balancedness_before_turn", "{:.3f}")
    row("  as code comes", "balancedness_of_turn", "{:.3f}")
    row("  end of code", "balancedness_at_end", "{:.3f}")
    row("tokens of slowest ranks saved", "saved", "{:+.1%}")
    row("  in steps without prompts", "saved_in_decodes", "{:+.1%}")
    row("median step, ms", "median_step_ms", "{:.1f}")
    row("longest stall, ms", "longest_stall_ms", "{:.1f}")
    row("re-placements", "num_rebalances", "{}")
    row("bytes moved", "bytes_moved", "{:,}")
    row("same text as the base", "same_text", "{}")
    return table


def _over_time(found: Sequence[dict[str, Any]], window: int) -> Table:
    table = Table("steps", title="balancedness over time: mean of the layers (worst layer)")
    for arm in found:
        table.add_column(f"EPLB {arm['arm']}", justify="right")
    windows = [arm["balancedness_by_window"] for arm in found]
    for index, rows in enumerate(zip(*windows, strict=True)):
        cells = [f"{statistics.fmean(row):.2f} ({min(row):.2f})" for row in rows]
        table.add_row(str(index * window), *cells)
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="moe-ep bench eplb-live", description=__doc__)
    parser.add_argument("--ep-size", type=int, default=4)
    parser.add_argument("--ep-num-redundant-experts", type=int, default=8, help="total")
    parser.add_argument("--window", type=int, default=40, help="steps between re-placements")
    parser.add_argument("--requests", type=int, default=64, help="of each kind, per rank")
    parser.add_argument("--batch", type=int, default=32, help="requests in a step, per rank")
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--arms", nargs="+", choices=(OFF, ON, BALANCED), default=[OFF, ON, BALANCED]
    )
    parser.add_argument("--json", type=Path, help="file for the JSON object")
    parser.add_argument("--plot", type=Path, help="file for the picture, .png or .svg")
    args = parser.parse_args(argv)
    run_ranks(args.ep_size, TIMEOUT_S, _run, args)


if __name__ == "__main__":
    main()
