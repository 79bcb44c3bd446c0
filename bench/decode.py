"""Decode and prefill speed against ``transformers`` on one rank, the same weights, in one run.

``python -m bench.decode``. Parity of the logits first, then rounds that alternate between the two,
so that a change of the machine's speed meets both. The geometry is a small V3: hidden 1024,
12 layers, 32 experts top-4 of width 512 in 4 groups. Prints a table, and one JSON object last.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.measure import memory_read_ceiling
from moe_ep.config import EngineConfig
from moe_ep.engine.engine import Engine
from moe_ep.engine.request import EngineRequest, SamplingParams
from moe_ep.engine.world import World

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
    "eos_token_id": None,
}
CONTEXT = 256


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement: tokens per second of both, medians over rounds."""

    phase: str
    batch: int
    ours: float
    transformers: float

    @property
    def ratio(self) -> float:
        return self.ours / self.transformers


class Peer:
    """``transformers``' own model and generation cache, in its default configuration."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()

    def prefill(self, prompts: torch.Tensor) -> tuple[float, Any]:
        """Seconds for the prompts ``[B, S]``, and the model's output with its cache."""
        start = time.perf_counter()
        out = self.model(prompts, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - start, out

    def decode(self, prompts: torch.Tensor, num_steps: int) -> float:
        """Median seconds per step after the prompts."""
        _, out = self.prefill(prompts)
        seconds = []
        for _ in range(num_steps + 1):
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            start = time.perf_counter()
            out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[1:])


class Ours:
    """One rank's engine, stepped from here."""

    def __init__(self, directory: Path, num_threads: int) -> None:
        config = EngineConfig(
            model=str(directory), num_kv_blocks=256, max_num_batched_tokens=32 * CONTEXT
        )
        world = World(rank=0, num_ranks=1, store=None, timeout_s=60.0)
        self.engine = Engine.create(config, world, num_threads)
        self._num_requests = 0

    def _submit(self, prompts: torch.Tensor, max_tokens: int, **params: Any) -> None:
        sampling = SamplingParams(
            temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True, **params
        )
        names = [f"{self._num_requests + i}" for i in range(len(prompts))]
        self._num_requests += len(prompts)
        rows = zip(names, prompts.tolist(), strict=True)
        self.engine.submit([EngineRequest(name, tuple(row), sampling) for name, row in rows])

    def _step(self) -> float:
        start = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - start

    def prefill(self, prompts: torch.Tensor) -> float:
        self._submit(prompts, 1)
        seconds = self._step()
        self.engine.poll(0.0)
        return seconds

    def decode(self, prompts: torch.Tensor, num_steps: int) -> float:
        self._submit(prompts, num_steps + 2)
        self._step()  # prefill, and the first token
        seconds = [self._step() for _ in range(num_steps + 1)]
        self.engine.poll(0.0)
        return statistics.median(seconds[1:])

    def first_logprobs(self, prompt: torch.Tensor, num_top: int) -> dict[int, float]:
        self._submit(prompt[None], 1, logprobs=num_top)
        self._step()
        entry = self.engine.poll(0.0)[0].logprobs[0]
        return dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
