"""Decode and prefill speed against ``transformers``: one rank, the same weights, one run.

``python -m bench.decode``. Each runs in a process of its own, as its users run it, and the two take
turns, so that a change of the machine's speed meets both. Parity of the logits first. The geometry
is a small V3: hidden 1024, 12 layers, 32 experts top-4 of width 512 in 4 groups. Prints a
table, and one JSON object last.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.contestants import Contestant, Ours, Remote, Transformers
from bench.measure import memory_read_ceiling
from moe_ep.config import ModelConfig

GEOMETRY: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "first_k_dense_replace": 1,
    "intermediate_size": 2816,
    "moe_intermediate_size": 512,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 384,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CALLS_PER_TURN = 3
# Largest error of the first logits, in standard deviations; what a flipped expert choice may do.
PARITY_TOLERANCE = 1.5


@dataclass(frozen=True)
class Row:
    """One comparison. seconds of every sample, of both; medians count.

    limit_tokens_per_s: what reading every weight that the step needs once would allow.
    """

    phase: str
    batch: int
    num_tokens: int
    seconds_ours: list[float]
    seconds_transformers: list[float]
    limit_tokens_per_s: float | None = None

    @property
    def ours(self) -> float:
        return self.num_tokens / statistics.median(self.seconds_ours)

    @property
    def transformers(self) -> float:
        return self.num_tokens / statistics.median(self.seconds_transformers)


def make_checkpoint(directory: Path, dtype: torch.dtype) -> None:
    """Random weights, saved by ``transformers`` itself."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**GEOMETRY))
    torch.nn.Module.to(model, dtype)
    model.save_pretrained(directory)


def num_weights_read(model: ModelConfig, batch: int) -> float:
    """Weights that a decode step of ``batch`` tokens reads at least, under even routing: an expert
    is read when at least one of the tokens chose it."""
    hidden = model.hidden_size
    attention = hidden * (model.q_lora_rank or 0) + hidden * model.latent_dim
    attention += (model.q_lora_rank or hidden) * model.num_heads * model.qk_head_dim
    per_head = model.qk_nope_head_dim + model.v_head_dim
    attention += model.num_heads * (per_head * model.kv_lora_rank + model.v_head_dim * hidden)
    share_missed = (1 - model.num_experts_per_tok / model.num_experts) ** batch
    experts = model.num_experts * (1 - share_missed) + model.num_shared_experts
    moe = 3 * hidden * model.moe_intermediate_size * experts + model.num_experts * hidden
    dense = 3 * hidden * model.intermediate_size * model.first_k_dense_replace
    layers = model.num_layers * attention + model.num_moe_layers * moe + dense
    return layers + model.vocab_size * hidden


def alternate(
    ours: Callable[[], float], peer: Callable[[], float], num_rounds: int
) -> tuple[list[float], list[float]]:
    """Samples of both in turns of a few calls, each turn less its first call: the caches and
    threads that the other has pushed out come back in it."""
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(num_rounds):
        for call, kept in zip((ours, peer), samples, strict=True):
            call()
            kept += [call() for _ in range(CALLS_PER_TURN)]
    return samples


def check_parity(ours: Contestant, peer: Contestant, prompt: torch.Tensor) -> float:
    """Largest error of the first token's log-probabilities in standard deviations; AssertionError
    beyond the tolerance."""
    expected = peer.first_logprobs(prompt)
    error = ((ours.first_logprobs(prompt) - expected).abs().max() / expected.std()).item()
    assert error < PARITY_TOLERANCE, f"logits differ by {error} standard deviations"
    return error


def compare(
    ours: Contestant, peer: Contestant, args: argparse.Namespace, limit: Callable[[int], float]
) -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    shape = (max(args.batch), args.context)
    prompts = torch.randint(0, GEOMETRY["vocab_size"], shape, generator=generator)
    rows = []
    for batch in args.batch:
        ours.start(prompts[:batch])
        peer.start(prompts[:batch])
        samples = alternate(ours.decode, peer.decode, args.steps)
        rows.append(Row("decode", batch, batch, *samples, limit(batch)))
    for batch in args.prefill_batch:
        part = prompts[:batch]
        samples = alternate(partial(ours.prefill, part), partial(peer.prefill, part), args.rounds)
        rows.append(Row("prefill", batch, part.numel(), *samples))
    return rows


def show(rows: list[Row], console: Console) -> None:
    table = Table(
        "phase", "batch", "tokens/s", "transformers", "ratio", "weight-read limit", "share"
    )
    for row in rows:
        limit = row.limit_tokens_per_s
        table.add_row(
            row.phase,
            str(row.batch),
            f"{row.ours:,.1f}",
            f"{row.transformers:,.1f}",
            f"{row.ours / row.transformers:.1f}x",
            f"{limit:,.0f}" if limit else "",
            f"{row.ours / limit:.0%}" if limit else "",
        )
    console.print(table)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="moe-ep bench decode", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--context", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32], help="decode batches")
    parser.add_argument("--prefill-batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=5, help="decode turns of each")
    parser.add_argument("--rounds", type=int, default=2, help="prefill turns of each")
    args = parser.parse_args(argv)
    console = Console()
    torch.set_num_threads(args.threads)
    ceiling = memory_read_ceiling()
    console.print(f"memory read ceiling, {args.threads} threads: {ceiling / 1e9:.1f} GB/s")
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        directory = Path(name)
        dtype = getattr(torch, args.dtype)
        make_checkpoint(directory, dtype)
        model = ModelConfig.from_path(directory)
        bandwidth = ceiling / dtype.itemsize
        peer = Remote(Transformers, directory, args.threads)
        ours = Remote(Ours, directory, args.threads)
        error = check_parity(ours, peer, torch.arange(args.context))
        console.print(f"parity: first logits differ by at most {error:.2f} standard deviations")
        rows = compare(ours, peer, args, lambda b: b * bandwidth / num_weights_read(model, b))
    show(rows, console)
    result = {
        "geometry": GEOMETRY,
        "threads": args.threads,
        "dtype": args.dtype,
        "context": args.context,
        "memory_read_bytes_per_s": ceiling,
        "parity_error_std": error,
        "rows": [asdict(row) | {"ratio": row.ours / row.transformers} for row in rows],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
