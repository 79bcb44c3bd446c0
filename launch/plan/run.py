"""``moe-ep plan``. Needs no GPU, no checkpoint, and torch only for recorded loads."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.flags import from_args
from launch.plan.advice import Goal, advice_json, advise
from launch.plan.flags import add_plan_flags
from launch.plan.plan import as_json, make_plan
from launch.plan.question import Question
from launch.plan.topology import topology_json
from moe_ep.config import ConfigError, Problem

if TYPE_CHECKING:
    from rich.console import Console

# What advice chooses itself, or has no use for.
NOT_OF_ADVICE = (
    "ep_size", "attn_dp_size", "ep_num_redundant_experts", "phase", "batch", "context",
    "enable_two_batch_overlap", "max_num_batched_tokens", "topology", "plot",
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """0 when it fits, 1 when it does not or no way meets the goals. Raises ConfigError for what
    cannot be answered."""
    from rich.console import Console

    if problems := list(_unread(args)):
        raise ConfigError(problems)
    console = Console()
    if args.validate:
        return _validate(args, console)
    question = from_args(Question, args)
    answer = _plan if args.gpus is None else _advise
    return answer(args, question, console)


def _unread(args: argparse.Namespace) -> Iterator[Problem]:
    """Flags that were given and that this kind of answer would not read."""
    parser = argparse.ArgumentParser()
    add_plan_flags(parser)
    defaults = vars(parser.parse_args([]))
    unread: tuple[str, ...] = tuple(field.name for field in fields(Goal))
    allowed, fix = "nothing without --gpus", "Add --gpus for advice, or leave it out."
    if args.validate:
        unread = tuple(defaults.keys() - {"validate", "plot"})
        allowed, fix = "nothing with --validate", "Leave it out."
    elif args.gpus is not None:
        unread = NOT_OF_ADVICE
        allowed, fix = "nothing with --gpus", "Leave it out: advice chooses, or does without."
    for name in sorted(unread):
        if (given := getattr(args, name)) != defaults[name]:
            yield Problem(name, str(given) if isinstance(given, Path) else given, allowed, fix)


def _plan(args: argparse.Namespace, question: Question, console: "Console") -> int:
    plan = make_plan(question)
    if args.plot is not None:
        from launch.plan.plot import draw_plan

        draw_plan(plan, args.plot)
    if args.json:
        rows = topology_json(plan.setting.deployment) if args.topology else {}
        _print_json(as_json(plan) | rows)
    else:
        from launch.plan.page import print_plan
        from launch.plan.topology import planned_rows
        from launch.topology import topology_table

        print_plan(console, plan)
        if args.topology:
            console.print(topology_table(planned_rows(plan.setting.deployment)))
    return 0 if plan.fits else 1


def _advise(args: argparse.Namespace, question: Question, console: "Console") -> int:
    goal = from_args(Goal, args)
    advice = advise(question, goal)
    if args.json:
        _print_json(advice_json(advice, goal))
    else:
        from launch.plan.page import print_advice

        print_advice(console, question, advice, goal)
    return 0 if advice.options else 1


def _validate(args: argparse.Namespace, console: "Console") -> int:
    from launch.plan.report import print_report
    from launch.plan.validate import leave_one_source_out

    print_report(console)
    if args.plot is not None:
        from launch.plan.plot import draw_outcomes

        draw_outcomes(leave_one_source_out(), args.plot)
        console.print(f"Plot: {args.plot}", markup=False)
    return 0


def _print_json(value: dict[str, Any]) -> None:
    json.dump(value, sys.stdout, indent=2)
    print()
