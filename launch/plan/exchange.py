"""The time of dispatch and combine: bytes over the slowest link, and a latency that nodes add to.

Low latency sends one row per (token, expert), straight to the rank. Normal mode sends a token once
to each node that needs it and forwards it over NVLink. Times are in microseconds.
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import compress, product

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
        domains, ranks = (places_hit(self.model, n) for n in (self.num_domains, self.ep_size))
        far = tokens * domains * (self.num_domains - 1) / self.num_domains
        near = tokens * ranks * (self.num_near - 1) / self.num_near
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


def places_hit(model: ModelConfig, num_places: int) -> float:
    """Places of equal shares of the experts that one token needs, on average.

    A token keeps some groups, all sets of them alike, and takes each of its experts from any of
    these. That is 9 % less than what an even gate needs, at most: it keeps the groups with its best
    two experts, and never takes an expert twice. Fitted shares of the links make up for it.
    """
    return _hit(num_places, *model.router_groups, model.num_experts_per_tok)


@cache
def _hit(num_places: int, groups: int, kept: int, top_k: int) -> float:
    return sum(
        1 - _missed(_parts(place, num_places, groups), num_places, groups, kept, top_k)
        for place in range(num_places)
    )


def _parts(place: int, num_places: int, groups: int) -> list[int]:
    """Of each group that a place has experts of, how many of its ``num_places`` equal parts."""
    start, end = place * groups, (place + 1) * groups
    overlaps = (
        min(end, (group + 1) * num_places) - max(start, group * num_places)
        for group in range(groups)
    )
    return [overlap for overlap in overlaps if overlap > 0]


def _missed(parts: list[int], num_places: int, groups: int, kept: int, top_k: int) -> float:
    """Chance that none of a token's experts is in a place with these parts of groups."""
    total = 0.0
    for is_kept in product((False, True), repeat=len(parts)):
        others = kept - sum(is_kept)
        if 0 <= others <= groups - len(parts):
            chance = math.comb(groups - len(parts), others) / math.comb(groups, kept)
            share = sum(compress(parts, is_kept)) / (kept * num_places)
            total += chance * (1 - share) ** top_k
    return total
