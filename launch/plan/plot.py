"""Predicted over published times as an SVG: one dot per record, a colour per source, both axes
logarithmic. Written by hand, as one picture is not worth a plotting library."""

import math
from collections.abc import Callable, Sequence
from html import escape

from launch.plan.validate import Outcome

SIZE, MARGIN, LEGEND = 560, 60, 190
COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8e44ad", "#e08e0b", "#16a2a2", "#7f5539", "#c2185b",
           "#5c6b73", "#3d348b")  # fmt: skip
UNITS_IN_US = {"us": 1.0, "ms": 1e3}


def svg(outcomes: Sequence[Outcome]) -> str:
    """Throughputs are drawn as the time of a token, in us."""
    points = [(o, *_times(o)) for o in outcomes]
    values = [value for _, x, y in points for value in (x, y)]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def place(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * (SIZE - 2 * MARGIN)

    groups = sorted({o.target.group for o in outcomes})
    parts = [_frame(low, high, place)]
    for o, x, y in points:
        colour = COLOURS[groups.index(o.target.group) % len(COLOURS)]
        parts.append(
            f'<circle cx="{MARGIN + place(x):.1f}" cy="{SIZE - MARGIN - place(y):.1f}" r="3"'
            f' fill="{colour}" fill-opacity="0.6"><title>{escape(o.target.what)}: {o.error:+.0%}'
            "</title></circle>"
        )
    for index, group in enumerate(groups):
        y = MARGIN + 18 * index
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<circle cx="{SIZE}" cy="{y}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{SIZE + 10}" y="{y + 4}">{escape(group)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIZE + LEGEND}" height="{SIZE}"'
    style = ' font-family="sans-serif" font-size="11">'
    return head + style + "\n".join(parts) + "</svg>\n"


def _times(outcome: Outcome) -> tuple[float, float]:
    target = outcome.target
    if target.unit.startswith("tok/s"):
        return 1e6 / target.published, 1e6 / outcome.predicted
    unit = UNITS_IN_US[target.unit]
    return target.published * unit, outcome.predicted * unit


def _frame(low: int, high: int, place: Callable[[float], float]) -> str:
    end = SIZE - MARGIN
    lines = [
        f'<rect x="{MARGIN}" y="{MARGIN}" width="{end - MARGIN}" height="{end - MARGIN}"'
        ' fill="none" stroke="#999"/>',
        f'<text x="{SIZE / 2}" y="{SIZE - 15}" text-anchor="middle">published, us</text>',
        f'<text transform="translate(18 {SIZE / 2}) rotate(-90)" text-anchor="middle">predicted'
        " without its source, us</text>",
    ]
    for factor, dash in ((1.0, ""), (1.15, "4"), (1 / 1.15, "4")):
        shift = place(10**low * factor)
        lines.append(
            f'<line x1="{MARGIN}" y1="{end - shift:.1f}" x2="{end}" y2="{MARGIN - shift:.1f}"'
            f' stroke="#999" stroke-dasharray="{dash}"/>'
        )
    for power in range(low, high + 1):
        at = place(10.0**power)
        lines.append(
            f'<text x="{MARGIN + at:.1f}" y="{end + 16}" text-anchor="middle">1e{power}</text>'
        )
        lines.append(
            f'<text x="{MARGIN - 6}" y="{end - at + 4:.1f}" text-anchor="end">1e{power}</text>'
        )
    return "\n".join(lines)
