"""Every GPU kernel against this GPU's measured ceilings and against DeepGEMM, FlashMLA or torch.

``python -m bench.gpu_report`` on one GPU. First the ceilings: the speed of copying memory and the
rates of dense products. Then, for each kernel and shape, a comparison with float64 and the time of
every contestant: CUDA events, the second-level cache holding other data, warmed up, every sample
kept. Geometry of DeepSeek-V3. Prints a table, and one JSON object as the last line.

A share is the time that the ceilings allow for the least bytes and FLOPs, over the median. Times
include what the clock shows for an empty call (``empty_call``). Exit code 1 when a contestant fails
or gives a wrong result, which the table shows; 2 without a GPU that these kernels run on.
"""

import argparse
import importlib.metadata
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.gpu.case import KernelCase, Sizes
from bench.gpu.clock import CudaTimer, Timer, measure_ceilings
from bench.gpu.costs import Ceilings, Cost
from bench.measure import Samples

V3 = Sizes()
SLOTS = (8, 16, 32)
DECODE_ROWS = (8, 16, 32, 64, 128, 256)  # per slot
PREFILL_ROWS = (256, 1024)
TOKENS = (128, 4096)  # of a decode step, of a prefill
PREFILL_TOKENS, PREFILL_CONTEXTS = 2048, (0, 6144, 30720)
BATCHES, CONTEXTS, HEADS = (1, 8, 32, 128), (1024, 4096, 16384), (16, 128)

TABLE_WIDTH = 150  # columns; what the table needs when the output is not a terminal
LIBRARIES = ("torch", "triton", "deep_gemm", "flash_mla")


@dataclass(frozen=True)
class Row:
    """One contestant on one case. problem: why there are no samples. ratio: the baseline's median
    over this one's, above 1 where this one is faster; None without a baseline."""

    kernel: str
    backend: str
    shape: dict[str, int]
    cost: Cost
    samples: Samples | None = None
    problem: str | None = None
    ratio: float | None = None

    def as_json(self, ceilings: Ceilings) -> dict[str, Any]:
        row = asdict(self)
        floor, limit = ceilings.floor(self.cost)
        row |= {"floor_seconds": floor, "limit": limit}
        if self.samples is None:
            return row
        median = self.samples.median
        return row | {
            "median_seconds": median,
            "quartiles": self.samples.quartiles,
            "bytes_per_s": self.cost.num_bytes / median,
            "flops_per_s": self.cost.num_flops / median,
            "share_of_ceiling": floor / median,
        }


def makers(device: torch.device) -> dict[str, Callable[[], Iterator[KernelCase]]]:
    """Groups of cases by name; one case at a time is in memory."""
    from bench.gpu import decode, experts, prefill, routing

    products = ((2 * V3.intermediate, V3.hidden), (V3.hidden, V3.intermediate))  # gate+up, down

    def quantize() -> Iterator[KernelCase]:
        yield from (experts.quantize_case(num, V3, device) for num in TOKENS)

    def swiglu() -> Iterator[KernelCase]:
        for rows, is_masked in ((32, True), (PREFILL_ROWS[0], False)):
            yield experts.swiglu_case([rows] * SLOTS[-1], V3, device, is_masked=is_masked)

    def masked() -> Iterator[KernelCase]:
        for slots, (n, k), rows in itertools.product(SLOTS, products, DECODE_ROWS):
            yield experts.grouped_gemm_case([rows] * slots, n, k, device, is_masked=True)

    def contiguous() -> Iterator[KernelCase]:
        for slots, (n, k), rows in itertools.product(SLOTS, products, PREFILL_ROWS):
            yield experts.grouped_gemm_case([rows] * slots, n, k, device, is_masked=False)

    def mla() -> Iterator[KernelCase]:
        for heads, context, batch in itertools.product(HEADS, CONTEXTS, BATCHES):
            yield decode.mla_decode_case([context] * batch, heads, V3, device)

    def mla_prefill() -> Iterator[KernelCase]:
        for heads, context in itertools.product(HEADS, PREFILL_CONTEXTS):
            yield prefill.mla_prefill_case([(context, PREFILL_TOKENS)], heads, V3, device)

    def route() -> Iterator[KernelCase]:
        for num in TOKENS:
            yield routing.route_case(num, V3, device)
            yield routing.map_to_slots_case(num, V3, device)

    def permute() -> Iterator[KernelCase]:
        for num in TOKENS:
            yield from routing.permute_cases(num, SLOTS[-1], V3, device)

    def latent() -> Iterator[KernelCase]:
        yield from (decode.write_latent_case(num, V3, device) for num in TOKENS)

    groups = (quantize, swiglu, masked, contiguous, mla, mla_prefill, route, permute, latent)
    return {group.__name__: group for group in groups}


def measure_case(case: KernelCase, timer: Timer) -> list[Row]:
    """One row for every contestant. Failures are results: they end up in the row."""
    rows = [_measure(case, backend, timer) for backend in case.calls]
    by_name = {row.backend: row.samples for row in rows}
    baseline = by_name.get(case.baseline or "")
    return [replace(row, ratio=_ratio(baseline, row.samples)) for row in rows]


def _measure(case: KernelCase, backend: str, timer: Timer) -> Row:
    row = Row(case.kernel, backend, case.shape, case.cost)
    call = case.calls[backend]
    try:
        case.check(call())
        return replace(row, samples=timer(call))
    except (AssertionError, RuntimeError) as error:
        return replace(row, problem=f"{type(error).__name__}: {error}")


def _ratio(baseline: Samples | None, samples: Samples | None) -> float | None:
    return baseline.median / samples.median if baseline and samples else None


def table_of(rows: Sequence[Row], ceilings: Ceilings) -> Table:
    table = Table()
    left = ("kernel", "shape", "backend")
    for heading in (*left, "us", "middle half", "GB/s", "TFLOPS", "share", "limit", "x baseline"):
        table.add_column(heading, justify="left" if heading in left else "right", overflow="fold")
    for row in rows:
        shape = " ".join(f"{name}={size}" for name, size in row.shape.items())
        if row.samples is None:
            table.add_row(row.kernel, shape, row.backend, row.problem)
            continue
        low, high = row.samples.quartiles
        floor, limit = ceilings.floor(row.cost)
        median = row.samples.median
        table.add_row(
            row.kernel,
            shape,
            row.backend,
            f"{median * 1e6:.1f}",
            f"{low * 1e6:.1f}-{high * 1e6:.1f}",
            f"{row.cost.num_bytes / median / 1e9:.0f}",
            f"{row.cost.num_flops / median / 1e12:.1f}" if row.cost.num_flops else "",
            f"{floor / median:.0%}",
            limit,
            "" if row.ratio is None else f"{row.ratio:.2f}",
        )
    return table


def report_of(rows: Sequence[Row], ceilings: Ceilings, machine: dict[str, Any]) -> dict[str, Any]:
    """The JSON object. machine: what ``describe_machine`` says."""
    return {
        "bench": "gpu_report",
        **machine,
        "ceilings": asdict(ceilings),
        "rows": [row.as_json(ceilings) for row in rows],
    }


def describe_machine() -> dict[str, Any]:
    """The GPU, and the version of every library that takes part; None for one that is absent."""
    owners = importlib.metadata.packages_distributions()
    versions = {
        name: importlib.metadata.version(owners[name][0]) if name in owners else None
        for name in LIBRARIES
    }
    device = torch.cuda.get_device_properties()
    return {
        "device": device.name,
        "multiprocessors": device.multi_processor_count,
        "memory_bytes": device.total_memory,
        "cuda": torch.version.cuda,
        "versions": versions,
    }


def find_problem() -> str | None:
    """None when this process can measure, else the reason why not."""
    if not torch.cuda.is_available():
        return "no CUDA device is visible to torch"
    from moe_ep.kernels import device_problem

    return device_problem(torch.device("cuda"), needs_fp8=True)


def main(argv: list[str] | None = None) -> int:
    groups = makers(torch.device("cuda"))
    parser = argparse.ArgumentParser(
        prog="moe-ep bench gpu-report", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--samples", type=int, default=30, help="of every contestant and shape")
    parser.add_argument("--only", nargs="+", choices=list(groups), default=list(groups))
    args = parser.parse_args(argv)
    if args.samples < 2:
        parser.error(f"--samples: {args.samples} given, a spread needs at least 2")
    if (problem := find_problem()) is not None:
        print(f"bench.gpu_report needs a GPU: {problem}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    machine = describe_machine()
    with torch.inference_mode():
        timer = CudaTimer(args.samples)
        ceilings = measure_ceilings(timer, torch.device("cuda"))
        console.print(machine, ceilings)
        rows: list[Row] = []
        try:
            for case in itertools.chain.from_iterable(groups[name]() for name in args.only):
                rows += measure_case(case, timer)
                print(f"{case.kernel} {case.shape}", file=sys.stderr)
        finally:  # what was measured is shown even when the device fails in between
            console.print(table_of(rows, ceilings))
            print(json.dumps(report_of(rows, ceilings, machine)))
    return 1 if any(row.problem for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
