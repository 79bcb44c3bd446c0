"""``moe-ep check``: everything that stops a configuration, with the fix; else what would run.

Starts no rank and loads no weight. Whether a backend can serve a model is asked from the backend's
own ``supports``, by the same function that the engine calls at start (``moe_ep.engine.backends``).
"""

import argparse
import importlib.metadata
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from launch.flags import from_args, option_name
from moe_ep.config import Choice, ConfigError, EngineConfig, Problem, validate

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from moe_ep.engine.backends import Answer

MODES = ("normal", "low_latency")
# By the names they are imported under, which are not always those they are installed under.
LIBRARIES = (
    "torch", "transformers", "tokenizers", "safetensors", "ray", "triton", "deep_ep", "deep_gemm",
    "flash_mla",
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """0 when the engine could start, 1 when something stops it."""
    from rich.console import Console

    from moe_ep.engine.backends import backend_answers, resolve_backends
    from moe_ep.engine.world import rank_device

    console = Console(markup=False)
    console.print(_versions())
    config = from_args(EngineConfig, args)
    try:
        model = validate(config)
    except ConfigError as error:
        console.print(_problems(error.problems))
        return 1
    resolved, choices = config.resolve(model)
    device = rank_device()
    by_mode = {
        mode: backend_answers(replace(resolved, deepep_mode=mode), model, device) for mode in MODES
    }
    problems: Sequence[Problem] = ()
    try:
        resolved, backends = resolve_backends(resolved, model, device)
        choices += backends
    except ConfigError as error:
        problems = error.problems
    console.print(_choices(choices), *_matrices(by_mode, resolved, device))
    console.print(_problems(problems) if problems else "No problems: this can be started.")
    return 1 if problems else 0


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


def _matrices(
    by_mode: "dict[str, list[Answer]]", config: EngineConfig, device: "torch.device"
) -> "Iterator[Table]":
    """A table for each flag that names a backend. The exchange modes have a column each where any
    backend answers differently when steps use that mode alone."""
    settings = dict.fromkeys(answer.setting for answers in by_mode.values() for answer in answers)
    for setting in settings:
        rows = [
            answers
            for answers in zip(*by_mode.values(), strict=True)
            if answers[0].setting == setting
        ]
        columns = [f"{mode} mode" for mode in by_mode]
        if all(len({answer.reason for answer in answers}) == 1 for answers in rows):
            rows, columns = [answers[:1] for answers in rows], [f"{' and '.join(by_mode)} mode"]
        title = f"{option_name(setting)} for {config.model} on {_device_name(device)}"
        table = _table(title, "backend", *columns, "chosen")
        for answers in rows:
            backend = answers[0].backend
            chosen = "yes" if getattr(config, setting) == backend else ""
            table.add_row(backend, *map(_can, answers), chosen)
        yield table


def _can(answer: "Answer") -> str:
    return "yes" if answer.reason is None else f"no: {answer.reason}"


def _choices(choices: Sequence[Choice]) -> "Table":
    table = _table("Settings left open", "flag", "becomes", "because")
    for choice in choices:
        table.add_row(option_name(choice.field), str(choice.value), choice.reason)
    return table


def _versions() -> "Table":
    table = _table("Versions", "library", "version")
    table.add_row("python", platform.python_version())
    packages = importlib.metadata.packages_distributions()
    for name in LIBRARIES:
        found = sorted(set(packages.get(name, ())))
        table.add_row(name, ", ".join(map(_version, found)) or "not installed")
    return table


def _version(distribution: str) -> str:
    return f"{importlib.metadata.version(distribution)} ({distribution})"


def _device_name(device: "torch.device") -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
