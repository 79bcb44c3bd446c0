"""Measurements that others have published, with their sources, from ``data/published.csv``."""

import csv
import json
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from launch.plan.cards import DATA

# The part of a source's name that says who measured. Records of one group are left out together.
GROUPS = {
    "aiconfigurator": "aiconfigurator",
    "profile-data": "DeepSeek profile",
    "DeepEP": "DeepEP",
    "DeepGEMM": "DeepGEMM",
    "open-infra-index": "DeepSeek production",
    "rtp-llm": "RTP-LLM",
    "Ant Group": "Ant Group H20",
    "large-scale-ep": "SGLang 96 H100",
    "gb200-part": "SGLang GB200",
    "2025-12-17": "vLLM H200",
    "vLLM blog 2026": "vLLM Blackwell",
    "pplx": "pplx-garden",
    "pegainfer": "pegainfer",
    "llm-d": "llm-d",
    "TensorRT-LLM": "TensorRT-LLM",
}


@dataclass(frozen=True)
class Record:
    """One published number. tokens: query tokens per GPU and step, or requests where the note says
    so. quality: ``measured``, ``derived``, ``figure``, ``secondary`` or ``simulated``."""

    source: str
    gpu: str
    num_gpus: int | None
    ep: int | None
    phase: str
    tokens: float | None
    context: float | None
    dtype: str
    tbo: bool | None
    metric: str
    value: float
    unit: str
    quality: str
    note: str

    @property
    def group(self) -> str:
        return group_of(self.source)


@dataclass(frozen=True)
class Product:
    """One matrix product's rate, of ``groups`` products in one launch with m rows each."""

    groups: int
    m: int
    n: int
    k: int
    tflops: float

    @property
    def us(self) -> float:
        return 2 * self.groups * self.m * self.n * self.k / self.tflops / 1e6


def group_of(source: str) -> str:
    return next((group for part, group in GROUPS.items() if part in source), source)


@cache
def records() -> tuple[Record, ...]:
    names = [field.name for field in fields(Record)]
    with (DATA / "published.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    return tuple(Record(**dict(zip(names, map(_value, names, row), strict=True))) for row in rows)


@cache
def products() -> tuple[str, str, tuple[Product, ...]]:
    """Source, card and rates of ``data/products.json``."""
    data = json.loads((DATA / "products.json").read_text(encoding="utf-8"))
    return data["source"], data["gpu"], tuple(Product(**row) for row in data["products"])


def _value(name: str, text: str) -> Any:
    if name in ("num_gpus", "ep"):
        return int(text) if text else None
    if name in ("tokens", "context", "value"):
        return float(text) if text else None
    if name == "tbo":
        return {"yes": True, "no": False, "": None}[text]
    return text
