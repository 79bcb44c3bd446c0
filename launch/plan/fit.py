"""Fits the model's parameters to published measurements; ``python -m launch.plan.fit`` stores them.

Three blocks, one after the other: kernels, exchanges, and what a whole step adds. A block sees only
records of its own kind. A parameter without records stays at its prior; Blackwell's kernels start
from Hopper's. Residuals are logarithms of predicted over published times. Needs SciPy, which is
installed for development only: a plan reads what is stored.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from launch.plan.parameters import FILE
from launch.plan.targets import DECODE, EXCHANGE, KERNEL, PREFILL, Target, comparable
from launch.plan.validate import KINDS, error_range, log_ratio, outcome

FAMILIES = ("hopper", "blackwell")
# A prior may be off by a factor of 2 where a table as a whole may be off by 15 %: 0.15 / ln 2.
PRIOR_WEIGHT = 0.2
# Where a robust loss turns from squares to distances. Most records agree within a tenth; one that
# does not is another system, and must not rule. (docs/plan.md says what other scales give.)
SCALE = 0.1
# Shares of a peak stay below 1.
SHARES = ("gemm_memory", "elementwise_memory")
CEILING_WEIGHT = 5.0

# Guesses to start from, for parameters without records too; ``parameters.MEANING`` has the units.
KERNEL_PRIORS = {
    "launch_us": 3.0,
    "small_launch_us": 2.0,
    "gemm_prologue_k": 450.0,
    "gemm_sm_tflops": 45.0,
    "gemm_memory": 0.85,
    "elementwise_memory": 0.6,
    "mla_sm_tflops": 13.0,
    "mla_launch_us": 8.0,
    "prefill_sm_tflops": 20.0,
}
EXCHANGE_PRIORS = {
    f"{mode}_{way}_{what}": value
    for mode, latency in (("ll", 14.0), ("normal", 80.0))
    for way in ("dispatch", "combine")
    for what, value in (("latency_us", latency), ("nvlink", 0.7), ("fabric", 0.9))
} | {"ll_hop_us": 4.0, "normal_hop_us": 20.0}
STEP_PRIORS = {"decode_inflation": 1.05, "prefill_inflation": 1.2}

Family = dict[str, float]


def fit(targets: Iterable[Target]) -> dict[str, Family]:
    """Parameters of every family from these records and nothing else."""
    targets = tuple(targets)
    result: dict[str, Family] = {}
    for family in FAMILIES:
        prior = result.get("hopper", KERNEL_PRIORS | EXCHANGE_PRIORS)
        of_family = [item for item in targets if item.family == family]
        fitted: Family = {}
        for names, kind in ((tuple(KERNEL_PRIORS), KERNEL), (tuple(EXCHANGE_PRIORS), EXCHANGE)):
            chosen = tuple(item for item in of_family if item.kind == kind)
            start = tuple(prior[name] for name in names)
            fitted |= dict(zip(names, _kernel_block(names, start, chosen), strict=True))
        result[family] = fitted
    steps = [item for item in targets if item.kind in (DECODE, PREFILL)]
    shared = _fitted(STEP_PRIORS, steps, result)
    return {family: _rounded(p | shared) for family, p in result.items()}


@cache
def _kernel_block(
    names: tuple[str, ...], start: tuple[float, ...], targets: tuple[Target, ...]
) -> tuple[float, ...]:
    """Of one family. Leaving out a source that has no record of a kind asks for the same twice."""
    prior = dict(zip(names, start, strict=True))
    return tuple(_fitted(prior, targets, {family: {} for family in FAMILIES}).values())


def _fitted(prior: Family, targets: Sequence[Target], others: dict[str, Family]) -> Family:
    """The parameters of ``prior`` fitted to the targets; others: what else each family needs."""
    if not targets:
        return prior
    names, start = list(prior), np.log(list(prior.values()))
    is_share = np.array([name in SHARES or name.endswith(("_nvlink", "_fabric")) for name in names])
    rows = Counter(item.table for item in targets)
    weights = np.array([rows[item.table] ** -0.5 for item in targets])

    def residuals(x: np.ndarray) -> np.ndarray:
        trial = dict(zip(names, np.exp(x).tolist(), strict=True))
        errors = [log_ratio(item, others[item.family] | trial) for item in targets]
        above_one = CEILING_WEIGHT * np.maximum(x, 0.0) * is_share
        pulls = PRIOR_WEIGHT * (x - start)
        return np.concatenate([weights * np.array(errors), pulls, above_one])

    found = least_squares(residuals, start, loss="soft_l1", f_scale=SCALE)
    return dict(zip(names, np.exp(found.x).tolist(), strict=True))


def _rounded(values: Family) -> Family:
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def stored() -> dict[str, Any]:
    """What ``data/parameters.json`` holds: the fit to all records, the fits that had to do without
    one source, and how far those were off on it."""
    targets = comparable()
    groups = sorted({item.group for item in targets})
    without = {group: fit(t for t in targets if t.group != group) for group in groups}
    outcomes = [outcome(item, without[item.group][item.family]) for item in targets]
    ranges = {
        kind: asdict(error_range([o for o in outcomes if o.target.kind == kind])) for kind in KINDS
    }
    return {"families": fit(targets), "without": without, "ranges": ranges}


if __name__ == "__main__":
    FILE.write_text(json.dumps(stored(), indent=1) + "\n", encoding="utf-8")
