"""``moe-ep plan``. Needs no GPU, no checkpoint and no torch; answers in well under a second."""

import argparse
import json
import sys
from dataclasses import asdict, fields
from typing import Any

from launch.plan.advice import Advice, Goal, advise, launch_command
from launch.plan.plan import as_json, make_plan
from launch.plan.question import Question
from moe_ep.config import ConfigError, Problem


def run(args: argparse.Namespace) -> int:
    """0 when it fits, 1 when it does not or no way meets the goals."""
    from rich.console import Console

    console = Console()
    if args.validate:
        return _validate(args, console)
    question = Question(**{f.name: getattr(args, f.name) for f in fields(Question)})
    if args.attn_dp_size not in (None, question.ep_size):
        fix = "Leave it out: tensor-parallel attention is not implemented."
        allowed = f"{question.ep_size}, the EP size"
        raise ConfigError([Problem("attn_dp_size", args.attn_dp_size, allowed, fix)])
    if args.gpus is not None:
        return _advise(args, question, console)
    plan = make_plan(question)
    if args.json:
        _print_json(as_json(plan))
        return 0 if plan.fits else 1
    from launch.plan.page import print_plan
    from launch.plan.topology import planned_rows
    from launch.topology import topology_table

    print_plan(console, plan)
    if args.topology:
        console.print(topology_table(planned_rows(plan.setting.deployment)))
    return 0 if plan.fits else 1


def _advise(args: argparse.Namespace, question: Question, console: Any) -> int:
    from launch.plan.page import print_advice

    goal = Goal(**{f.name: getattr(args, f.name) for f in fields(Goal)})
    advice = advise(question, goal)
    if args.json:
        _print_json(_advice_json(advice, goal))
    else:
        print_advice(console, advice, goal)
    return 0 if advice.options else 1


def _advice_json(advice: Advice, goal: Goal) -> dict[str, Any]:
    return {
        "version": 1,
        "goal": asdict(goal),
        "candidates": advice.num_candidates,
        "dropped": advice.dropped,
        "options": [
            {
                "requests_per_s": option.requests_per_s,
                "limited_by": option.limited_by,
                "unused_gpus": option.spare,
                "num_prefill_engines": option.num_prefill,
                "num_decode_engines": option.num_decode,
                "prefill": as_json(option.prefill),
                "decode": as_json(option.decode),
                "commands": [launch_command(option.prefill), launch_command(option.decode)],
            }
            for option in advice.options
        ],
    }


def _validate(args: argparse.Namespace, console: Any) -> int:
    from launch.plan.plot import svg
    from launch.plan.report import print_report
    from launch.plan.validate import leave_one_source_out

    print_report(console)
    if args.plot is not None:
        args.plot.write_text(svg(leave_one_source_out()), encoding="utf-8")
        console.print(f"Plot: {args.plot}", markup=False)
    return 0


def _print_json(value: dict[str, Any]) -> None:
    json.dump(value, sys.stdout, indent=2)
    print()
