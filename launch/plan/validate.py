"""``moe-ep plan --validate``: published against predicted, each source predicted without itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from launch.plan.kernels import Parameters
from launch.plan.parameters import Range, quantile, without
from launch.plan.targets import DECODE, EXCHANGE, KERNEL, PREFILL, Target, comparable

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
    return tuple(outcome(item, without(item.group)[item.family]) for item in comparable())


def outcome(item: Target, p: Parameters) -> Outcome:
    return Outcome(item, item.predict(p), math.expm1(log_ratio(item, p)))


def log_ratio(item: Target, p: Parameters) -> float:
    """Of predicted over published time; of a throughput, the other way around."""
    ratio = math.log(item.predict(p) / item.published)
    return -ratio if item.unit.startswith("tok/s") else ratio


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
