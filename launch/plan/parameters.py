"""The fitted parameters and the ranges of their errors, as ``fit`` stored them."""

import json
import math
from dataclasses import dataclass
from functools import cache

from launch.plan.cards import DATA

FILE = DATA / "parameters.json"

MEANING = (
    {
        "launch_us": "start and end of a kernel that multiplies, us",
        "small_launch_us": "the same for one that only moves data, us",
        "gemm_prologue_k": "inner dimension that filling a tile's pipeline costs",
        "gemm_sm_tflops": "other units of an SM, in TFLOPS of the products that they serve",
        "gemm_memory": "share of the memory bandwidth that a product reaches",
        "elementwise_memory": "the same for kernels that only move data",
        "mla_sm_tflops": "as gemm_sm_tflops, absorbed attention",
        "mla_launch_us": "start, schedule and final reduction of attention, us",
        "prefill_sm_tflops": "as gemm_sm_tflops, expanded attention",
        "decode_inflation": "layers of a decode step in a service over the sum of their kernels",
        "prefill_inflation": "the same in prefill",
    }
    | {
        f"{mode}_{way}_{what}": f"{mode} {way}: {text}"
        for mode in ("ll", "normal")
        for way in ("dispatch", "combine")
        for what, text in (
            ("latency_us", "time without bytes, us"),
            ("nvlink", "share of NVLink's peak"),
            ("fabric", "share of the fabric's peak"),
        )
    }
    | {f"{mode}_hop_us": f"{mode}: per doubling of the nodes, us" for mode in ("ll", "normal")}
)


@dataclass(frozen=True)
class Range:
    """How published times compare with predictions made without their source: 10 % of them were
    below ``low`` times the prediction, 10 % above ``high`` times. count: of records."""

    low: float
    high: float
    median_error: float
    count: int

    def around(self, value: float) -> tuple[float, float]:
        return value * self.low, value * self.high


@cache
def family(name: str) -> dict[str, float]:
    values: dict[str, float] = _stored()["families"][name]
    return values


def without(source: str) -> dict[str, dict[str, float]]:
    """By family, from a fit that has seen no record of this source."""
    values: dict[str, dict[str, float]] = _stored()["without"][source]
    return values


@cache
def ranges() -> dict[str, Range]:
    """By kind of record: ``kernel``, ``exchange``, ``decode``, ``prefill``."""
    return {kind: Range(**values) for kind, values in _stored()["ranges"].items()}


def quantile(values: list[float], share: float) -> float:
    """Linear between order statistics."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    left = math.floor(place)
    right = min(left + 1, len(ordered) - 1)
    return ordered[left] + (place - left) * (ordered[right] - ordered[left])


@cache
def _stored() -> dict[str, dict]:
    data: dict[str, dict] = json.loads(FILE.read_text(encoding="utf-8"))
    return data
