"""The attention core through FlashMLA: its dense decode kernel for Hopper. Prefill is ours.

The library ends the process on some inputs that its argument checks let through, so ``supports``
refuses them first. Its schedule of a step is an object that the first layer's call fills, on the
device, from the lengths of the step, and that it would use again for other lengths without a word:
here every plan makes its own, which all layers of the step share. In a captured step the first
layer's call is captured with what fills it, so every replay computes it anew from its own lengths.

Shape letters: D decode tokens, b requests of a call, s query tokens of each, N heads.
"""

import importlib
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attention.base import BLOCK_SIZE, AttentionBatch, AttentionSpec, StaticPlan
from attention.block_tables import joined
from attention.gpu_prefill import GpuPrefill
from attention.torch_prefill import PrefillPlan

PAGE_SIZE = 64
LATENT_DIM, KV_LORA_RANK = 576, 512
MAX_SM_PARTS = 160  # the library ends the process above; parts never outnumber the SMs


@dataclass(frozen=True)
class _Call:
    """Decodes with equally many new tokens, which one call of the library serves.

    token_rows: int64 ``[b * s]``, rows among the decode tokens; None when these are all of them in
    order. block_table: int32 ``[b, blocks]``; entries past a request's blocks are 0 and not read.
    lengths: int32 ``[b]``, cached tokens, the new ones included. schedule: the library's object.
    """

    num_queries: int
    token_rows: torch.Tensor | None
    block_table: torch.Tensor
    lengths: torch.Tensor
    schedule: Any


@dataclass(frozen=True)
class FlashMlaPlan(PrefillPlan):
    calls: tuple[_Call, ...]


class FlashMlaAttention(GpuPrefill):
    """Absorb path: one call of FlashMLA per layer and number of new tokens. Expand path:
    ``GpuPrefill``."""

    def __init__(self, spec: AttentionSpec, *, device: torch.device | str = "cpu") -> None:
        super().__init__(spec, device=device)
        self._library = importlib.import_module("flash_mla")

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if spec.dtype is not torch.bfloat16:
            return f"flash_mla attends in bfloat16 here, not {spec.dtype}"
        sizes = (spec.latent_dim, spec.kv_lora_rank)
        if sizes != (LATENT_DIM, KV_LORA_RANK):
            return (
                f"flash_mla reads latents of {LATENT_DIM} values, {KV_LORA_RANK} of them"
                f" compressed; this model has {sizes[0]} and {sizes[1]}"
            )
        if spec.num_heads < 1:
            return f"num_heads: {spec.num_heads} given, must be at least 1"
        if BLOCK_SIZE != PAGE_SIZE:
            return f"flash_mla reads pages of {PAGE_SIZE} tokens, the cache has {BLOCK_SIZE}"
        return _library_problem() or _device_problem()

    def plan(self, batch: AttentionBatch) -> FlashMlaPlan:
        num_queries = sorted(set(batch.query_lens[: batch.num_decodes]))
        return FlashMlaPlan(
            num_tokens=batch.num_tokens,
            num_decode_tokens=batch.num_decode_tokens,
            calls=tuple(self._plan_call(batch, count) for count in num_queries),
            prefills=self.plan_prefills(batch),
        )

    @classmethod
    def capture_problem(cls) -> str | None:
        return None

    def static_plan(
        self, *, num_requests: int, max_blocks: int, num_blocks: int
    ) -> "FlashMlaStaticPlan":
        return FlashMlaStaticPlan(num_requests, max_blocks, self)

    def new_schedule(self) -> Any:
        """The library's object, empty; for one forward pass."""
        return self._library.get_mla_metadata()[0]

    def decode(self, *, q: torch.Tensor, cache: torch.Tensor, plan: FlashMlaPlan) -> torch.Tensor:
        assert plan.calls, "this step has no decodes"
        if len(plan.calls) == 1:
            return self._attend(q, cache, plan.calls[0])
        out = q.new_empty(*q.shape[:2], KV_LORA_RANK)
        for call in plan.calls:
            assert call.token_rows is not None
            out[call.token_rows] = self._attend(q[call.token_rows], cache, call)
        return out

    def _attend(self, q: torch.Tensor, cache: torch.Tensor, call: _Call) -> torch.Tensor:
        """q ``[b * s, N, 576]`` -> ``[b * s, N, 512]``."""
        shape = (-1, call.num_queries, *q.shape[1:])
        out, _ = self._library.flash_mla_with_kvcache(
            q.contiguous().view(shape),
            cache,
            call.block_table,
            call.lengths,
            KV_LORA_RANK,
            call.schedule,
            softmax_scale=self.spec.softmax_scale,
            causal=True,
        )
        return out.flatten(0, 1)

    def _plan_call(self, batch: AttentionBatch, num_queries: int) -> _Call:
        lens = batch.query_lens[: batch.num_decodes]
        requests = [request for request, count in enumerate(lens) if count == num_queries]
        lengths = [batch.context_lens[request] + num_queries for request in requests]
        tables = [batch.block_tables[request] for request in requests]
        return _Call(
            num_queries=num_queries,
            token_rows=None if len(requests) == len(lens) else self._token_rows(lens, requests),
            block_table=_block_table(tables, lengths).to(self.device),
            lengths=torch.tensor(lengths, dtype=torch.int32).to(self.device),
            schedule=self.new_schedule(),
        )

    def _token_rows(self, lens: list[int], requests: list[int]) -> torch.Tensor:
        """Rows of these requests' tokens among all decode tokens."""
        rows = torch.arange(sum(lens)).split(lens)
        return torch.cat([rows[request] for request in requests]).to(self.device)


class FlashMlaStaticPlan(StaticPlan):
    """Requests of padding have no tokens, for which the library gives zeros. Entries of the block
    table past a request's blocks are those of earlier steps, and not read."""

    def __init__(self, num_requests: int, max_blocks: int, backend: FlashMlaAttention) -> None:
        self._backend = backend
        options: Any = {"dtype": torch.int32, "device": backend.device}
        self._block_table = torch.zeros(num_requests, max_blocks, **options)
        self._lengths = torch.zeros(num_requests, **options)

    def update(self, batch: AttentionBatch) -> None:
        lengths = [context + 1 for context in batch.context_lens]
        padding = [0] * (len(self._lengths) - len(lengths))
        self._lengths.copy_(torch.tensor(lengths + padding, dtype=torch.int32))
        if lengths:
            table = _block_table(batch.block_tables, lengths)
            self._block_table[: table.shape[0], : table.shape[1]].copy_(table)

    def plan(self) -> FlashMlaPlan:
        num_requests = len(self._lengths)
        call = _Call(
            num_queries=1,
            token_rows=None,
            block_table=self._block_table,
            lengths=self._lengths,
            schedule=self._backend.new_schedule(),
        )
        return FlashMlaPlan(num_requests, num_requests, prefills=(), calls=(call,))


def _block_table(tables: "list[array[int]]", lengths: list[int]) -> torch.Tensor:
    """int32 on the CPU, a row for each request, as wide as the most blocks that one needs."""
    used = [table[: -(-length // PAGE_SIZE)] for table, length in zip(tables, lengths, strict=True)]
    counts = np.array(list(map(len, used)))
    padded = np.zeros((len(used), counts.max()), dtype=np.int32)
    padded[np.arange(padded.shape[1]) < counts[:, None]] = joined(used)
    return torch.from_numpy(padded)


def _library_problem() -> str | None:
    try:
        importlib.import_module("flash_mla")
    except (ImportError, AssertionError, OSError) as error:
        return f"flash_mla cannot be imported: {error}"
    return None


def _device_problem() -> str | None:
    try:
        device = torch.cuda.get_device_properties()
    except (AssertionError, RuntimeError) as error:
        return f"flash_mla needs a GPU: {error}"
    if device.major != 9:
        return (
            f"dense decode of flash_mla needs SM90, this device is SM{device.major}{device.minor}"
        )
    if device.multi_processor_count > MAX_SM_PARTS:
        return (
            f"flash_mla would end the process on a device with {device.multi_processor_count} SMs,"
            f" more than {MAX_SM_PARTS}"
        )
    return None
