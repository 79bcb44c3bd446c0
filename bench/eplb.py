"""Placing experts: time and balance, against the rule that DeepSeek published with EPLB.

``python -m bench.eplb``. Loads follow Zipf's law with noise, another order in each layer.
Balancedness is the mean over the maximum of the ranks' loads, mean and worst of the layers;
``allowed`` is what the placement's replica counts could reach at best. The published rule runs in
a plain loop of ours. The second table changes a placement when loads have drifted. Prints tables,
and one JSON object as the last line.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from bench import published_eplb
from bench.measure import Samples, measure_in_turns
from eplb import (
    Placement,
    balanced_shares,
    balancedness,
    count_moves,
    improve,
    load_bounds_like,
    rank_loads,
    rebalance,
    rebalance_experts,
    shared_slot_loads,
)

TABLE_WIDTH = 110  # columns; what the tables need when the output is not a terminal
NUM_TOKENS = 1e6  # (token, expert) pairs of a layer
MOST_WORSE = 1e-6  # share by which rounding may make an equal balance look worse


class Case(NamedTuple):
    """A cluster and a model, under the names of ``rebalance_experts``."""

    num_experts: int
    num_replicas: int
    num_groups: int
    num_nodes: int
    num_gpus: int


CASES = (
    Case(256, 288, 8, 4, 32),
    Case(256, 288, 8, 9, 72),
    Case(256, 288, 8, 18, 144),
    Case(384, 480, 1, 12, 96),
)


@dataclass(frozen=True)
class Row:
    """One way to place one case; ``allowed`` is None where two replicas share a GPU."""

    case: Case
    policy: str
    samples: Samples
    mean: float
    worst: float
    allowed: float | None


@dataclass(frozen=True)
class Change:
    """One way to change a placement. ``max_moves`` None: no limit. ``moved``: mean of layers."""

    case: Case
    policy: str
    max_moves: int | None
    seconds: float
    mean: float
    moved: float


def make_loads(num_layers: int, num_experts: int, skew: float, noise: float) -> torch.Tensor:
    """float64 ``[L, E]``: whole numbers that fall as rank ** -skew, times 1 - noise to 1 + noise,
    in another order in each layer."""
    ranks = torch.arange(1, num_experts + 1, dtype=torch.float64)
    loads = ranks**-skew * (1 + noise * (2 * torch.rand(num_layers, num_experts) - 1))
    order = torch.rand(num_layers, num_experts).argsort(1)
    loads = loads.gather(1, order)
    return (loads / loads.sum(1, keepdim=True) * NUM_TOKENS).round()


def measure_case(case: Case, loads: torch.Tensor, rounds: int) -> list[Row]:
    sizes = case[1:]
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "published": lambda: published_eplb.rebalance_experts(loads, *sizes)[0],
        "ours": lambda: rebalance_experts(loads, *sizes)[0],
    }
    if case.num_groups % case.num_nodes == 0:
        calls["ours, across nodes"] = lambda: (
            rebalance(
                loads, num_slots=case.num_replicas, num_ranks=case.num_gpus
            ).physical_to_logical
        )
    samples = measure_in_turns({name: [call] for name, call in calls.items()}, rounds=rounds)
    tables = {name: call() for name, call in calls.items()}
    published = _balance(tables.pop("published"), loads, case)
    rows = [Row(case, "published", samples["published"], *_summary(published), None)]
    for policy, table in tables.items():
        placement = Placement(table, case.num_experts, case.num_gpus)
        balance = _balance(table, loads, case)
        if (balance < published * (1 - MOST_WORSE)).any():
            raise SystemExit(f"{case}: worse than the published rule in places")
        allowed = loads.sum(1) / case.num_gpus / load_bounds_like(placement, loads)
        mean_allowed = float(allowed.mean())
        rows.append(Row(case, policy, samples[policy], *_summary(balance), mean_allowed))
    shares = partial(balanced_shares, placement, loads)
    split = measure_in_turns({"split": [shares]}, rounds=rounds)["split"]
    ranks = rank_loads(shared_slot_loads(loads, placement, shares()), case.num_gpus)
    summary = _summary(balancedness(ranks))
    return [*rows, Row(case, f"{policy}, uneven split", split, *summary, None)]


def measure_changes(case: Case, loads: torch.Tensor, drifted: torch.Tensor) -> list[Change]:
    """Placed for ``loads``, and changed for ``drifted``."""
    before = rebalance(loads, num_slots=case.num_replicas, num_ranks=case.num_gpus)
    anew = partial(rebalance, drifted, num_slots=case.num_replicas, num_ranks=case.num_gpus)
    ways: list[tuple[str, int | None, Callable[[], Placement]]] = [
        ("improve", limit, partial(improve, before, drifted, max_moves=limit))
        for limit in (0, 4, 16, 64, None)
    ]
    ways.append(("rebalance", None, anew))
    changes = []
    for policy, limit, call in ways:
        start = time.perf_counter()
        after = call()
        seconds = time.perf_counter() - start
        balance = _balance(after.physical_to_logical, drifted, case)
        moved = float(count_moves(before, after).between_ranks.double().mean())
        changes.append(Change(case, policy, limit, seconds, float(balance.mean()), moved))
    return changes


def _balance(table: torch.Tensor, loads: torch.Tensor, case: Case) -> torch.Tensor:
    """Balancedness ``[L]`` of ``physical_to_logical``, also where it is no legal placement."""
    counts = torch.zeros_like(loads).scatter_add_(1, table, torch.ones(table.shape).double())
    return balancedness(rank_loads((loads / counts).gather(1, table), case.num_gpus))


def _summary(balance: torch.Tensor) -> tuple[float, float]:
    return float(balance.mean()), float(balance.min())


def _print_rows(rows: list[Row], console: Console) -> None:
    columns = "experts", "slots", "GPUs", "nodes", "policy", "ms", "middle half", "mean", "worst"
    table = Table(*columns, "allowed", title="balancedness of a new placement")
    for row in rows:
        low, high = row.samples.quartiles
        table.add_row(
            *map(str, (*row.case[:2], row.case.num_gpus, row.case.num_nodes)),
            row.policy,
            f"{row.samples.median * 1e3:.1f}",
            f"{low * 1e3:.1f}-{high * 1e3:.1f}",
            f"{row.mean:.4f}",
            f"{row.worst:.4f}",
            "" if row.allowed is None else f"{row.allowed:.4f}",
        )
    console.print(table)


def _print_changes(changes: list[Change], console: Console) -> None:
    columns = "experts", "slots", "GPUs", "policy", "max moves", "ms", "mean", "experts moved"
    table = Table(*columns, title="balancedness after a change, loads having drifted")
    for change in changes:
        table.add_row(
            *map(str, (*change.case[:2], change.case.num_gpus)),
            change.policy,
            "" if change.max_moves is None else str(change.max_moves),
            f"{change.seconds * 1e3:.0f}",
            f"{change.mean:.4f}",
            f"{change.moved:.1f}",
        )
    console.print(table)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="moe-ep bench eplb", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--skew", type=float, default=0.9, help="Zipf's exponent")
    parser.add_argument("--noise", type=float, default=0.5, help="0 to 1, around Zipf's law")
    parser.add_argument("--drift", type=float, default=0.3, help="of the loads' logarithm")
    parser.add_argument("--rounds", type=int, default=5, help="samples")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, changes = [], []
    for case in CASES:
        loads = make_loads(args.layers, case.num_experts, args.skew, args.noise)
        rows += measure_case(case, loads, args.rounds)
        drifted = (loads * torch.exp(args.drift * torch.randn(loads.shape))).round()
        changes += measure_changes(case, loads, drifted)
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    _print_rows(rows, console)
    _print_changes(changes, console)
    results = {"rows": [asdict(row) for row in rows], "changes": [asdict(c) for c in changes]}
    print(json.dumps({"bench": "eplb", **vars(args)} | results))


if __name__ == "__main__":
    main()
