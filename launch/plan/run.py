"""``moe-ep plan``. Needs no GPU, no checkpoint and no torch; answers in well under a second."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from launch.flags import from_args
from launch.plan.advice import Goal, advice_json, advise
from launch.plan.plan import as_json, make_plan
from launch.plan.question import Question

if TYPE_CHECKING:
    from rich.console import Console


def run(args: argparse.Namespace) -> int:
    """0 when it fits, 1 when it does not or no way meets the goals."""
    from rich.console import Console

    console = Console()
    if args.validate:
        return _validate(args, console)
    question = from_args(Question, args)
    answer = _plan if args.gpus is None else _advise
    return answer(args, question, console)


def _plan(args: argparse.Namespace, question: Question, console: "Console") -> int:
    plan = make_plan(question)
    if args.plot is not None:
        from launch.plan.plot import draw_plan

        draw_plan(plan, args.plot)
    if args.json:
        _print_json(as_json(plan))
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

        print_advice(console, advice, goal)
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
