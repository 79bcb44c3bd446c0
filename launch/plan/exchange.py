"""The time of dispatch and combine: bytes over the slowest link, and a latency that nodes add to.

Low latency sends one row per (token, expert), straight to the rank. Normal mode sends a token once
to each node that needs it and forwards it over NVLink. Times are in microseconds.
"""

import math
from dataclasses import dataclass

from launch.plan.cards import Card, Fabric
from launch.plan.kernels import Cost, Parameters
from moe_ep.config import ModelConfig

FP8_ROW_HEADER = 16  # bytes before a row's values in low-latency mode


@dataclass(frozen=True)
class Exchange:
    """Who talks to whom over what: FP8 on the way out, BF16 on the way back. imbalance: rows of
    the busiest rank over the mean."""

    card: Card
    fabric: Fabric
    model: ModelConfig
    ep_size: int
    imbalance: float = 1.0

    @property
    def num_near(self) -> int:
        """Ranks that NVLink reaches, this one included."""
        return min(self.ep_size, self.card.nvlink_domain)

    @property
    def num_domains(self) -> int:
        return -(-self.ep_size // self.num_near)

    def row_bytes(self, way: str) -> float:
        hidden = self.model.hidden_size
        if way == "combine":
            return 2.0 * hidden
        return hidden + 4 * hidden / 128 + FP8_ROW_HEADER

    def low_latency(self, p: Parameters, num_tokens: float, way: str) -> Cost:
        """way: ``dispatch`` or ``combine``, of num_tokens per rank."""
        rows = num_tokens * self.model.num_experts_per_tok * self.imbalance
        near = rows * (self.num_near - 1) / self.ep_size
        far = rows * (self.ep_size - self.num_near) / self.ep_size
        return self._time(p, "ll", way, near=near, far=far)

    def normal(self, p: Parameters, num_tokens: float, way: str) -> Cost:
        tokens = num_tokens * self.imbalance
        far = tokens * self._domains_hit() * (self.num_domains - 1) / self.num_domains
        near = tokens * self._ranks_hit() * (self.num_near - 1) / self.num_near
        return self._time(p, "normal", way, near=near, far=far)

    def _time(self, p: Parameters, mode: str, way: str, *, near: float, far: float) -> Cost:
        size = self.row_bytes(way)
        nvlink = near * size / (self.card.nvlink_bytes_per_s * p[f"{mode}_{way}_nvlink"]) * 1e6
        fabric = far * size / (self.fabric.bytes_per_s * p[f"{mode}_{way}_fabric"]) * 1e6
        hops = math.log2(self.num_domains)
        latency = p[f"{mode}_{way}_latency_us"] + hops * p[f"{mode}_hop_us"]
        busy = max(nvlink, fabric)
        bound = "latency" if latency > busy else "fabric" if fabric > nvlink else "nvlink"
        return Cost(latency + busy, bound)

    def _domains_hit(self) -> float:
        return _places_hit(self.model, self.num_domains)

    def _ranks_hit(self) -> float:
        return _places_hit(self.model, self.ep_size)


def _places_hit(model: ModelConfig, num_places: int) -> float:
    """Places of equal shares of the experts that one token needs, on average, under even routing.

    Where the gate keeps few groups, a place holds whole groups or parts of one, and a token chooses
    all its experts in the groups that it keeps.
    """
    kept = model.topk_group if model.topk_group < model.n_group else model.n_group
    groups, top_k = model.n_group, model.num_experts_per_tok
    if num_places >= groups:  # a place is a part of one group
        places = num_places * kept / groups
        return places * (1 - (1 - 1 / places) ** top_k)
    size = groups / num_places
    whole = round(size)
    hit = sum(
        math.comb(whole, j) * math.comb(groups - whole, kept - j) / math.comb(groups, kept)
        * (1 - (1 - j / kept) ** top_k)
        for j in range(max(0, kept - groups + whole), min(whole, kept) + 1)
    )  # fmt: skip
    return num_places * hit
