"""Experts re-placed under a real service's steps, when the text turns from verse to code.

``python -m bench.eplb_live``. The demo model on ranks of one thread each: every rank's queue holds
requests that continue verse and, behind them, as many that continue code; so the experts in demand
change in mid-run. Engines without EPLB (and without redundant experts), with it, and with balanced
dispatch, too, take turns, all over the same requests: steps are the same in all, and texts must be,
in float32. Where ranks share cores, the time of a step tells of stalls more than of balance. So of
each layer and step what counts is the slowest rank: the tokens that its experts got, and the CPU
time that they took, which others' use of the core does not change.

Prints tables, and one JSON object last.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.eplb_live_run import (
    BALANCED,
    OFF,
    ON,
    TIMEOUT_S,
    Run,
    config_of,
    make_requests,
    run_rank,
)
from bench.ranks import run_ranks
from moe_ep.engine.world import World

TABLE_WIDTH = 110


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


def summary(runs: Sequence[Run], bases: Sequence[Run], window: int) -> dict[str, Any]:
    """runs: of one arm, each with the base of its round; tokens are the same in all, but for the
    steps in which experts move."""
    first = runs[0]
    balance = first.balance(window)
    turn = first.turn // window
    statuses = first.statuses
    pairs = list(zip(runs, bases, strict=True))
    saved, in_decodes = (
        list(zip(*(a.saved(b, decodes_only=only) for a, b in pairs), strict=True))
        for only in (False, True)
    )
    return {
        "arm": first.arm,
        "num_steps": len(first.step_s),
        "turn_step": first.turn,
        "balancedness": float(balance.mean()),
        "balancedness_by_window": balance.tolist(),
        "balancedness_before_turn": float(balance[max(0, turn - 2) : turn].mean()),
        "balancedness_of_turn": float(balance[turn : turn + 2].mean()),
        "balancedness_at_end": float(balance[-3:-1].mean()),
        "tokens_saved": saved[0],
        "expert_time_saved": saved[1],
        "tokens_saved_in_decodes": in_decodes[0],
        "expert_time_saved_in_decodes": in_decodes[1],
        "median_step_ms": [run.median_step_s * 1e3 for run in runs],
        "longest_stall_ms": [run.longest_stall_s * 1e3 for run in runs],
        "num_rebalances": [run.statuses[0].num_rebalances if statuses else 0 for run in runs],
        "bytes_moved": [sum(status.bytes_moved for status in run.statuses) for run in runs],
        "same_text": all(run.texts == base.texts for run, base in pairs),
    }


def _report(runs: Sequence[Run], args: argparse.Namespace) -> None:
    by_arm = {arm: [run for run in runs if run.arm == arm] for arm in args.arms}
    bases = by_arm[args.arms[0]]
    found = [summary(by_arm[arm], bases, args.window) for arm in args.arms]
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
            values = arm[key] if isinstance(arm[key], list | tuple) else [arm[key]]
            cells.append(", ".join(form.format(value) for value in values))
        table.add_row(title, *cells)

    row("steps", "num_steps", "{}")
    row("balancedness, mean", "balancedness", "{:.3f}")
    row("  end of verse", "balancedness_before_turn", "{:.3f}")
    row("  as code comes", "balancedness_of_turn", "{:.3f}")
    row("  end of code", "balancedness_at_end", "{:.3f}")
    row("tokens of slowest ranks saved", "tokens_saved", "{:+.1%}")
    row("  in steps without prompts", "tokens_saved_in_decodes", "{:+.1%}")
    row("expert time of slowest ranks saved", "expert_time_saved", "{:+.1%}")
    row("  in steps without prompts", "expert_time_saved_in_decodes", "{:+.1%}")
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
