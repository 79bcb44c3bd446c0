"""Prometheus metrics of the HTTP service; the names are the contract with dashboards."""

import time
from collections.abc import Sequence

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from launch.eplb_metrics import EplbMetrics
from moe_ep.engine.engine import RankStatus
from moe_ep.engine.step_times import WAITS, Kind, RankTimes
from moe_ep.recorder import STAGES

# Seconds; from a decode step of a few ms to a queue of minutes.
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180)
# Seconds; from the norms of a small model's step to all of a large prefill.
STAGE_BUCKETS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1, 3)
SHARE_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)


class Metrics:
    """Counters of this process, and gauges that ``render`` sets from the ranks."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "moe_ep_requests", "HTTP requests by endpoint and status", ["endpoint", "status"],
            registry=self.registry,
        )  # fmt: skip
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests")
        self.cached_tokens = self._counter(
            "cached_prompt_tokens", "Prompt tokens that were not computed, as the cache knew them"
        )
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to first token")
        self.tpot = self._histogram("time_per_output_token_seconds", "Mean gap between tokens")
        self.step = self._histogram("step_seconds", "Recorded steps, per rank", STAGE_BUCKETS)
        self.stages = Histogram(
            "moe_ep_step_stage_seconds",
            "A stage's work, transfer or skew in one recorded step of one rank, all layers",
            ["stage", "kind"],
            buckets=STAGE_BUCKETS,
            registry=self.registry,
        )
        self.exposed = self._histogram(
            "step_exposed_communication_ratio",
            "Share of a recorded step that a rank waited for others",
            SHARE_BUCKETS,
        )
        self._eplb = EplbMetrics(self.registry)
        self._gauges = {
            "num_running": self._gauge("num_requests_running", "Requests taking part in steps"),
            "num_waiting": self._gauge("num_requests_waiting", "Requests waiting for a place"),
            "kv_blocks_used": self._gauge("kv_blocks_used", "Cache blocks in use"),
            "kv_blocks_total": self._gauge("kv_blocks_total", "Cache blocks there are"),
        }

    def render(self, ranks: Sequence[RankStatus]) -> bytes:
        """The text exposition; empty ``ranks`` leave the gauges as they were."""
        for status in ranks:
            for field, gauge in self._gauges.items():
                gauge.labels(rank=status.rank).set(getattr(status, field))
        self._eplb.set(ranks)
        return generate_latest(self.registry)

    def observe_step(self, ranks: Sequence[RankTimes]) -> None:
        """Count one recorded step of all ranks."""
        for times in ranks:
            self.step.observe(times.total_s)
            self.exposed.observe(times.exposed_share)
            seconds = times.table().sum(axis=0)  # [stages, kinds]
            for code in np.unique(times.record.stages):
                stage = STAGES[code]
                for kind in (Kind.SKEW, Kind.TRANSFER) if stage in WAITS else (Kind.WORK,):
                    labels = {"stage": stage.replace(" ", "_"), "kind": kind.name.lower()}
                    self.stages.labels(**labels).observe(seconds[code, kind])

    def clock(self) -> "TokenClock":
        return TokenClock(self)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"moe_ep_{name}", text, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float] = LATENCY_BUCKETS
    ) -> Histogram:
        return Histogram(f"moe_ep_{name}", text, buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"moe_ep_{name}", text, ["rank"], registry=self.registry)


class TokenClock:
    """Times one continuation: started when made, told of every arrival of tokens."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._first: float | None = None
        self._num_tokens = 0

    def tokens(self, count: int) -> None:
        """``count`` tokens have just arrived."""
        if count and self._first is None:
            self._first = time.perf_counter()
            self._metrics.ttft.observe(self._first - self._start)
        self._num_tokens += count
        self._metrics.generation_tokens.inc(count)

    def end(self) -> None:
        """The continuation is over, however it ended."""
        if self._first is not None and self._num_tokens > 1:
            seconds = time.perf_counter() - self._first
            self._metrics.tpot.observe(seconds / (self._num_tokens - 1))
