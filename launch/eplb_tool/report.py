"""A replay as a table for people, and as JSON."""

from typing import Any

from rich.console import Console
from rich.table import Table

from eplb.replay import PolicyReplay
from launch.eplb_tool.replay import Replayed

SHOWN_LAYERS = 64
TABLE_WIDTH = 110  # columns; what a table needs when the output is not a terminal
MIB = 2**20


def print_report(found: Replayed) -> None:
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    num_windows, num_layers, _ = found.policies[0].tokens.shape
    left_out = found.num_steps % found.window
    rest = f"; {left_out} steps at the end fill none" if left_out else ""
    console.print(
        f"{found.num_steps} steps in windows of {found.window}; {num_windows} windows are judged,"
        f" each under what the one before it taught{rest}",
        soft_wrap=True,
    )
    console.print(_summary(found), _layers(found), sep="\n")
    if num_layers > SHOWN_LAYERS:
        console.print(f"The first {SHOWN_LAYERS} of {num_layers} layers; --json has all.")
    console.print(str(found.verdict), style="bold", markup=False, soft_wrap=True)
    if found.verdict.flags:
        console.print(f"Start with: {found.verdict.flags}", markup=False, soft_wrap=True)


def _summary(found: Replayed) -> Table:
    """A column for each policy; rows that nothing is known for are left out."""
    table = Table(title="what each policy would have made of it")
    table.add_column("")
    for policy in found.policies:
        table.add_column(policy.name, justify="right")
    columns = [_figures(found, policy) for policy in found.policies]
    for name in columns[0]:
        values = [column[name] for column in columns]
        if any(values):
            table.add_row(name, *values)
    return table


def _figures(found: Replayed, policy: PolicyReplay) -> dict[str, str]:
    balance, base = policy.balancedness, found.policies[0]
    moved, between_nodes = (
        int(moves.sum()) for moves in (policy.moves, policy.moves_between_nodes)
    )
    layer_us = f"{found.layer_us[policy.name]:,.0f}" if found.layer_us else ""
    return {
        "balancedness": f"{float(balance.mean()):.3f}",
        "  of the worst layer": f"{float(balance.mean(0).min()):.3f}",
        "  of the worst window": f"{float(balance.mean(1).min()):.3f}",
        "tokens of the slowest ranks": "" if policy is base else f"{-policy.saved(base):+.1%}",
        "copies between nodes (estimated)": _copies(found, policy),
        "MoE layer, us (estimated)": layer_us,
        "experts moved, in all": f"{moved:,}",
        "  MiB": _mib(found, moved),
        "  MiB between nodes": _mib(found, between_nodes) if found.cluster.num_nodes > 1 else "",
        "redundant, MiB per rank": _mib(found, found.redundant_experts(policy)),
    }


def _copies(found: Replayed, policy: PolicyReplay) -> str:
    """Without the model nobody knows how many experts a token has."""
    base = found.policies[0]
    if policy is base or found.cluster.num_nodes == 1 or found.bytes_per_expert is None:
        return ""
    return f"{-policy.crossings_saved(base):+.1%}"


def _mib(found: Replayed, num_experts: int) -> str:
    if found.bytes_per_expert is None:
        return ""
    return f"{num_experts * found.bytes_per_expert / MIB:,.1f}"


def _layers(found: Replayed) -> Table:
    table = Table("layer", title="balancedness by layer (mean of the windows)")
    for policy in found.policies:
        table.add_column(policy.name, justify="right")
    rows = [policy.balancedness.mean(0)[:SHOWN_LAYERS].tolist() for policy in found.policies]
    for layer, values in enumerate(zip(*rows, strict=True)):
        table.add_row(str(layer), *(f"{value:.3f}" for value in values))
    return table


def as_json(found: Replayed) -> dict[str, Any]:
    cluster = found.cluster
    return {
        "version": 1,
        "ep_size": cluster.num_ranks,
        "num_redundant_experts": cluster.num_redundant,
        "num_nodes": cluster.num_nodes,
        "num_steps": found.num_steps,
        "window": found.window,
        "bytes_per_expert": found.bytes_per_expert,
        "policies": [_policy(found, policy) for policy in found.policies],
        "verdict": {
            "helps": found.verdict.helps,
            "text": str(found.verdict),
            "flags": found.verdict.flags,
        },
    }


def _policy(found: Replayed, policy: PolicyReplay) -> dict[str, Any]:
    """rank_tokens: windows, layers, ranks."""
    balance, size = policy.balancedness, found.bytes_per_expert
    return {
        "name": policy.name,
        "balancedness": float(balance.mean()),
        "balancedness_by_layer": balance.mean(0).tolist(),
        "balancedness_by_window": balance.mean(1).tolist(),
        "tokens_of_slowest": policy.work,
        "saved": policy.saved(found.policies[0]),
        "layer_us": found.layer_us.get(policy.name),
        "experts_moved": policy.moves.tolist(),
        "bytes_moved": None if size is None else (policy.moves * size).tolist(),
        "experts_moved_between_nodes": policy.moves_between_nodes.tolist(),
        "copies_between_nodes": None if size is None else policy.crossings.sum(1).tolist(),
        "redundant_bytes_per_rank": (
            None if size is None else found.redundant_experts(policy) * size
        ),
        "rank_tokens": policy.tokens.tolist(),
    }
