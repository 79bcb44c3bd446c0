"""Steps as pictures: each layer as a stacked bar, and a stretch of a step over time.

matplotlib is imported when a plot is drawn.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.steps.report import ArmReport
from bench.steps.trace import flights
from moe_ep.engine.step_times import Kind, RankTimes
from moe_ep.progress import Stage
from moe_ep.recorder import STAGES

SHOWN_LAYERS = 2  # of the timeline: what fits a page
_WAITS = {Kind.SKEW: ("waits: skew", "#d62728"), Kind.TRANSFER: ("waits: transfer", "#ff9896")}
_REST = ("everything else", "#bbbbbb")
_FLIGHT = ("in flight", "#666666")
_COLOURS = {
    Stage.ATTENTION_PROJECTIONS: "#1f77b4",
    Stage.ATTENTION_CORE: "#17becf",
    Stage.ATTENTION_OUTPUT: "#aec7e8",
    Stage.DENSE_MLP: "#9467bd",
    Stage.GATE: "#e377c2",
    Stage.DISPATCH_SEND: "#bcbd22",
    Stage.SHARED_EXPERT: "#c5b0d5",
    Stage.DISPATCH_LAYOUT: "#98df8a",
    Stage.EXPERTS: "#2ca02c",
    Stage.COMBINE_SEND: "#dbdb8d",
    Stage.COMBINE_SUMS: "#c49c94",
    Stage.NORMS: "#8c564b",
}


def draw(arms: Sequence[ArmReport], path: Path) -> None:
    """Write a PNG: a column for each engine."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9 * len(arms), 10), layout="constrained")
    bars, lines = figure.subplots(2, len(arms), squeeze=False)
    highest = max(arm.layer_s.sum(axis=(1, 2)).max() for arm in arms)
    for arm, bar, line in zip(arms, bars, lines, strict=True):
        _draw_layers(bar, arm)
        _draw_timeline(line, arm.typical)
        bar.set_ylim(0, 1.05e3 * highest)
        bar.set_title(f"{arm.name}: mean of all steps and ranks, by layer")
        line.set_title("the first MoE layers of a step of median length")
    _save(figure, path)


def draw_timelines(steps: Mapping[str, Sequence[RankTimes]], path: Path) -> None:
    """Write a PNG: by name, the first MoE layers of one step of all ranks, under each other and to
    one scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5 * len(steps)), layout="constrained")
    lines = figure.subplots(len(steps), 1, squeeze=False)[:, 0]
    for (name, ranks), line in zip(steps.items(), lines, strict=True):
        _draw_timeline(line, ranks)
        line.set_title(name)
    longest = max(line.get_xlim()[1] for line in lines)
    for line in lines:
        line.set_xlim(0, longest)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    from matplotlib.patches import Patch

    entries = [(str(stage), colour) for stage, colour in _COLOURS.items()]
    entries += [*_WAITS.values(), _REST, _FLIGHT]
    patches = [Patch(color=colour, label=label) for label, colour in entries]
    figure.legend(handles=patches, loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=100)


def _look(stage: Stage, kind: Kind) -> tuple[str, str]:
    """Label and colour."""
    if kind is not Kind.WORK:
        return _WAITS[kind]
    return (str(stage), _COLOURS[stage]) if stage in _COLOURS else _REST


def _draw_layers(axes: Any, arm: ArmReport) -> None:
    millis = arm.layer_s * 1e3  # the last row is what is outside the layers
    bottom = np.zeros(len(millis))
    for code, stage in enumerate(STAGES):
        for kind in Kind:
            part = millis[:, code, kind]
            if part.any():
                axes.bar(range(len(millis)), part, bottom=bottom, color=_look(stage, kind)[1])
                bottom += part
    axes.set_xlabel(f"layer; {len(millis) - 1} is what is outside the layers")
    axes.set_ylabel("ms")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_timeline(axes: Any, ranks: Sequence[RankTimes]) -> None:
    """Two rows for each micro-batch of a rank: what is computed, and what is on its way."""
    begin, end = _window(ranks)
    rows: list[str] = []
    for rank, times in enumerate(ranks):
        for micro_batch in np.unique(times.record.micro_batches):
            _draw_pieces(axes, times, int(micro_batch), len(rows), begin)
            rows.append(f"rank {rank}, batch {micro_batch}")
            _draw_flights(axes, times, int(micro_batch), len(rows), begin)
            rows.append("in flight")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, (end - begin) / 1e6)
    axes.set_xlabel("ms")


def _window(ranks: Sequence[RankTimes]) -> tuple[int, int]:
    """From the first to the end of the last of some layers, over all ranks: those with experts,
    where there are such. The whole step when it shows no layers, as a replayed graph."""
    records = [times.record for times in ranks]
    sends = records[0].stages == STAGES.index(Stage.DISPATCH_SEND)
    first = int(records[0].layers[sends].min()) if sends.any() else 0
    inside = [(r.layers >= first) & (r.layers < first + SHOWN_LAYERS) for r in records]
    if not all(pieces.any() for pieces in inside):
        inside = [np.ones(len(r.stages), dtype=bool) for r in records]
    begins = [r.bounds_ns[:-1][pieces].min() for r, pieces in zip(records, inside, strict=True)]
    ends = [r.bounds_ns[1:][pieces].max() for r, pieces in zip(records, inside, strict=True)]
    return int(min(begins)), int(max(ends))


def _draw_pieces(axes: Any, times: RankTimes, micro_batch: int, row: int, zero: int) -> None:
    record, waits = times.record, times.is_wait
    for index in np.flatnonzero(record.micro_batches == micro_batch):
        stage = STAGES[record.stages[index]]
        start, stop = ((int(b) - zero) / 1e6 for b in record.bounds_ns[index : index + 2])
        arrived = start + int(times.skew_ns[index]) / 1e6
        rest = Kind.TRANSFER if waits[index] else Kind.WORK
        colours = [_look(stage, kind)[1] for kind in (Kind.SKEW, rest)]
        spans = [(start, arrived - start), (arrived, stop - arrived)]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colours)


def _draw_flights(axes: Any, times: RankTimes, micro_batch: int, row: int, zero: int) -> None:
    spans = [
        ((flight.start_ns - zero) / 1e6, (flight.stop_ns - flight.start_ns) / 1e6)
        for flight in flights(times)
        if flight.micro_batch == micro_batch
    ]
    axes.broken_barh(spans, (row - 0.25, 0.5), facecolors=_FLIGHT[1])
