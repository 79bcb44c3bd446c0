"""Data sheets of cards and fabrics, from ``data/``; every number names its source."""

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
    NVLink. fabric: what joins such domains unless told otherwise. sources: of each number.
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
    sources: tuple[tuple[str, str], ...]

    def flops(self, dtype: str) -> float:
        return self.fp8_flops if dtype == "fp8" else self.bf16_flops


@cache
def cards() -> dict[str, Card]:
    data = _read("cards.json")
    return {name: _card(name, fields, data["sources"]) for name, fields in data["cards"].items()}


def _card(name: str, fields: dict[str, Any], sources: dict[str, str]) -> Card:
    """fields: the family, and every other field with the name of its source."""
    sourced = {field: pair for field, pair in fields.items() if field != "family"}
    return Card(
        name=name,
        family=fields["family"],
        sources=tuple((field, sources[source]) for field, (_, source) in sourced.items()),
        **{field: value for field, (value, _) in sourced.items()},
    )


@cache
def fabrics() -> dict[str, Fabric]:
    return {name: Fabric(name=name, **fields) for name, fields in _read("fabrics.json").items()}


def _read(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((DATA / name).read_text(encoding="utf-8"))
    return data
