"""Where the time of a step goes: every stage of every layer on every rank, waits split into skew (a
peer came later) and transfer (bytes moving), beside what the machine could do at best.

``python -m bench.step_time --model deepseek-v3 --scale 0.125 --num-layers 4 --ep-size 2`` starts
the ranks itself; under ``torchrun`` it is one of them. Real engines run made-up requests; steps
with and without overlap, and with and without the recorder, take turns. docs/step-time.md explains
the table and the files.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from bench.ranks import run_ranks
from bench.steps.geometry import scaled, write_config
from bench.steps.report import ArmReport, arm_report, report_json, slowest_of
from bench.steps.roofline import Roofline
from bench.steps.run import DECODE, PREFILL, Plan, Rank, RankResult, default_threads
from bench.steps.table import WIDTH, show
from bench.steps.trace import trace_json
from launch.flags import add_flags, from_args
from moe_ep.config import ConfigError, EngineConfig, ModelConfig, validate
from moe_ep.engine.backends import resolve_backends
from moe_ep.engine.world import World, rank_device

# Made to fit the batch unless they are given.
_SIZED = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_kv_blocks")


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Files to write; None for none."""

    json: Path | None
    trace: Path | None
    plot: Path | None


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    outputs = Outputs(args.json, args.trace, args.plot)
    with tempfile.TemporaryDirectory() as directory:
        try:
            plan = _plan(args, Path(directory))
        except (ConfigError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
        if "RANK" in os.environ:
            _run_under_torchrun(plan, outputs)
        elif plan.config.ep_size == 1:
            _run(World(rank=0, num_ranks=1, store=None, timeout_s=1.0), plan, outputs)
        else:
            run_ranks(plan.config.ep_size, plan.config.watchdog_timeout_s, _run, plan, outputs)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe-ep bench step-time", description=__doc__, allow_abbrev=False
    )
    group = parser.add_argument_group("what to measure")
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    group.add_argument("--phase", choices=(DECODE, PREFILL), default=DECODE)
    group.add_argument("--batch", default=32, help="requests per rank", **number)
    group.add_argument("--context", default=256, help="tokens of each request", **number)
    group.add_argument("--scale", type=float, default=1.0, metavar="X", help="shrink widths by")
    group.add_argument("--num-layers", help="keep so many layers", **number)
    group.add_argument("--iterations", default=30, help="of each kind of step", **number)
    group.add_argument("--warm-up", default=5, help="iterations that do not count", **number)
    group.add_argument("--threads", help="CPU threads per rank", **number)
    group.add_argument("--json", type=Path, metavar="FILE", help="all samples and figures")
    group.add_argument("--trace", type=Path, metavar="FILE", help="for Perfetto")
    group.add_argument("--plot", type=Path, metavar="FILE", help="a PNG")
    add_flags(parser, EngineConfig)
    parser.set_defaults(load_format="dummy", **dict.fromkeys(_SIZED))
    return parser


def _plan(args: argparse.Namespace, directory: Path) -> Plan:
    """directory: for the config of a model that is not as it was named. ConfigError or ValueError
    for what cannot be measured."""
    for name in ("batch", "context", "iterations"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}: {getattr(args, name)} given; at least 1 is needed")
    config = from_args(EngineConfig, args)
    if args.scale != 1 or args.num_layers is not None:
        if config.load_format != "dummy":
            raise ValueError("--scale, --num-layers: only with --load-format dummy")
        model = scaled(ModelConfig.from_path(config.model), args.scale, args.num_layers)
        path = str(write_config(model, directory))
        config = dataclasses.replace(config, model=path, served_model_name=config.model)
    plan = Plan(
        config=config,
        phase=args.phase,
        batch=args.batch,
        context=args.context,
        warm_up=args.warm_up,
        iterations=args.iterations,
        num_threads=args.threads or default_threads(_num_ranks_here(config)),
    )
    plan = dataclasses.replace(plan, config=plan.sized())
    validate(plan.config)
    return plan


def _num_ranks_here(config: EngineConfig) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", config.ep_size))


def _run_under_torchrun(plan: Plan, outputs: Outputs) -> None:
    timeout_s = plan.config.watchdog_timeout_s
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, num_ranks = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    if num_ranks != plan.config.ep_size:
        raise SystemExit(f"--ep-size: {plan.config.ep_size} given; torchrun has {num_ranks} ranks")
    world = World(rank=rank, num_ranks=num_ranks, store=store, timeout_s=timeout_s)
    try:
        _run(world, plan, outputs)
    finally:
        world.destroy()


def _run(world: World, plan: Plan, outputs: Outputs) -> None:
    """One rank; rank 0 reports. Collective."""
    rank: Rank | None = None
    try:
        rank = Rank(plan, world)
        result = rank.measure(_progress(plan) if world.rank == 0 else lambda index: None)
        results = world.gather(result)
        if world.rank == 0:
            _report(plan, results, outputs)
    finally:
        if rank is not None:
            rank.close()


def _progress(plan: Plan) -> Callable[[int], None]:
    total = plan.warm_up + plan.iterations
    if not sys.stderr.isatty():
        return lambda index: None

    def told(index: int) -> None:
        end = "\n" if index == total - 1 else "\r"
        print(f"iteration {index + 1} of {total}", end=end, file=sys.stderr, flush=True)

    return told


def _report(plan: Plan, results: Sequence[RankResult], outputs: Outputs) -> None:
    model = ModelConfig.from_path(plan.config.model)
    config, _ = resolve_backends(plan.config.resolve(model)[0], model, rank_device())
    ceilings = slowest_of([result.ceilings for result in results])
    costs = Roofline(config, model, plan.load).costs()
    arms = [
        arm_report(name, results, costs=costs, ceilings=ceilings, num_layers=model.num_layers)
        for name in plan.arms
    ]
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(_title(plan, config))
    show(arms, ceilings, console)
    if outputs.json is not None:
        report = report_json(arms, ceilings, _run_json(plan, config, model, results))
        outputs.json.write_text(json.dumps(report), encoding="utf-8")
    if outputs.trace is not None:
        steps = {arm.name: arm.typical for arm in arms}
        outputs.trace.write_text(json.dumps(trace_json(steps)), encoding="utf-8")
    if outputs.plot is not None:
        _draw(arms, outputs.plot)


def _draw(arms: Sequence[ArmReport], path: Path) -> None:
    from bench.steps.plot import draw

    draw(arms, path)


def _title(plan: Plan, config: EngineConfig) -> str:
    what = f"{plan.batch} requests per rank, {plan.context} tokens each"
    backends = (config.moe_a2a_backend, config.moe_runner_backend, config.attention_backend)
    return (
        f"{config.served_model_name}, {plan.phase}: {what}; EP {config.ep_size},"
        f" {plan.num_threads} threads per rank; {', '.join(backends)}; {plan.iterations} iterations"
    )


def _run_json(
    plan: Plan, config: EngineConfig, model: ModelConfig, results: Sequence[RankResult]
) -> dict[str, Any]:
    return {
        "engine": dataclasses.asdict(config),
        "model": dataclasses.asdict(model),
        "phase": plan.phase,
        "batch_per_rank": plan.batch,
        "context": plan.context,
        "iterations": plan.iterations,
        "warm_up": plan.warm_up,
        "threads_per_rank": plan.num_threads,
        "clock_offsets_ns": [result.clock_offset_ns for result in results],
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
