"""``moe-ep bench``: hands the arguments on to a benchmark of the ``bench`` package."""

import argparse
import importlib
import sys

BENCHMARKS = (
    "decode",
    "dispatch_combine",
    "eplb",
    "eplb_live",
    "gpu_report",
    "grouped_gemm",
    "mla_decode",
    "overlap",
    "step_time",
)


def run(args: argparse.Namespace) -> int:
    """Run ``bench.NAME``'s ``main``; 2 when there is no such benchmark."""
    name = args.name.replace("-", "_")
    if name not in BENCHMARKS:
        names = ", ".join(BENCHMARKS)
        print(f"no benchmark {args.name!r}; valid names: {names}", file=sys.stderr)
        return 2
    return importlib.import_module(f"bench.{name}").main(args.arguments) or 0
