"""Matrix products with few rows: packed weights against plain and grouped ones, in one run.

``python -m bench.grouped_gemm``. Parity with float64 first; then, for each shape and number of
rows, one product per slot, with weights that are not in the cache. A product with few rows can at
best read its weights at the speed of memory; the table says how much of that is reached. Times are
medians, and ratios are of medians; ``best`` is the fastest sample. Prints a table, and one JSON
object as the last line.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from bench.measure import COLD_BYTES, Samples, measure_in_turns, memory_read_ceiling
from moe_ep.dispatch import Dispatched, MaskedLayout
from moe_ep.experts import ExpertSpec, ExpertWeights, create_experts
from moe_ep.linear import Linear

DTYPE = torch.bfloat16
PARITY_TOLERANCE = 1e-2  # share of a row's largest value: results rounded to bfloat16 (2^-9)
TABLE_WIDTH = 110  # columns; what the table needs when the output is not a terminal
HIDDEN, INTERMEDIATE, NUM_SLOTS = 1024, 512, 32


class Shape(NamedTuple):
    """Weights of one call: ``num_slots`` matrices ``[N, K]``."""

    name: str
    n: int
    k: int
    num_slots: int

    @property
    def weight_bytes(self) -> int:
        return self.num_slots * self.n * self.k * DTYPE.itemsize


SHAPES = (
    Shape("expert gate+up", 2 * INTERMEDIATE, HIDDEN, NUM_SLOTS),
    Shape("expert down", HIDDEN, INTERMEDIATE, NUM_SLOTS),
    Shape("dense gate+up", 2 * 2816, HIDDEN, 1),
    Shape("vocabulary", 4096, HIDDEN, 1),
)


@dataclass(frozen=True)
class Row:
    """One comparison; ``num_rows`` per slot. A baseline that was not measured is None."""

    shape: str
    num_rows: int
    weight_bytes: int
    ours: Samples
    linear: Samples
    grouped_mm: Samples | None


def measure_products(shape: Shape, row_counts: list[int], rounds: int) -> list[Row]:
    """Products of one shape, over enough copies of its weights that none stays in the cache."""
    num_sets = -(-COLD_BYTES // shape.weight_bytes)
    stacks = [
        torch.randn(shape.num_slots, shape.n, shape.k).to(DTYPE) / shape.k**0.5
        for _ in range(num_sets)
    ]
    packed = [[Linear(weight, DTYPE) for weight in stack] for stack in stacks]
    rows = []
    for num_rows in row_counts:
        x = torch.randn(shape.num_slots, num_rows, shape.k).to(DTYPE)
        exact = x.double() @ stacks[0].double().transpose(1, 2)
        _check(shape.name, torch.stack(_each(packed[0], x)), exact)
        ends = torch.arange(1, shape.num_slots + 1, dtype=torch.int32) * num_rows
        candidates = {
            "ours": [_call(_each, linears, x) for linears in packed],
            "linear": [_call(_each_plain, stack, x) for stack in stacks],
            "grouped_mm": [_call(_grouped, stack, x.flatten(0, 1), ends) for stack in stacks],
        }
        samples = measure_in_turns(candidates, rounds=rounds)
        rows.append(Row(shape.name, num_rows, shape.weight_bytes, **samples))
    return rows


def measure_experts(row_counts: list[int], rounds: int) -> list[Row]:
    """One whole layer of experts in the masked layout, against a plain loop over slots."""
    layers = [_random_layer() for _ in range(3)]
    spec = ExpertSpec(NUM_SLOTS, HIDDEN, INTERMEDIATE, DTYPE, is_fp8=False)
    ours = [create_experts("torch", spec) for _ in layers]
    for experts, layer in zip(ours, layers, strict=True):
        for slot, weights in enumerate(layer):
            experts.load_slot(slot, weights)
    rows = []
    for num_rows in row_counts:
        x = torch.randn(NUM_SLOTS, num_rows, HIDDEN).to(DTYPE)
        counts = torch.full((NUM_SLOTS,), num_rows, dtype=torch.int32)
        dispatched = Dispatched(x, None, MaskedLayout(counts), None, None)
        _check("experts", ours[0](dispatched), _plain_experts(layers[0], x, torch.float64))
        candidates = {
            "ours": [_call(experts, dispatched) for experts in ours],
            "linear": [_call(_plain_experts, layer, x, DTYPE) for layer in layers],
        }
        samples = measure_in_turns(candidates, rounds=rounds)
        weight_bytes = NUM_SLOTS * 3 * HIDDEN * INTERMEDIATE * DTYPE.itemsize
        rows.append(Row("experts layer", num_rows, weight_bytes, grouped_mm=None, **samples))
    return rows


def _random_layer() -> list[ExpertWeights]:
    sizes = [(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
    return [
        ExpertWeights(*(torch.randn(size).to(DTYPE) / size[1] ** 0.5 for size in sizes))
        for _ in range(NUM_SLOTS)
    ]


def _plain_experts(layer: list[ExpertWeights], x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    outputs = []
    for weights, rows in zip(layer, x.to(dtype), strict=True):
        gate, up = F.linear(rows, weights.gate.to(dtype)), F.linear(rows, weights.up.to(dtype))
        outputs.append(F.linear(F.silu(gate) * up, weights.down.to(dtype)))
    return torch.stack(outputs)


def _each(linears: list[Linear], x: torch.Tensor) -> list[torch.Tensor]:
    return [linear(rows) for linear, rows in zip(linears, x.unbind(), strict=True)]


def _each_plain(stack: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    return [F.linear(rows, weight) for weight, rows in zip(stack.unbind(), x.unbind(), strict=True)]


def _grouped(stack: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(x, stack.transpose(1, 2), ends)


def _call(function: Callable[..., object], *args: object) -> Callable[[], object]:
    return lambda: function(*args)


def _check(name: str, actual: torch.Tensor, exact: torch.Tensor) -> None:
    error = (actual.double() - exact).abs().amax(-1) / exact.abs().amax(-1)
    if not error.max() <= PARITY_TOLERANCE:
        raise SystemExit(f"{name}: rows differ from float64 by up to {error.max():.1e} of a row")


def _print(rows: list[Row], ceiling: float, threads: int) -> None:
    columns = "weights", "rows", "us", "middle half", "GB/s", "best", "of ceiling"
    table = Table(*columns, "x F.linear loop", "x _grouped_mm")
    for row in rows:
        low, high = row.ours.quartiles
        speed = row.weight_bytes / row.ours.median
        table.add_row(
            row.shape,
            str(row.num_rows),
            f"{row.ours.median * 1e6:.0f}",
            f"{low * 1e6:.0f}-{high * 1e6:.0f}",
            f"{speed / 1e9:.1f}",
            f"{row.weight_bytes / row.ours.best / 1e9:.1f}",
            f"{speed / ceiling:.0%}",
            f"{row.linear.median / row.ours.median:.2f}",
            f"{row.grouped_mm.median / row.ours.median:.2f}" if row.grouped_mm else "",
        )
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table)
    result = {"bench": "grouped_gemm", "threads": threads, "read_ceiling": ceiling}
    print(json.dumps(result | {"rows": [asdict(row) for row in rows]}))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="moe-ep bench grouped-gemm", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 128])
    parser.add_argument("--rounds", type=int, default=5, help="samples of each set of weights")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    ceiling = memory_read_ceiling()
    print(f"memory read ceiling, {args.threads} threads: {ceiling / 1e9:.1f} GB/s")
    with torch.inference_mode():
        rows = [row for s in SHAPES for row in measure_products(s, args.rows, args.rounds)]
        rows += measure_experts(args.rows, args.rounds)
    _print(rows, ceiling, args.threads)


if __name__ == "__main__":
    main()
