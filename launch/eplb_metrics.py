"""Prometheus metrics of re-placed experts; the names are the contract with dashboards."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Gauge

from eplb.status import EplbStatus
from moe_ep.engine.engine import RankStatus

# Fields of ``EplbStatus`` that every rank has its own value of, and those equal on all of them.
_PER_RANK = {
    "bytes_moved": ("bytes_received", "Bytes of experts that the rank has received"),
    "longest_stall_s": ("longest_stall_seconds", "Most that a step was held up by it"),
}
_SHARED = {
    "num_rebalances": ("rebalances", "Re-placements so far"),
    "num_skipped": ("skipped", "Windows after which nothing was moved"),
    "num_failures": ("failures", "Re-placements given up, in part or whole"),
    "layers_pending": ("layers_pending", "Layers of the running re-placement still to be switched"),
    "age_s": ("age_seconds", "Since the last re-placement"),
}
_RATIOS = {"estimated": "saved_estimated", "measured": "saved_measured"}
_STEPS = {"before": "step_s_before", "after": "step_s_after"}
_BALANCEDNESS = {
    "now": "balancedness",
    "expected": "balancedness_expected",
    "before": "balancedness_before",
    "after": "balancedness_after",
}


class EplbMetrics:
    """Gauges that exist from the first status with an account of it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}

    def set(self, ranks: Sequence[RankStatus]) -> None:
        accounts = [(rank.rank, rank.eplb) for rank in ranks if rank.eplb is not None]
        for rank, account in accounts:
            for field, (name, text) in _PER_RANK.items():
                self._set(name, text, getattr(account, field), rank=rank)
            alarm = account.alarm is not None
            self._set("alarm", "1 while experts do not move though they should", alarm, rank=rank)
        for _, account in accounts[:1]:
            for field, (name, text) in _SHARED.items():
                self._set(name, text, getattr(account, field))
            self._set_effect(account)

    def _set_effect(self, account: EplbStatus) -> None:
        for kind, field in _RATIOS.items():
            text = "Share of the slowest ranks' expert tokens that falls away"
            self._set("saved_ratio", text, getattr(account, field), kind=kind)
        for when, field in _STEPS.items():
            text = "Median seconds from step to step around the last measured re-placement"
            self._set("step_seconds", text, getattr(account, field), when=when)
        for when, field in _BALANCEDNESS.items():
            text = "Mean over maximum of the ranks' tokens, by MoE layer"
            values: Iterable[float] = getattr(account, field)
            for layer, value in enumerate(values):
                self._set("balancedness_ratio", text, value, when=when, layer=layer)

    def _set(self, name: str, text: str, value: float | None, **labels: object) -> None:
        if value is None:
            return
        if name not in self._gauges:
            full = f"moe_ep_eplb_{name}"
            self._gauges[name] = Gauge(full, text, list(labels), registry=self._registry)
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)
