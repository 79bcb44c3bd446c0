"""Absorbed MLA decode of the torch backend against a plain loop over requests, in one run.

``python -m bench.mla_decode``. Parity with float64 first, then rounds in which both take turns over
the layers of a cache larger than the processor's. Prints a table, and one JSON object as the last
line.

The least a decode can do is to read every cached latent once: the bytes of the table are these,
without padding or what is read twice, and the ceiling is the measured speed of reading memory.
"""

import argparse
import json
import random
import time
from array import array
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from attention import AttentionBatch, AttentionSpec, LatentCache, create_attention
from attention.base import BLOCK_SIZE
from bench.measure import COLD_BYTES, Samples, measure_in_turns, memory_read_ceiling

SPEC = AttentionSpec(
    num_heads=16,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    softmax_scale=192**-0.5,
    dtype=torch.bfloat16,
)
PARITY_TOLERANCE = 2e-2  # share of a row's largest value: bfloat16 scores, weights and result


@dataclass(frozen=True)
class Row:
    """One batch. ours, loop: times of one layer, of this backend and of the plain loop."""

    name: str
    latent_bytes: int
    plan_seconds: float
    ours: Samples
    loop: Samples

    @property
    def ratio(self) -> float:
        return self.loop.median / self.ours.median

    @property
    def bytes_per_second(self) -> float:
        return self.latent_bytes / self.ours.median

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "latent_bytes": self.latent_bytes,
            "plan_seconds": self.plan_seconds,
            "median_seconds": self.ours.median,
            "quartiles": self.ours.quartiles,
            "loop_median_seconds": self.loop.median,
            "loop_quartiles": self.loop.quartiles,
            "bytes_per_second": self.bytes_per_second,
            "ratio": self.ratio,
        }


@dataclass(frozen=True)
class Problem:
    """Queries of one token per request, lengths with that token, and a cache of random latents."""

    batch: AttentionBatch
    lengths: list[int]
    q: torch.Tensor
    cache: LatentCache

    @classmethod
    def make(cls, lengths: list[int]) -> "Problem":
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        blocks = torch.randperm(sum(counts)).tolist()
        layer_bytes = len(blocks) * LatentCache.bytes_per_block(
            num_layers=1, latent_dim=SPEC.latent_dim, dtype=SPEC.dtype
        )
        cache = LatentCache(
            num_layers=-(-COLD_BYTES // layer_bytes),
            num_blocks=len(blocks),
            latent_dim=SPEC.latent_dim,
            dtype=SPEC.dtype,
        )
        cache.tensor.normal_()
        batch = AttentionBatch(
            num_decodes=len(lengths),
            query_lens=[1] * len(lengths),
            context_lens=[length - 1 for length in lengths],
            block_tables=[array("i", [blocks.pop() for _ in range(count)]) for count in counts],
            num_padded_tokens=len(lengths),
        )
        q = torch.randn(len(lengths), SPEC.num_heads, SPEC.latent_dim).to(SPEC.dtype)
        return cls(batch, lengths, q, cache)


def loop(problem: Problem, tables: list[torch.Tensor], cache: torch.Tensor) -> torch.Tensor:
    """The plain way: request by request, its latents gathered by block and cut to length."""
    outs = []
    for q, table, length in zip(problem.q, tables, problem.lengths, strict=True):
        latents = cache[table].flatten(0, 2)[:length]
        scores = (q @ latents.T).float() * SPEC.softmax_scale
        outs.append(scores.softmax(-1).to(q.dtype) @ latents[:, : SPEC.kv_lora_rank])
    return torch.stack(outs)


def check_parity(got: torch.Tensor, problem: Problem, tables: list[torch.Tensor]) -> None:
    exact = Problem(problem.batch, problem.lengths, problem.q.double(), problem.cache)
    want = loop(exact, tables, problem.cache.layer(0).double())
    error = ((got - want).abs().amax(-1) / want.abs().amax(-1)).max().item()
    if not error <= PARITY_TOLERANCE:
        raise SystemExit(f"decode differs from float64 by {error:.1%} of a row's largest value")


def measure(name: str, lengths: list[int], num_rounds: int) -> Row:
    problem = Problem.make(lengths)
    backend = create_attention("torch", SPEC)
    tables = [torch.tensor(table) for table in problem.batch.block_tables]
    backend.plan(problem.batch)  # warms up
    start = time.perf_counter()
    plan = backend.plan(problem.batch)
    plan_seconds = time.perf_counter() - start

    def ours(layer: torch.Tensor) -> torch.Tensor:
        return backend.decode(q=problem.q, cache=layer, plan=plan)

    def plain(layer: torch.Tensor) -> torch.Tensor:
        return loop(problem, tables, layer)

    check_parity(ours(problem.cache.layer(0)).double(), problem, tables)
    layers = [problem.cache.layer(idx) for idx in range(len(problem.cache.tensor))]
    samples = measure_in_turns(
        {
            "ours": [partial(ours, layer) for layer in layers],
            "loop": [partial(plain, layer) for layer in layers],
        },
        rounds=num_rounds,
    )
    return Row(
        name=name,
        latent_bytes=sum(lengths) * SPEC.latent_dim * SPEC.dtype.itemsize,
        plan_seconds=plan_seconds,
        ours=samples["ours"],
        loop=samples["loop"],
    )


def _print(rows: list[Row], ceiling: float, console: Console) -> None:
    table = Table(title="one layer of absorbed decode, 16 heads, 512 + 64, bfloat16")
    for heading in ("batch", "MB", "ms", "middle half", "plan ms", "GB/s", "ceiling", "x loop"):
        table.add_column(heading, justify="left" if heading == "batch" else "right")
    for row in rows:
        low, high = row.ours.quartiles
        table.add_row(
            row.name,
            f"{row.latent_bytes / 1e6:.1f}",
            f"{row.ours.median * 1e3:.3f}",
            f"{low * 1e3:.3f}-{high * 1e3:.3f}",
            f"{row.plan_seconds * 1e3:.2f}",
            f"{row.bytes_per_second / 1e9:.1f}",
            f"{row.bytes_per_second / ceiling:.0%}",
            f"{row.ratio:.2f}",
        )
    console.print(table)
    results = [row.as_json() for row in rows]
    print(json.dumps({"bench": "mla_decode", "read_ceiling": ceiling, "rows": results}))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="moe-ep bench mla-decode", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=256, help="cached tokens per request")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--rounds", type=int, default=5, help="times over all layers")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rng = random.Random(0)
    console = Console()
    ceiling = memory_read_ceiling()
    console.print(f"memory read ceiling, {args.threads} threads: {ceiling / 1e9:.1f} GB/s")
    cases = [(f"{size} x {args.context}", [args.context] * size) for size in args.batch]
    size = max(args.batch)
    ragged = [rng.randint(1, 2 * args.context) for _ in range(size)]
    cases += [
        (f"{size} x 1..{2 * args.context}", ragged),
        (f"1 x {16 * args.context}", [16 * args.context]),
    ]
    with torch.inference_mode():
        rows = [measure(name, lengths, args.rounds) for name, lengths in cases]
    _print(rows, ceiling, console)


if __name__ == "__main__":
    main()
