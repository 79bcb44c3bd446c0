"""The report as tables for a terminal."""

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.steps.report import PERCENTILES, ArmReport, Row, speed_up
from bench.steps.roofline import Ceilings
from moe_ep.engine.step_times import Kind

WIDTH = 128  # columns; what the table needs when the output is not a terminal


def show(arms: Sequence[ArmReport], ceilings: Ceilings, console: Console) -> None:
    """One table per engine, what does not fit into it below."""
    rates = ", ".join(f"{v / 1e9:,.0f} GFLOP/s in {k}" for k, v in ceilings.flops_per_s.items())
    copy = ceilings.copy_bytes_per_s / 1e9
    console.print(f"ceilings, all ranks at once: copy {copy:,.1f} GB/s, product {rates}")
    for arm in arms:
        console.print(_table(arm), *_notes(arm), sep="\n")
    if (factor := speed_up(arms)) is not None:
        console.print(f"overlap: {factor:.2f}x the speed without, medians of one run")


def _table(arm: ArmReport) -> Table:
    table = Table(title=f"{arm.name}: milliseconds of a step, all layers together")
    table.add_column("stage", no_wrap=True)
    table.add_column("what")
    for name in (*(f"p{p}" for p in PERCENTILES), "slowest rank", "share", "floor", "x floor"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by")
    for row in arm.rows:
        table.add_row(*_cells(row))
    rank = int(np.argmax(np.median(arm.wall_s, axis=1)))
    times = [_ms(value) for value in np.percentile(arm.wall_s, PERCENTILES)]
    slowest = f"{_ms(float(np.median(arm.wall_s[rank])))} (r{rank})"
    table.add_section()
    table.add_row("step", "", *times, slowest, "100.0%", "", "", "")
    return table


def _cells(row: Row) -> list[str]:
    rank, median = row.slowest
    floor, ratio = row.floor_s, row.ratio
    return [
        row.stage,
        row.kind.name.lower(),
        *(_ms(value) for value in row.percentiles),
        f"{_ms(median)} (r{rank})",
        f"{row.share:.1%}",
        "" if floor is None else _ms(floor),
        "" if ratio is None else f"{ratio:,.1f}",
        row.limit or "",
    ]


def _notes(arm: ArmReport) -> list[str]:
    covered = arm.covered
    skew, transfer = arm.exposed(Kind.SKEW), arm.exposed(Kind.TRANSFER)
    return [
        f"exposed communication: {skew + transfer:.1%} of the step ({skew:.1%} skew,"
        f" {transfer:.1%} transfer)",
        f"the pieces are {covered['median']:.2%} of a step as another clock has it (median;"
        f" {covered['min']:.2%} to {covered['max']:.2%})",
        f"recording: a step takes {arm.overhead:+.2%} of the one without next to it (median);"
        f" the recorder alone takes {arm.recorder_s / arm.median_s:.2%} of a step",
        "",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"
