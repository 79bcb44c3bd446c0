"""``moe-ep check``: everything that stops a configuration, with the fix; else what would run.

Starts no rank and loads no weight. Whether a backend can serve a model is asked from the backend's
own ``supports``, the same predicate that the engine asks at start.
"""

import argparse
import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from launch.flags import from_args, option_name
from moe_ep.config import Choice, ConfigError, EngineConfig, ModelConfig, Problem, validate

if TYPE_CHECKING:
    from rich.table import Table

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "ray")


class Answer(NamedTuple):
    """What one backend says of this model. setting: the flag's field that chooses it. reason: why
    it cannot serve, None when it can."""

    setting: str
    backend: str
    reason: str | None


def run(args: argparse.Namespace) -> int:
    """0 when the engine could start, 1 when something stops it."""
    from rich.console import Console

    console = Console(markup=False)
    console.print(_versions())
    config = from_args(EngineConfig, args)
    try:
        model = validate(config)
    except ConfigError as error:
        console.print(_problems(error.problems))
        return 1
    resolved, choices = config.resolve(model)
    answers = backend_answers(resolved, model)
    console.print(_choices(choices), _answers(answers, resolved))
    problems = unusable(answers, resolved)
    console.print(_problems(problems) if problems else "No problems: this can be started.")
    return 1 if problems else 0


def backend_answers(config: EngineConfig, model: ModelConfig) -> list[Answer]:
    """Every registered backend's answer. ``config`` is resolved."""
    import attention
    from moe_ep import dispatch, experts
    from moe_ep.engine.specs import DTYPES, dispatch_spec, expert_spec
    from moe_ep.model.build import attention_spec

    mla = attention_spec(model, DTYPES[config.dtype])
    expert = expert_spec(config, model)
    exchange = dispatch_spec(config, model, row_alignment=1)
    return [
        *(_ask("moe_a2a_backend", n, load, exchange) for n, load in dispatch.BACKENDS.items()),
        *(_ask("moe_runner_backend", n, load, expert) for n, load in experts.BACKENDS.items()),
        *(
            Answer("attention_backend", name, attention.attention_problem(name, mla))
            for name in attention.attention_backend_names()
        ),
    ]


def unusable(answers: Sequence[Answer], config: EngineConfig) -> list[Problem]:
    """A problem for each chosen backend that cannot serve, naming those that can."""
    problems = []
    for answer in answers:
        if answer.reason is not None and getattr(config, answer.setting) == answer.backend:
            able = [a.backend for a in answers if a.setting == answer.setting and a.reason is None]
            allowed = ", ".join(able) or "nothing on this machine"
            fix = f"{answer.reason}; choose another backend."
            problems.append(Problem(answer.setting, answer.backend, allowed, fix))
    return problems


def _ask(setting: str, backend: str, load: Callable[[], Any], spec: object) -> Answer:
    try:
        return Answer(setting, backend, load().supports(spec))
    except ImportError as error:
        return Answer(setting, backend, f"its library cannot be imported: {error}")


def _table(title: str, *headings: str) -> "Table":
    from rich.table import Column, Table

    columns = (Column(heading, overflow="fold") for heading in headings)
    return Table(*columns, title=title, title_justify="left")


def _problems(problems: Sequence[Problem]) -> "Table":
    title = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    table = _table(title, "setting", "given", "allowed", "fix")
    for problem in problems:
        table.add_row(problem.field, repr(problem.given), problem.allowed, problem.fix)
    return table


def _answers(answers: Sequence[Answer], config: EngineConfig) -> "Table":
    table = _table("Backends", "flag", "backend", "can serve this model", "chosen")
    for answer in answers:
        is_chosen = getattr(config, answer.setting) == answer.backend
        can = "yes" if answer.reason is None else f"no: {answer.reason}"
        table.add_row(option_name(answer.setting), answer.backend, can, "yes" if is_chosen else "")
    return table


def _choices(choices: Sequence[Choice]) -> "Table":
    table = _table("Settings left open", "flag", "becomes", "because")
    for choice in choices:
        table.add_row(option_name(choice.field), str(choice.value), choice.reason)
    return table


def _versions() -> "Table":
    table = _table("Versions", "library", "version")
    table.add_row("python", platform.python_version())
    for name in LIBRARIES:
        table.add_row(name, importlib.metadata.version(name))
    return table
