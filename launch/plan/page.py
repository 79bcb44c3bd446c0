"""A plan, or advice, as a page for a terminal."""

from collections.abc import Iterable, Mapping

from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from launch.plan.advice import Advice, Goal, Option
from launch.plan.command import NO_WEIGHTS, has_weights, launch_command
from launch.plan.plan import Estimate, Plan
from launch.plan.question import Question
from launch.plan.topology import node_table, port_lines

BAR_WIDTH = 72
COLOURS = ("cyan", "blue", "green", "magenta", "yellow", "red", "white", "bright_black",
           "bright_cyan", "bright_green")  # fmt: skip
GIB = 2**30


def print_plan(console: Console, plan: Plan) -> None:
    deployment = plan.setting.deployment
    console.print(_head(plan), "", _memory(plan), "", _times(plan), "", node_table(deployment))
    console.print(*port_lines(deployment), "", sep="\n", markup=False)
    console.print(*(f"Note: {text}" for text in plan.warnings), sep="\n", markup=False)
    if plan.fits:
        _print_commands(console, {"": plan})


def _print_commands(console: Console, plans: Mapping[str, Plan]) -> None:
    """plans: by what is written before each command."""
    questions = {before: plan.setting.question for before, plan in plans.items()}
    if not all(has_weights(question.model) for question in questions.values()):
        console.print(f"Note: {NO_WEIGHTS}", markup=False)
    console.print()
    for before, question in questions.items():
        console.print(f"{before}{launch_command(question)}", markup=False, soft_wrap=True)


def _head(plan: Plan) -> RenderableType:
    verdict = Text("fits", "bold green") if plan.fits else Text("does not fit", "bold red")
    return Group(Text(title(plan)), Text.assemble(verdict, ", ", (_speed(plan), "bold")))


def title(plan: Plan) -> str:
    """What was asked, as it was understood."""
    q, d = plan.setting.question, plan.setting.deployment
    unit = "requests" if q.phase == "decode" else "prompts"
    line = (
        f"{q.model} on {d.ep_size} x {q.gpu} ({d.fabric.name}), {q.phase}:"
        f" {q.batch} {unit} per rank of {q.context} tokens, {d.num_slots} expert slots per rank,"
        f" imbalance {d.imbalance:.2f}, overlap {'on' if d.overlap else 'off'}"
    )
    if q.num_steps > 1:
        line += f"; {q.num_steps} steps of at most {q.step_tokens} tokens"
    return line


def _speed(plan: Plan) -> str:
    rate = f"{_estimate(plan.tokens_per_s_per_gpu, 0)} tokens/s per GPU"
    rate += f" and {plan.tokens_per_s_per_node.value:,.0f} per node"
    if plan.tpot_ms:
        return f"{rate}, TPOT {_estimate(plan.tpot_ms)} ms"
    assert plan.ttft_ms is not None
    load = plan.setting.question.prefill_load
    waiting = f"{plan.wait_ms:,.0f} ms of it waiting at a load of {load:.0%}"
    return f"{rate} when busy, TTFT {_estimate(plan.ttft_ms, 0)} ms, {waiting}"


def _estimate(estimate: Estimate, digits: int = 1) -> str:
    low, high = (f"{value:,.{digits}f}" for value in (estimate.low, estimate.high))
    return f"{estimate.value:,.{digits}f} ({low} to {high})"


def _short(estimate: Estimate, digits: int) -> str:
    return _estimate(estimate, digits).replace(" to ", "-")


def _memory(plan: Plan) -> RenderableType:
    memory, needed = plan.memory, plan.cache_tokens_needed
    usable, total = memory.usable_bytes / GIB, memory.total_bytes / GIB
    heading = f"Memory of one rank, {usable:.1f} of the card's {total:.1f} GiB"
    table = Table(title=heading, title_justify="left")
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
    if not plan.fits:
        lacking = needed * memory.cache_bytes_per_token - memory.headroom_bytes
        cache += f" {lacking / GIB:.1f} GiB are lacking."
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
    bar, legend, done = Text(), [], 0.0
    for index, (name, size) in enumerate(parts):
        colour = COLOURS[index % len(COLOURS)]
        left, done = round(BAR_WIDTH * done / total), done + size
        width = round(BAR_WIDTH * done / total) - left
        bar.append("█" * width, colour)
        if width:
            label = f"{name} {size / total:.0%}"
            legend.append(Text.assemble(("█ ", colour), label, no_wrap=True))
    return Group(bar, Columns(legend, padding=(0, 2)))


def print_advice(console: Console, question: Question, advice: Advice, goal: Goal) -> None:
    console.print(
        f"{question.model} on {goal.gpus} x {question.gpu}: prompts of {goal.input_len} tokens,"
        f" {goal.output_len} tokens of output, TTFT at most {goal.slo_ttft_ms:g} ms, TPOT at most"
        f" {goal.slo_tpot_ms:g} ms\n",
        markup=False,
    )
    table = Table(title=f"Best of {advice.num_candidates:,} candidates", title_justify="left",
                  box=box.SIMPLE_HEAD, pad_edge=False)  # fmt: skip
    table.add_column("req/s", justify="right")
    table.add_column("engines", no_wrap=True)
    table.add_column("ms (8 of 10 within)", no_wrap=True)
    table.add_column("limited by")
    for option in advice.options:
        _add_option(table, option)
    console.print(table if advice.options else table.title)
    for reason, count in sorted(advice.dropped.items(), key=lambda item: -item[1]):
        console.print(f"{count:,} candidates: {reason}", markup=False)
    if not advice.options:
        console.print("No candidate is left: relax a goal, or give more GPUs.")
        return
    best = advice.options[0]
    console.print(_assumptions(best), markup=False)
    _print_commands(console, {"prefill: ": best.prefill, "decode: ": best.decode})


def _add_option(table: Table, option: Option) -> None:
    """A line for prefill, one for decode."""
    prefill, decode = option.prefill, option.decode
    assert prefill.ttft_ms is not None
    assert decode.tpot_ms is not None
    rows = [
        ("P", option.num_prefill, prefill, f"TTFT {_short(prefill.ttft_ms, 0)}"),
        ("D", option.num_decode, decode, f"TPOT {_short(decode.tpot_ms, 1)}"),
    ]
    phase, limit = option.limited_by.split(": ")
    limits = [limit if name == phase else "" for name in ("prefill", "decode")]
    for index, ((letter, count, plan, time), reason) in enumerate(zip(rows, limits, strict=True)):
        rate = "" if index else f"{option.requests_per_s:.1f}"
        table.add_row(rate, f"{letter} {count} x {_engine(plan)}", time, reason)
    if option.spare:
        table.add_row("", f"{option.spare} GPUs unused", "", "")
    table.add_section()


def _assumptions(option: Option) -> str:
    load = option.prefill.setting.question.prefill_load
    return (
        f"\nP prefill, D decode, +n redundant experts, TBO two-batch overlap. Prefill engines are"
        f" {load:.0%} busy, and their prompts wait as in an M/D/1 queue. Caches are handed from"
        " prefill to decode in no time; this engine does not hand them over yet. Requests being"
        " decoded are half way through their output. Notes of each plan: moe-ep plan with its"
        " numbers.\n"
    )


def _engine(plan: Plan) -> str:
    q = plan.setting.question
    overlap = " TBO" if q.enable_two_batch_overlap else ""
    extra = f"+{q.ep_num_redundant_experts}" if q.ep_num_redundant_experts else ""
    size = f"batch {q.batch}" if q.phase == "decode" else f"{q.step_tokens / 1000:.3g}K tok"
    return f"EP{q.ep_size}{extra}, {size}{overlap}"
