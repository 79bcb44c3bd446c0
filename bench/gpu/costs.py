"""What a kernel must move and multiply at least, and how long that takes at the measured ceilings.

Plain arithmetic. Every tensor counts once: read if it is an input, written if it is an output; what
caches save or a kernel reads twice is the kernel's business. Weights of slots without rows and rows
outside the layout do not count.

Shape letters: T tokens, K choices per token, E experts, S slots, H hidden, I expert intermediate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from attention import AttentionSpec
from moe_ep.fp8 import num_blocks

FP8_BYTES, BF16_BYTES, WORD_BYTES, INDEX_BYTES = 1, 2, 4, 8
Operands = Literal["bfloat16", "fp8"]
Limit = Literal["copy", "matrix"]


@dataclass(frozen=True)
class Cost:
    """operands: what is multiplied, which says whose matrix rate bounds the FLOPs; None without."""

    num_bytes: int
    num_flops: int = 0
    operands: Operands | None = None


@dataclass(frozen=True)
class Ceilings:
    """Measured on this GPU. Copy counts bytes read and bytes written. empty_call: seconds that the
    clock shows for doing nothing, which every latency contains."""

    copy_bytes_per_s: float
    bfloat16_flops_per_s: float
    fp8_flops_per_s: float
    empty_call: float

    def floor(self, cost: Cost) -> tuple[float, Limit]:
        """Seconds that the cost takes at least, and which ceiling says so."""
        copying = cost.num_bytes / self.copy_bytes_per_s
        rates = {"bfloat16": self.bfloat16_flops_per_s, "fp8": self.fp8_flops_per_s}
        multiplying = cost.num_flops / rates[cost.operands] if cost.operands else 0.0
        return (multiplying, "matrix") if multiplying > copying else (copying, "copy")


def scale_bytes(num_rows: int, width: int) -> int:
    """One float32 per row and 128 columns."""
    return num_rows * num_blocks(width) * WORD_BYTES


def quantize_cost(num_rows: int, width: int) -> Cost:
    return Cost(num_rows * width * (BF16_BYTES + FP8_BYTES) + scale_bytes(num_rows, width))


def swiglu_cost(num_rows: int, intermediate: int) -> Cost:
    """Gate and up in BF16 in, FP8 and scales out."""
    values = num_rows * intermediate * (2 * BF16_BYTES + FP8_BYTES)
    return Cost(values + scale_bytes(num_rows, intermediate))


def grouped_gemm_cost(counts: Sequence[int], width: int, depth: int) -> Cost:
    """FP8 rows and weights with scales in, BF16 out; counts: rows of each slot."""
    num_rows, num_used = sum(counts), sum(count > 0 for count in counts)
    weight = width * depth * FP8_BYTES + num_blocks(width) * num_blocks(depth) * WORD_BYTES
    rows_in = num_rows * depth * FP8_BYTES + scale_bytes(num_rows, depth)
    rows_out = num_rows * width * BF16_BYTES
    return Cost(num_used * weight + rows_in + rows_out, 2 * num_rows * width * depth, "fp8")


def mla_decode_cost(lengths: Sequence[int], num_heads: int, rank: int, rope: int) -> Cost:
    """One query token per request; lengths: cached latents of each, which all heads share."""
    latents = sum(lengths) * (rank + rope)
    queries_and_out = len(lengths) * num_heads * (2 * rank + rope)
    num_flops = 2 * num_heads * sum(lengths) * (2 * rank + rope)
    return Cost((latents + queries_and_out) * BF16_BYTES, num_flops, "bfloat16")


def mla_prefill_cost(lens: Sequence[tuple[int, int]], spec: AttentionSpec) -> Cost:
    """lens: cached and new tokens of each request. Every cached latent is rebuilt once; a query
    meets the keys up to its own."""
    num_keys = sum(context + query for context, query in lens)
    num_queries = sum(query for _, query in lens)
    num_pairs = sum(query * context + query * (query + 1) // 2 for context, query in lens)
    rebuilt = spec.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    width = rebuilt + spec.num_heads * spec.qk_rope_head_dim  # of a query, its result and a pair
    values = num_keys * spec.latent_dim + rebuilt * spec.kv_lora_rank + num_queries * width
    num_flops = 2 * (num_keys * rebuilt * spec.kv_lora_rank + num_pairs * width)
    return Cost(values * BF16_BYTES, num_flops, "bfloat16")


def route_cost(num_tokens: int, num_experts: int, num_topk: int) -> Cost:
    """float32 logits and bias in, an index and a float32 weight per choice out."""
    logits = (num_tokens + 1) * num_experts * WORD_BYTES
    return Cost(logits + num_tokens * num_topk * (INDEX_BYTES + WORD_BYTES))


def map_to_slots_cost(num_tokens: int, num_topk: int, num_experts: int) -> Cost:
    """An index in and one out per choice; the table is read, the loads are read and written."""
    return Cost(INDEX_BYTES * (2 * num_tokens * num_topk + 3 * num_experts))


def place_cost(num_tokens: int, num_topk: int, num_slots: int) -> Cost:
    """A slot in and an int32 position out per choice, an int32 per slot."""
    return Cost(num_tokens * num_topk * (INDEX_BYTES + WORD_BYTES) + num_slots * WORD_BYTES)


def permute_cost(num_tokens: int, num_topk: int, width: int) -> Cost:
    """FP8 rows; every choice has a place."""
    rows = num_tokens * (1 + num_topk) * width * FP8_BYTES
    return Cost(rows + num_tokens * num_topk * WORD_BYTES)


def unpermute_cost(num_tokens: int, num_topk: int, width: int) -> Cost:
    """BF16 rows; every choice has a place and a float32 weight."""
    rows = num_tokens * (1 + num_topk) * width * BF16_BYTES
    return Cost(rows + num_tokens * num_topk * 2 * WORD_BYTES)


def write_latent_cost(num_tokens: int, rank: int, rope: int) -> Cost:
    """The raw latent in, two copies out; cosines, sines and a slot per token; the norm's weight."""
    latents = 3 * num_tokens * (rank + rope) * BF16_BYTES
    return Cost(latents + num_tokens * (rope * WORD_BYTES + INDEX_BYTES) + rank * BF16_BYTES)
