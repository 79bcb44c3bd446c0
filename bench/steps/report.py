"""From all ranks' samples to figures: percentiles, shares, ratios to the roofline, overhead.

Shape letters: I iterations, R ranks, L layers.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.steps.roofline import Ceilings, Cost
from bench.steps.run import RankResult, Sample
from moe_ep.engine.step_times import Kind, RankTimes, step_times
from moe_ep.progress import Stage
from moe_ep.recorder import STAGES

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Row:
    """One stage's work, skew or transfer, over all layers of a step. seconds: ``[R][I]``.

    share: of the steps' time. floor_s, limit: what the roofline allows, and by what; None where
    there is no floor.
    """

    stage: Stage
    kind: Kind
    seconds: list[list[float]]
    share: float
    floor_s: float | None
    limit: str | None

    @property
    def percentiles(self) -> list[float]:
        return [float(p) for p in np.percentile(self.seconds, PERCENTILES)]

    @property
    def slowest(self) -> tuple[int, float]:
        """The rank with the largest median, and that."""
        medians = [statistics.median(samples) for samples in self.seconds]
        rank = int(np.argmax(medians))
        return rank, medians[rank]

    @property
    def ratio(self) -> float | None:
        """The median over the floor."""
        return self.percentiles[0] / self.floor_s if self.floor_s else None

    def as_json(self) -> dict[str, Any]:
        rank, median = self.slowest
        return {
            "stage": str(self.stage),
            "kind": self.kind.name.lower(),
            **_named(self.percentiles),
            "slowest_rank": rank,
            "slowest_rank_p50": median,
            "share_of_step": self.share,
            "floor": self.floor_s,
            "limit": self.limit,
            "ratio_to_floor": self.ratio,
            "samples": self.seconds,
        }


@dataclass(frozen=True)
class ArmReport:
    """One engine's steps. steps: of each iteration all ranks' times, ``[I][R]``.

    wall_s: the recorded steps by another clock, bare_s: unrecorded ones; both ``[R][I]``, as is
    total_s, which contains the recorder's own work; recorder_s is the most that this takes of any
    rank, timed alone. layer_s: mean seconds ``[L + 1, stages,
    kinds]``, what is outside the layers last.
    """

    name: str
    steps: list[list[RankTimes]]
    wall_s: list[list[float]]
    total_s: list[list[float]]
    bare_s: list[list[float]]
    recorder_s: float
    rows: list[Row]
    layer_s: np.ndarray

    @property
    def median_s(self) -> float:
        return statistics.median(np.ravel(self.wall_s))

    @property
    def overhead(self) -> float:
        """How much longer a recorded step takes than the bare one next to it: the median."""
        return float(np.median(np.array(self.total_s) / np.array(self.bare_s))) - 1

    @property
    def covered(self) -> dict[str, float]:
        """The sum of a step's pieces over the step by another clock: least, median and most."""
        pieces = [[times.total_s for times in step] for step in self.steps]
        ratios = np.array(pieces) / np.array(self.wall_s).T
        return {
            "min": float(ratios.min()),
            "median": float(np.median(ratios)),
            "max": float(ratios.max()),
        }

    def exposed(self, *kinds: Kind) -> float:
        """The share of the steps' time that is skew or transfer."""
        return sum(row.share for row in self.rows if row.kind in kinds)

    @property
    def typical(self) -> list[RankTimes]:
        """The step whose time is the median one."""
        order = np.argsort(np.mean(self.wall_s, axis=0))
        return self.steps[order[len(order) // 2]]

    def as_json(self) -> dict[str, Any]:
        rank = int(np.argmax(np.median(self.wall_s, axis=1)))
        return {
            "name": self.name,
            "step": {
                **_named(np.percentile(self.wall_s, PERCENTILES).tolist()),
                "slowest_rank": rank,
                "slowest_rank_p50": float(np.median(self.wall_s[rank])),
                "samples": self.wall_s,
                "samples_with_recorder": self.total_s,
                "samples_bare": self.bare_s,
            },
            "exposed_communication": {
                "share_of_step": self.exposed(Kind.SKEW, Kind.TRANSFER),
                "skew": self.exposed(Kind.SKEW),
                "transfer": self.exposed(Kind.TRANSFER),
            },
            "pieces_over_step": self.covered,
            "overhead": self.overhead,
            "recorder_seconds": self.recorder_s,
            "stages": [row.as_json() for row in self.rows],
            "layers": _layers_json(self.layer_s),
        }


def arm_report(
    name: str,
    results: Sequence[RankResult],
    *,
    costs: Mapping[Stage, Cost],
    ceilings: Ceilings,
    num_layers: int,
) -> ArmReport:
    """results: of all ranks, in rank order."""
    recorded = [_of(result, name, is_recorded=True) for result in results]
    bare = [_of(result, name, is_recorded=False) for result in results]
    records = [[s.record for s in samples if s.record is not None] for samples in recorded]
    steps = [step_times(step) for step in zip(*records, strict=True)]
    tables = np.array([[times.table(num_layers) for times in step] for step in steps])
    return ArmReport(
        name=name,
        steps=steps,
        wall_s=[[s.step_s for s in samples] for samples in recorded],
        total_s=[[s.total_s for s in samples] for samples in recorded],
        bare_s=[[s.total_s for s in samples] for samples in bare],
        recorder_s=max(result.recorder_s for result in results),
        rows=_rows(tables.sum(axis=2), costs, ceilings),
        layer_s=tables.mean(axis=(0, 1)),
    )


def slowest_of(ceilings: Sequence[Ceilings]) -> Ceilings:
    """What every rank reaches while all are busy."""
    types = ceilings[0].flops_per_s
    return Ceilings(
        min(each.copy_bytes_per_s for each in ceilings),
        {name: min(each.flops_per_s[name] for each in ceilings) for name in types},
    )


def report_json(
    arms: Sequence[ArmReport], ceilings: Ceilings, run: Mapping[str, Any]
) -> dict[str, Any]:
    """See docs/step-time.md. run: what was measured."""
    return {
        "bench": "step_time",
        "schema": 1,
        "run": dict(run),
        "ceilings": asdict(ceilings),
        "arms": [arm.as_json() for arm in arms],
        "speed_up": speed_up(arms),
    }


def speed_up(arms: Sequence[ArmReport]) -> float | None:
    """Median step without overlap over the one with it; None when there is only one arm."""
    return arms[1].median_s / arms[0].median_s if len(arms) == 2 else None


def _of(result: RankResult, arm: str, *, is_recorded: bool) -> list[Sample]:
    return [s for s in result.samples if s.arm == arm and (s.record is not None) == is_recorded]


def _rows(seconds: np.ndarray, costs: Mapping[Stage, Cost], ceilings: Ceilings) -> list[Row]:
    """seconds: ``[I, R, stages, kinds]``. Stages that took no time have no row."""
    total = seconds.sum()
    rows = []
    for code, stage in enumerate(STAGES):
        for kind in Kind:
            of_kind = seconds[:, :, code, kind]
            if not of_kind.any():
                continue
            cost = None if kind is Kind.SKEW else costs.get(stage)
            floor, limit = (None, None) if cost is None else ceilings.floor(cost)
            share = float(of_kind.sum() / total)
            rows.append(Row(stage, kind, of_kind.T.tolist(), share, floor, limit))
    return rows


def _named(percentiles: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": value for p, value in zip(PERCENTILES, percentiles, strict=True)}


def _layers_json(layer_s: np.ndarray) -> list[dict[str, Any]]:
    """One entry per layer, stage and kind that took time; the last row is no layer."""
    return [
        {
            "layer": None if layer == len(layer_s) - 1 else int(layer),
            "stage": str(STAGES[code]),
            "kind": Kind(kind).name.lower(),
            "mean": float(layer_s[layer, code, kind]),
        }
        for layer, code, kind in np.argwhere(layer_s > 0)
    ]
