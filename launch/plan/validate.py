"""``moe-ep plan --validate``: published against predicted, each source predicted without itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from launch.plan.fit import comparable, fit, log_ratio
from launch.plan.parameters import Range, quantile
from launch.plan.targets import DECODE, EXCHANGE, KERNEL, PREFILL, Target

KINDS = (DECODE, PREFILL, KERNEL, EXCHANGE)


@dataclass(frozen=True)
class Outcome:
    """error: of the predicted time relative to the published one, 0.1 for 10 % too slow."""

    target: Target
    predicted: float
    error: float


@cache
def leave_one_source_out() -> tuple[Outcome, ...]:
    """Every comparable record, predicted by a fit that has not seen any record of its source."""
    targets = comparable()
    outcomes = []
    for group in sorted({item.group for item in targets}):
        parameters = fit(item for item in targets if item.group != group)
        outcomes += [_outcome(item, parameters) for item in targets if item.group == group]
    return tuple(outcomes)


def _outcome(item: Target, parameters: dict[str, dict[str, float]]) -> Outcome:
    p = parameters[item.family]
    return Outcome(item, item.predict(p), math.expm1(log_ratio(item, p)))


def median_error(outcomes: Sequence[Outcome]) -> float:
    return quantile([abs(outcome.error) for outcome in outcomes], 0.5)


def error_range(outcomes: Sequence[Outcome]) -> Range:
    """Of published over predicted times."""
    ratios = [1 / (1 + outcome.error) for outcome in outcomes]
    return Range(
        low=float(f"{quantile(ratios, 0.1):.4g}"),
        high=float(f"{quantile(ratios, 0.9):.4g}"),
        median_error=float(f"{median_error(outcomes):.4g}"),
        count=len(ratios),
    )


def ranges() -> dict[str, Range]:
    outcomes = leave_one_source_out()
    return {
        kind: error_range([item for item in outcomes if item.target.kind == kind]) for kind in KINDS
    }
