"""The flags of ``moe-ep eplb``. Imports only what argument parsing needs."""

import argparse
from pathlib import Path


def add_replay_flags(parser: argparse.ArgumentParser) -> None:
    """Names that are the engine's own or the planner's mean the same here."""
    _add_loads(parser)
    parser.add_argument(
        "--window", type=int, metavar="N",
        help="Recorded steps in a window, after each of which experts are placed anew; a tenth of"
        " all by default.",
    )  # fmt: skip
    time = parser.add_argument_group("time of a layer (with --model and --gpu), as in moe-ep plan")
    time.add_argument("--gpu", metavar="NAME", help="Card to estimate the time for.")
    time.add_argument("--phase", default="decode", help="decode or prefill.")
    time.add_argument(
        "--batch", type=int, default=64, metavar="N", help="Requests in a step (per rank)."
    )
    time.add_argument(
        "--context", type=int, default=4096, metavar="N", help="Cached tokens of a request."
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="Also write all figures.")
    output.add_argument(
        "--plot", type=Path, metavar="FILE",
        help="Also draw heat maps, ranks and layers over time: .png, .svg, .pdf.",
    )  # fmt: skip


def add_place_flags(parser: argparse.ArgumentParser) -> None:
    _add_loads(parser)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE",
        help="Placement for --init-expert-location, .json or .pt.",
    )  # fmt: skip


def _add_loads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--loads", type=Path, nargs="+", required=True, metavar="FILE",
        help="Recorded loads, .json or .pt (/dump_expert_distribution_record); several files follow"
        " each other in time.",
    )  # fmt: skip
    parser.add_argument("--ep-size", type=int, required=True, metavar="N", help="Ranks (total).")
    parser.add_argument(
        "--ep-num-redundant-experts", type=int, default=0, metavar="N",
        help="Extra expert slots per layer (total).",
    )  # fmt: skip
    parser.add_argument(
        "--num-nodes", type=int, default=1, metavar="N",
        help="Machines (total); ranks are numbered machine by machine.",
    )  # fmt: skip
    parser.add_argument(
        "--eplb-node-traffic-price", type=float, default=0.0, metavar="X",
        help="What a token's copy to another machine costs, in (token, expert) pairs (with"
        " --model).",
    )  # fmt: skip
    parser.add_argument(
        "--model",
        help="Built-in geometry, config.json or its directory: checks the loads, and gives bytes.",
    )
