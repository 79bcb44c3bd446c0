"""Pictures: predicted over published times, and a plan's stages and memory as stacked bars."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch.plan.page import title
from launch.plan.parameters import ranges
from launch.plan.plan import Plan
from launch.plan.validate import KINDS, Outcome
from moe_ep.config import ConfigError, Problem

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNITS_IN_MS = {"us": 1e-3, "ms": 1.0}
GIB = 2**30


def draw_outcomes(outcomes: Sequence[Outcome], file: Path) -> None:
    """A panel per kind of record, a colour per source; grey is where 8 of 10 records lie. Raises
    ConfigError for a file that cannot be written."""
    figure = _figure(10, 10)
    sources = sorted({o.target.group for o in outcomes})
    for axes, kind in zip(figure.subplots(2, 2).flat, KINDS, strict=True):
        _panel(axes, kind, [o for o in outcomes if o.target.kind == kind], sources)
    _save(figure, file)


def _panel(axes: "Axes", kind: str, outcomes: Sequence[Outcome], sources: list[str]) -> None:
    points = [(*_times(o), o.target.group) for o in outcomes]
    values = [value for x, y, _ in points for value in (x, y)]
    ends = [min(values) / 1.3, max(values) * 1.3]
    within = ranges()[kind]
    # Published times lie between low and high times the prediction.
    axes.fill_between(ends, [x / within.high for x in ends], [x / within.low for x in ends],
                      color="0.9")  # fmt: skip
    axes.plot(ends, ends, color="0.5", linewidth=1)
    for index, source in enumerate(sources):
        mine = [(x, y) for x, y, group in points if group == source]
        if mine:
            x, y = zip(*mine, strict=True)
            axes.scatter(x, y, s=14, color=f"C{index}", label=source)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal",
             xlabel="published, ms (of a throughput, for 1,000 tokens of a GPU)",
             ylabel="predicted without its source, ms",
             title=f"{kind}: median error {within.median_error:.0%}")  # fmt: skip
    axes.legend(fontsize="small", loc="upper left")


def _times(outcome: Outcome) -> tuple[float, float]:
    """Published and predicted, in ms; of a throughput, for 1,000 tokens of a GPU."""
    target = outcome.target
    if target.unit.startswith("tok/s"):
        return 1e6 / target.published, 1e6 / outcome.predicted
    unit = UNITS_IN_MS[target.unit]
    return target.published * unit, outcome.predicted * unit


def draw_plan(plan: Plan, file: Path) -> None:
    """Raises ConfigError for a file that cannot be written."""
    figure = _figure(10, 4.5)
    figure.suptitle(title(plan), fontsize="small", wrap=True)
    above, below = figure.subplots(2, 1)
    stages = [(stage.stage, stage.us.value) for stage in plan.stages]
    parts = ", both micro-batches" if plan.setting.deployment.overlap else ""
    _stacked(above, stages, f"us of one MoE layer{parts}, as if nothing overlapped")
    memory = [(part.name, part.bytes / GIB) for part in plan.memory.parts]
    free = max(plan.memory.headroom_bytes, 0) / GIB
    _stacked(below, [*memory, ("latent cache", free)], "GiB of one rank")
    _save(figure, file)


def _stacked(axes: "Axes", segments: list[tuple[str, float]], label: str) -> None:
    left = 0.0
    for index, (name, size) in enumerate(segments):
        axes.barh(0, size, left=left, color=f"C{index}", hatch="//" if index > 9 else "",
                  label=f"{name} {size:,.1f}")  # fmt: skip
        left += size
    axes.set(xlabel=label, xlim=(0, left), yticks=[])
    axes.legend(fontsize="x-small", ncols=2, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: "Figure", file: Path) -> None:
    known = figure.canvas.get_supported_filetypes()
    if file.suffix.lstrip(".") not in known:
        names = ", ".join(f".{name}" for name in sorted(known))
        raise ConfigError(
            [Problem("plot", str(file), f"a name that ends in {names}", "Rename it.")]
        )
    try:
        figure.savefig(file)
    except OSError as error:
        problem = Problem("plot", str(file), "a file that can be written", f"{error.strerror}.")
        raise ConfigError([problem]) from error
