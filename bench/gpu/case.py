"""One kernel at one shape: what a case is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.gpu.costs import Cost


@dataclass(frozen=True)
class Sizes:
    """Of one model; those of DeepSeek-V3 unless said otherwise."""

    hidden: int = 7168
    intermediate: int = 2048
    num_experts: int = 256
    num_topk: int = 8
    num_groups: int = 8
    num_kept_groups: int = 4
    rank: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    softmax_scale: float = 192**-0.5


@dataclass(frozen=True)
class KernelCase:
    """calls: who computes it, by name; each returns its result. baseline: the one among them to
    which others are compared, a library where there is one. check: raises AssertionError for a
    wrong result."""

    kernel: str
    shape: dict[str, int]
    cost: Cost
    calls: dict[str, Callable[[], Any]]
    check: Callable[[Any], None]
    baseline: str | None = None
