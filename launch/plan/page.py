"""A plan, advice and a validation as a page for a terminal."""

from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from launch.plan.advice import Advice, Goal, launch_command
from launch.plan.plan import Estimate, Plan
from launch.plan.topology import node_table

BAR_WIDTH = 72
COLOURS = ("cyan", "blue", "green", "magenta", "yellow", "red", "white", "bright_black",
           "bright_cyan", "bright_green")  # fmt: skip
GIB = 2**30


def print_plan(console: Console, plan: Plan) -> None:
    console.print(_head(plan), "", _memory(plan), "", _times(plan), "", node_table(
        plan.setting.deployment), "")  # fmt: skip
    console.print(*(f"Note: {text}" for text in plan.warnings), sep="\n", markup=False)
    if plan.fits:
        console.print(f"\n{launch_command(plan)}", markup=False, soft_wrap=True)


def _head(plan: Plan) -> RenderableType:
    q, d = plan.setting.question, plan.setting.deployment
    unit = "requests" if q.phase == "decode" else "prompts"
    line = (
        f"{q.model} on {d.ep_size} x {q.gpu} ({d.fabric.name}), {q.phase}:"
        f" {q.batch} {unit} per rank of {q.context} tokens, {d.num_slots} expert slots per rank,"
        f" imbalance {d.imbalance:.2f}, overlap {'on' if d.overlap else 'off'}"
    )
    speed = f"{_estimate(plan.tokens_per_s_per_gpu, 0)} tokens/s per GPU, " + (
        f"TPOT {_estimate(plan.tpot_ms)} ms" if plan.tpot_ms
        else f"TTFT at least {_estimate(plan.step_ms, 0)} ms"
    )  # fmt: skip
    verdict = Text("fits", "bold green") if plan.fits else Text("does not fit", "bold red")
    return Group(Text(line), Text.assemble(verdict, ", ", (speed, "bold")))


def _estimate(estimate: Estimate, digits: int = 1) -> str:
    low, high = (f"{value:,.{digits}f}" for value in (estimate.low, estimate.high))
    return f"{estimate.value:,.{digits}f} ({low} to {high})"


def _memory(plan: Plan) -> RenderableType:
    memory, needed = plan.memory, plan.cache_tokens_needed
    table = Table(title=f"Memory of one rank, of {memory.total_bytes / GIB:.1f} GiB",
                  title_justify="left")  # fmt: skip
    for heading, side in (("part", "left"), ("GiB", "right"), ("bytes", "right"), ("", "left")):
        table.add_column(heading, justify="right" if side == "right" else "left")
    for part in memory.parts:
        kind = "counted" if part.is_exact else "estimated"
        table.add_row(part.name, f"{part.bytes / GIB:.2f}", f"{part.bytes:,}", kind)
    room = max(memory.headroom_bytes, 0)
    table.add_row("latent cache", f"{room / GIB:.2f}", f"{room:,}", "what is left", style="bold")
    cache = (
        f"Cache: {memory.cache_bytes_per_token:,} bytes per token, {memory.cache_tokens:,} tokens"
        f" fit, {needed:,} are needed."
    )
    segments = [(part.name, float(part.bytes)) for part in memory.parts]
    return Group(table, stacked_bar([*segments, ("latent cache", float(room))]), Text(cache))


def _times(plan: Plan) -> RenderableType:
    step = plan.step
    table = Table(title="One MoE layer", title_justify="left")
    for heading in ("stage", "us", "8 of 10 within", "share", "bound by"):
        table.add_column(heading, justify="left" if heading in ("stage", "bound by") else "right")
    for stage in plan.stages:
        us = stage.us
        within = f"{us.low:.0f} to {us.high:.0f}"
        table.add_row(stage.stage, f"{us.value:.1f}", within, f"{stage.share:.0%}", stage.bound)
    outside = ", ".join(f"{s} {cost.us / 1e3:.1f} ms" for s, cost in step.outside.items())
    lines = (
        f"Layer: {step.layer_us:,.0f} us, {step.exposed_us:,.0f} us of it waiting for an exchange;"
        f" mostly bound by {plan.bound}.",
        f"Step: {_estimate(plan.step_ms)} ms, of it {outside}.",
    )
    bar = stacked_bar([(stage.stage, stage.us.value) for stage in plan.stages])
    return Group(table, bar, *map(Text, lines))


def stacked_bar(segments: Iterable[tuple[str, float]]) -> RenderableType:
    """One line in as many colours as there are segments, and their names below."""
    parts = [(name, size) for name, size in segments if size > 0]
    total = sum(size for _, size in parts)
    bar, legend, done = Text(), Text(), 0.0
    for index, (name, size) in enumerate(parts):
        colour = COLOURS[index % len(COLOURS)]
        left, done = round(BAR_WIDTH * done / total), done + size
        width = round(BAR_WIDTH * done / total) - left
        bar.append("█" * width, colour)
        if width:
            legend.append("█ ", colour).append(f"{name} {size / total:.0%}  ")
    return Group(bar, legend)


def print_advice(console: Console, advice: Advice, goal: Goal) -> None:
    table = Table(title=f"Best of {advice.num_candidates} candidates for {goal.gpus} GPUs",
                  title_justify="left")  # fmt: skip
    for heading in (
        "requests/s",
        "prefill",
        "decode",
        "TTFT ms",
        "TPOT ms",
        "limited by",
        "unused",
    ):
        table.add_column(heading)
    for option in advice.options:
        prefill, decode = option.prefill, option.decode
        assert prefill.ttft_ms is not None
        assert decode.tpot_ms is not None
        table.add_row(
            f"{option.requests_per_s:.1f}",
            f"{option.num_prefill} x {_engine(prefill)}",
            f"{option.num_decode} x {_engine(decode)}",
            _estimate(prefill.ttft_ms, 0),
            _estimate(decode.tpot_ms),
            option.limited_by,
            str(option.spare),
        )
    console.print(table)
    for reason, count in sorted(advice.dropped.items(), key=lambda item: -item[1]):
        console.print(f"{count} candidates: {reason}", markup=False)
    if not advice.options:
        console.print("No candidate is left: relax a goal, or give more GPUs.")
        return
    best = advice.options[0]
    for name, plan in (("prefill", best.prefill), ("decode", best.decode)):
        console.print(f"{name}: {launch_command(plan)}", markup=False, soft_wrap=True)


def _engine(plan: Plan) -> str:
    q = plan.setting.question
    overlap = ", overlap" if q.enable_two_batch_overlap else ""
    return f"EP{q.ep_size} (+{q.ep_num_redundant_experts}), batch {q.batch}{overlap}"
