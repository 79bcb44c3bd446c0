"""Data sheets of cards and fabrics, from ``data/``; every entry names its source."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Fabric:
    """What joins nodes. bytes_per_s: of one GPU, one way."""

    name: str
    bytes_per_s: float
    source: str


@dataclass(frozen=True)
class Card:
    """One GPU. Rates are peaks of dense products; links are counted one way.

    family: cards of one share fitted efficiencies. nvlink_domain: GPUs that reach each other over
    NVLink. fabric: what joins such domains unless told otherwise.
    """

    name: str
    family: str
    num_sms: int
    memory_bytes: int
    memory_bytes_per_s: float
    fp8_flops: float
    bf16_flops: float
    nvlink_bytes_per_s: float
    nvlink_domain: int
    gpus_per_node: int
    fabric: str
    source: str

    def flops(self, dtype: str) -> float:
        return self.fp8_flops if dtype == "fp8" else self.bf16_flops


@cache
def cards() -> dict[str, Card]:
    return {name: Card(name=name, **fields) for name, fields in _read("cards.json").items()}


@cache
def fabrics() -> dict[str, Fabric]:
    return {name: Fabric(name=name, **fields) for name, fields in _read("fabrics.json").items()}


def _read(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((DATA / name).read_text(encoding="utf-8"))
    return data
