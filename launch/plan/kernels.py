"""The time of one kernel: the larger of arithmetic and memory traffic, and a launch.

Arithmetic is counted in the tiles that a kernel really computes: a tile has BLOCK rows and columns,
tiles run in waves over the SMs, and each pays a prologue that a long inner dimension hides. Traffic
is what must cross the memory bus once. What the formulas leave out is in a few efficiencies, fitted
per family of cards (``fit``). Times are in microseconds.

Shape letters: M rows, N outputs, K inputs of a product, T tokens.
"""

from collections.abc import Mapping
from typing import NamedTuple

from launch.plan.cards import Card
from moe_ep.engine.memory import VALUE_BYTES

BLOCK = 128
SMALL_BLOCK = 64  # rows of a tile where there are no more
NARROWEST = 0.25  # of a tile's columns, where full ones would leave SMs without work
# 3,000 of 3,350 GB/s on H800 (deepseek-ai/FlashMLA docs/20250422); no fitted record is bound by it.
MLA_MEMORY = 0.9
# Parameters of one family of cards, by name; see ``parameters``.
Parameters = Mapping[str, float]


class Cost(NamedTuple):
    """us: time. bound: what takes it, one of ``compute``, ``memory``, ``launch``, ``nvlink``,
    ``fabric`` and ``latency``."""

    us: float
    bound: str

    def __add__(self, other: object) -> "Cost":
        """One after the other; bound by what the longer one is bound by."""
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(self.us + other.us, self.bound if self.us >= other.us else other.bound)

    def times(self, factor: float) -> "Cost":
        return Cost(self.us * factor, self.bound)


def roofline(launch_us: float, compute_us: float, memory_us: float) -> Cost:
    """Arithmetic and traffic overlap, but not to the last: their cubes add."""
    busy = (compute_us**3 + memory_us**3) ** (1 / 3)
    longest = max(launch_us, compute_us, memory_us)
    names = {launch_us: "launch", memory_us: "memory", compute_us: "compute"}
    return Cost(launch_us + busy, names[longest])


def product(
    card: Card, p: Parameters, *, m: float, n: int, k: int, groups: float = 1.0, dtype: str = "fp8"
) -> Cost:
    """``groups`` products ``[m, k] x [k, n]`` in one launch, m rows on average in each.

    dtype: of both operands; outputs are BF16.
    """
    if m <= 0 or groups <= 0:
        return Cost(0.0, "launch")
    rows = SMALL_BLOCK if m <= SMALL_BLOCK else BLOCK
    tiles = groups * -(-m // rows) * -(-n // BLOCK)
    # Half of the last wave is empty; few tiles are cut into narrower ones.
    waves = max(tiles / card.num_sms + (0.5 if tiles > card.num_sms else 0.0), NARROWEST)
    flops = waves * card.num_sms * 2 * rows * BLOCK * (k + p["gemm_prologue_k"])
    compute = _arithmetic(card, flops, dtype, p["gemm_sm_tflops"])
    size = VALUE_BYTES[dtype]
    traffic = groups * (n * k * size + m * (k * size + 2 * n))
    memory = traffic / (card.memory_bytes_per_s * p["gemm_memory"])
    return roofline(p["launch_us"], compute, memory * 1e6)


def _arithmetic(card: Card, flops: float, dtype: str, sm_tflops: float) -> float:
    """Tensor cores at their peak, and after that what other units of the SMs must do for the same
    operations (scaling, softmax), which goes with their number: a card with few tensor cores per SM
    comes closer to its peak."""
    seconds = flops / card.flops(dtype) + flops / (card.num_sms * sm_tflops * 1e12)
    return seconds * 1e6


def elementwise(card: Card, p: Parameters, *, traffic: float, kernels: int = 1) -> Cost:
    """traffic: bytes read and written by kernels that hardly compute."""
    memory = traffic / (card.memory_bytes_per_s * p["elementwise_memory"]) * 1e6
    return roofline(kernels * p["small_launch_us"], 0.0, memory)


def mla_decode_core(
    card: Card,
    p: Parameters,
    *,
    num_queries: float,
    context: float,
    num_heads: int,
    latent_dim: int,
    value_dim: int,
    cache_value_bytes: int,
    queries_per_request: float = 1.0,
) -> Cost:
    """The absorb path: every head of a query meets every latent of its request.

    num_queries: query tokens of all requests. context: cached tokens per request.
    """
    flops = 2 * num_queries * num_heads * context * (latent_dim + value_dim)
    requests = num_queries / queries_per_request
    traffic = requests * context * latent_dim * cache_value_bytes
    traffic += 2 * num_queries * num_heads * (latent_dim + value_dim)
    compute = _arithmetic(card, flops, "bfloat16", p["mla_sm_tflops"])
    memory = traffic / (card.memory_bytes_per_s * MLA_MEMORY) * 1e6
    return roofline(p["mla_launch_us"], compute, memory)


def prefill_core(
    card: Card,
    p: Parameters,
    *,
    num_tokens: float,
    context: float,
    num_heads: int,
    qk_dim: int,
    value_dim: int,
) -> Cost:
    """The expand path over whole prompts of ``context`` tokens: half of the pairs are masked."""
    pairs = num_tokens * (context + 1) / 2
    flops = 2 * pairs * num_heads * (qk_dim + value_dim)
    traffic = 2 * num_tokens * num_heads * (2 * qk_dim + 2 * value_dim)
    compute = _arithmetic(card, flops, "bfloat16", p["prefill_sm_tflops"])
    memory = traffic / (card.memory_bytes_per_s * p["gemm_memory"]) * 1e6
    return roofline(p["mla_launch_us"], compute, memory)
