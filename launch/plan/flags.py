"""The flags of ``moe-ep plan``. Imports only what argument parsing needs."""

import argparse
from pathlib import Path


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Names that are the engine's own mean the same here."""
    _add_cluster(parser.add_argument_group("cluster"))
    _add_load(parser.add_argument_group("load"))
    _add_goal(parser.add_argument_group("advice (with --gpus)"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="Print JSON (plan.schema.json).")
    output.add_argument(
        "--topology", action="store_true", help="Also print the place of each rank."
    )
    output.add_argument(
        "--validate", action="store_true",
        help="Instead, hold the model against published measurements, each source left out.",
    )  # fmt: skip
    output.add_argument(
        "--plot", type=Path, metavar="FILE",
        help="Also draw the stages and the memory, or with --validate predicted over published:"
        " .svg, .png, .pdf.",
    )  # fmt: skip


def _add_cluster(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--model",
        default="deepseek-v3",
        help="Built-in geometry, config.json or its directory (default: %(default)s).",
    )
    group.add_argument(
        "--gpu", default="h800",
        help="Card; an unknown name lists the known ones (default: %(default)s).",
    )  # fmt: skip
    group.add_argument("--fabric", help="Links between nodes; the card's usual one by default.")
    group.add_argument(
        "--ep-size", type=int, default=8, metavar="N", help="Ranks (total, default: %(default)s)."
    )
    group.add_argument(
        "--attn-dp-size", type=int, metavar="N",
        help="Groups that hold different requests (total); only the EP size, the default.",
    )  # fmt: skip
    group.add_argument(
        "--ep-num-redundant-experts", type=int, default=0, metavar="N",
        help="Extra expert slots per layer (total); the load then counts as balanced.",
    )  # fmt: skip
    group.add_argument(
        "--moe-a2a-backend", default="deepep", metavar="NAME", help="deepep (default) or deepep_v2."
    )
    group.add_argument(
        "--kv-cache-dtype", default="bfloat16", metavar="NAME", help="bfloat16 (default) or fp8."
    )
    group.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, metavar="X",
        help="Share of the card's memory to use, weights included (default: %(default)s).",
    )  # fmt: skip


def _add_load(group: argparse._ActionsContainer) -> None:
    group.add_argument("--phase", default="decode", help="decode (default) or prefill.")
    group.add_argument(
        "--batch", type=int, default=64, metavar="N",
        help="Requests in a step (per rank, default: %(default)s); in prefill, prompts that arrive"
        " together.",
    )  # fmt: skip
    group.add_argument(
        "--context", type=int, default=4096, metavar="N",
        help="Cached tokens of a request (default: %(default)s); in prefill, tokens of a prompt.",
    )  # fmt: skip
    group.add_argument(
        "--enable-two-batch-overlap", action="store_true",
        help="Two micro-batches take turns; advice tries both.",
    )  # fmt: skip
    group.add_argument(
        "--imbalance", type=float, metavar="X",
        help="Rows of the busiest rank over the mean; published values by default.",
    )  # fmt: skip
    group.add_argument(
        "--expert-load", type=Path, metavar="FILE",
        help="Recorded loads of experts, .json or .pt; gives the imbalance after placing by them.",
    )  # fmt: skip
    group.add_argument(
        "--mtp-tokens", type=int, default=0, metavar="N",
        help="Drafted per request and step (default: %(default)s).",
    )  # fmt: skip
    group.add_argument(
        "--mtp-acceptance", type=float, default=0.85, metavar="X",
        help="Chance that a draft is accepted (default: %(default)s); 0.85 to 0.9 for the first"
        " (DeepSeek-V3 report, 5.4.3).",
    )  # fmt: skip
    group.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N",
        help="Most tokens in a step (per rank), prompts are cut into chunks of it; by default room"
        " for the batch.",
    )  # fmt: skip
    group.add_argument(
        "--prefill-load", type=float, default=0.7, metavar="X",
        help="Share of its time that a prefill engine is busy (default: %(default)s); prompts wait"
        " as in an M/D/1 queue.",
    )  # fmt: skip


def _add_goal(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--gpus", type=int, metavar="N",
        help="Search how to use so many (total); finds EP size, batch and the like itself.",
    )  # fmt: skip
    group.add_argument(
        "--slo-tpot-ms", type=float, default=50.0, metavar="X",
        help="Most time of an output token (default: %(default)s).",
    )  # fmt: skip
    group.add_argument(
        "--slo-ttft-ms", type=float, default=5000.0, metavar="X",
        help="Most time from a request to its first token (default: %(default)s).",
    )  # fmt: skip
    for name, default, what in (("--input-len", 4096, "Prompt"), ("--output-len", 1024, "Output")):
        group.add_argument(
            name, type=int, default=default, metavar="N",
            help=f"{what} tokens of a request (default: %(default)s).",
        )  # fmt: skip
