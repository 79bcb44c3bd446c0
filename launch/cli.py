"""The ``moe-ep`` command. Imports only what argument parsing needs; each command the rest.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 stopped by Ctrl-C or SIGTERM.
"""

import argparse
import asyncio
import importlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.benchmarks import BENCHMARKS
from launch.eplb_tool.flags import add_place_flags, add_replay_flags
from launch.failure import EngineDeadError
from launch.flags import add_flags, add_sampling_flags
from launch.launch_config import ClusterConfig, ServerConfig
from launch.plan.flags import add_plan_flags
from launch.ray_cluster import ClusterError
from moe_ep.config import ConfigError, EngineConfig

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``argv`` is ``sys.argv[1:]`` by default."""
    args = _parser().parse_args(argv)
    _set_up_log(logging.DEBUG if args.verbose else args.log_level)
    try:
        return importlib.import_module(args.module).run(args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (asyncio.CancelledError, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except (ClusterError, EngineDeadError, OSError) as error:
        logging.getLogger(__name__).debug("the command failed", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 1


def _set_up_log(level: int) -> None:
    """Our own notes from ``level`` on and other libraries' warnings, on the standard error."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    for package in ("launch", "moe_ep", "attention", "eplb"):
        logging.getLogger(package).setLevel(level)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe-ep", description="Expert-parallel inference for MLA mixture-of-experts models."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (_demo, _generate, _serve, _run_batch, _check, _plan, _eplb, _bench):
        add(commands)
    return parser


def _command(commands: Any, name: str, module: str, help: str) -> argparse.ArgumentParser:
    """A sub-command; ``module`` has the ``run(args) -> exit code`` that does it."""
    parser = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
    # A service's log is for its operator; on a terminal the text is what matters.
    is_service = name in ("serve", "run-batch")
    level = logging.INFO if is_service else logging.WARNING
    parser.set_defaults(module=module, log_level=level)
    parser.add_argument("--verbose", action="store_true", help="Log more.")
    return parser


def _demo(commands: Any) -> None:
    help = "Serve the shipped demo model on two CPU ranks and measure it."
    parser = _command(commands, "demo", "launch.demo.run", help)
    add_flags(parser, ClusterConfig)


def _generate(commands: Any) -> None:
    parser = _command(commands, "generate", "launch.generate", "Continue prompts on the terminal.")
    group = parser.add_argument_group("prompts and sampling")
    group.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="Text to continue; repeatable.",
    )
    group.add_argument(
        "--prompt-token-ids", action="append", default=[], type=int, nargs="+", metavar="ID",
        help="Token ids to continue; repeatable.",
    )  # fmt: skip
    add_sampling_flags(group)
    add_flags(parser, EngineConfig)
    add_flags(parser, ClusterConfig)


def _serve(commands: Any) -> None:
    parser = _command(commands, "serve", "launch.server", "Serve an OpenAI-compatible HTTP API.")
    for config in (EngineConfig, ClusterConfig, ServerConfig):
        add_flags(parser, config)


def _run_batch(commands: Any) -> None:
    help = "Answer a file of requests in OpenAI's batch format."
    parser = _command(commands, "run-batch", "launch.run_batch", help)
    parser.add_argument("-i", "--input-file", required=True, type=Path, metavar="IN.jsonl")
    parser.add_argument("-o", "--output-file", required=True, type=Path, metavar="OUT.jsonl")
    add_flags(parser, EngineConfig)
    add_flags(parser, ClusterConfig)


def _check(commands: Any) -> None:
    help = "Say everything that stops this configuration, with the fix, and what would run."
    parser = _command(commands, "check", "launch.check", help)
    add_flags(parser, EngineConfig)


def _plan(commands: Any) -> None:
    help = "Say what will fit and how fast a step will be, before anyone rents a GPU."
    add_plan_flags(_command(commands, "plan", "launch.plan.run", help))


def _eplb(commands: Any) -> None:
    help = "Say from recorded loads whether re-placing experts would help, and place them."
    tools = commands.add_parser("eplb", help=help, description=help).add_subparsers(
        metavar="TOOL", required=True
    )
    help = "Run recorded loads, window by window, through placements with and without EPLB."
    add_replay_flags(_command(tools, "replay", "launch.eplb_tool.replay", help))
    help = "Write a placement for --init-expert-location."
    add_place_flags(_command(tools, "place", "launch.eplb_tool.place", help))


def _bench(commands: Any) -> None:
    parser = _command(commands, "bench", "launch.benchmarks", "Run a benchmark.")
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="what the benchmark takes; try NAME --help"
    )


if __name__ == "__main__":
    sys.exit(main())
