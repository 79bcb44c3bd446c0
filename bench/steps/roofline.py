"""What each stage of a step must move and multiply at least, and how long the machine needs for it.

Bytes and FLOPs are counted from shapes, under even routing. A tensor counts once: read if it goes
in, written if it comes out; a weight counts if any token needs it. What travels to other ranks is
read there and written here. Scheduling, agreement and the like have no floor worth a count.

Shape letters: T tokens of a rank, K choices, R ranks, E experts, H hidden, I expert intermediate,
N heads, P no-rope part of a head, C latent rank, V value size of a head.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bench.measure import memory_copy_ceiling, product_ceiling
from moe_ep.config import EngineConfig, ModelConfig
from moe_ep.engine.memory import VALUE_BYTES, WeightStorage
from moe_ep.fp8 import num_blocks
from moe_ep.progress import Stage

_INDEX_BYTES, _WEIGHT_BYTES = 8, 4  # of a choice


@dataclass(frozen=True)
class Cost:
    """Of a stage in one layer, or in one step outside the layers; ``times`` so many of them.

    operands: what is multiplied, which says whose rate bounds the FLOPs.
    """

    num_bytes: float
    num_flops: float = 0.0
    operands: str = ""
    times: int = 1


@dataclass(frozen=True)
class Ceilings:
    """Measured on this machine, on all ranks at once. Copy counts bytes read and bytes written;
    flops_per_s by type of the operands."""

    copy_bytes_per_s: float
    flops_per_s: Mapping[str, float]

    def floor(self, cost: Cost) -> tuple[float, str]:
        """Seconds that the cost takes at least, and what bounds it: ``copy`` or ``product``."""
        copying = cost.num_bytes / self.copy_bytes_per_s
        products = cost.num_flops / self.flops_per_s[cost.operands] if cost.num_flops else 0.0
        return cost.times * max(copying, products), "product" if products > copying else "copy"


@dataclass(frozen=True)
class Load:
    """One rank's part of a step: ``num_requests``, each with ``context`` tokens in the cache and
    ``length`` more to compute."""

    num_requests: int
    context: int
    length: int

    @property
    def num_tokens(self) -> int:
        return self.num_requests * self.length

    @property
    def num_scores(self) -> int:
        """Pairs of a query and a token that it sees."""
        return self.num_requests * (
            self.length * self.context + self.length * (self.length + 1) // 2
        )


def measure_ceilings(device: torch.device, dtype: str) -> Ceilings:
    if device.type == "cuda":
        from bench.gpu import clock

        found = clock.measure_ceilings(clock.CudaTimer(num_samples=10), device)
        rates = {"bfloat16": found.bfloat16_flops_per_s, "fp8": found.fp8_flops_per_s}
        return Ceilings(found.copy_bytes_per_s, rates)
    return Ceilings(memory_copy_ceiling(), {dtype: product_ceiling(getattr(torch, dtype))})


class Roofline:
    """config: resolved, backends included."""

    def __init__(self, config: EngineConfig, model: ModelConfig, load: Load) -> None:
        self.model, self.load = model, load
        self.num_ranks = config.ep_size
        self.dtype = config.dtype
        self.size = VALUE_BYTES[config.dtype]
        storage = WeightStorage.of(config, model)
        self.expert_dtype = storage.expert_dtype
        self.linear_dtype = "fp8" if storage.keeps_fp8 else config.dtype
        hidden, payload = model.hidden_size, config.ep_dispatch_dtype
        scales = num_blocks(hidden) * _WEIGHT_BYTES if payload == "fp8" else 0
        self.row_bytes = hidden * VALUE_BYTES[payload] + scales
        self.token_bytes = hidden * self.size

    def costs(self) -> dict[Stage, Cost]:
        """Per stage; see ``Cost.times``."""
        return self._outside() | self._attention() | self._dense() | self._moe()

    def _outside(self) -> dict[Stage, Cost]:
        model, num_tokens = self.model, self.load.num_tokens
        rows = self.load.num_requests  # one of each is sampled
        logits = rows * model.vocab_size * 4
        head = model.vocab_size * model.hidden_size
        # Two norms (in, out) and two sums (in, in, out); one sum more with a shared expert.
        shared = 3 * model.num_moe_layers if model.num_shared_experts else 0
        rows_moved = 10 * model.num_layers + shared
        return {
            Stage.EMBEDDING: Cost(2 * num_tokens * self.token_bytes),
            Stage.NORMS: Cost(rows_moved * num_tokens * self.token_bytes),
            Stage.HEAD: Cost(
                head * self.size + rows * self.token_bytes + logits, 2 * rows * head, self.dtype
            ),
            Stage.SAMPLING: Cost(logits),
        }

    def _attention(self) -> dict[Stage, Cost]:
        model, num_tokens, times = self.model, self.load.num_tokens, self.model.num_layers
        hidden, query = model.hidden_size, model.num_heads * model.qk_head_dim
        rank = model.q_lora_rank
        first = hidden * ((query if rank is None else rank) + model.latent_dim)
        projections = first + (0 if rank is None else rank * query)
        out = model.num_heads * model.v_head_dim
        made = num_tokens * (query + 2 * model.latent_dim) * self.size
        return {
            Stage.ATTENTION_PROJECTIONS: self._linear(projections, hidden, made, times),
            Stage.ATTENTION_CORE: self._core(times),
            Stage.ATTENTION_OUTPUT: self._linear(
                out * hidden, out, num_tokens * self.token_bytes, times
            ),
        }

    def _core(self, times: int) -> Cost:
        """Absorb for decodes, expand for prefills; see ``attention/mla.py``."""
        model, load, heads = self.model, self.load, self.model.num_heads
        num_tokens, rank = load.num_tokens, model.kv_lora_rank
        up = heads * (model.qk_nope_head_dim + model.v_head_dim) * rank
        cached = load.num_requests * (load.context + load.length)
        moved = num_tokens * heads * (model.qk_head_dim + model.v_head_dim)
        if load.length == 1:
            flops = num_tokens * up + load.num_scores * heads * (model.latent_dim + rank)
        else:
            flops = cached * up + load.num_scores * heads * (model.qk_head_dim + model.v_head_dim)
        num_bytes = (up + cached * model.latent_dim + moved) * self.size
        return Cost(num_bytes, 2 * flops, self.dtype, times)

    def _dense(self) -> dict[Stage, Cost]:
        times = self.model.first_k_dense_replace
        return {Stage.DENSE_MLP: self._mlp(self.model.intermediate_size, times)} if times else {}

    def _moe(self) -> dict[Stage, Cost]:
        model, num_tokens, times = self.model, self.load.num_tokens, self.model.num_moe_layers
        hidden, inner = model.hidden_size, model.moe_intermediate_size
        gate = model.num_experts * hidden
        made = num_tokens * self.token_bytes + self._choices * (_INDEX_BYTES + _WEIGHT_BYTES)
        weights = self._used_experts * 3 * hidden * inner
        rows = self._choices * (self.row_bytes + self.token_bytes)
        costs = {
            Stage.GATE: Cost(gate * 4 + made, 2 * num_tokens * gate, self.dtype, times),
            Stage.EXPERTS: Cost(
                weights * VALUE_BYTES[self.expert_dtype] + rows,
                2 * self._choices * 3 * hidden * inner,
                self.expert_dtype,
                times,
            ),
        }
        if model.num_shared_experts:
            costs[Stage.SHARED_EXPERT] = self._mlp(inner * model.num_shared_experts, times)
        return costs | self._exchange(times)

    def _exchange(self, times: int) -> dict[Stage, Cost]:
        """A rank alone lays out what it has at once, and adds it up."""
        x = self.load.num_tokens * self.token_bytes
        laid_out, outputs = self._choices * self.row_bytes, self._choices * self.token_bytes
        if self.num_ranks == 1:
            return {
                Stage.DISPATCH_SEND: Cost(x + laid_out, times=times),
                Stage.COMBINE_SEND: Cost(outputs + x, times=times),
            }
        rows = self._rows
        travelled = 2 * rows * (1 - 1 / self.num_ranks)  # read there, written here
        return {
            Stage.DISPATCH_SEND: Cost(x + rows * self.row_bytes, times=times),
            Stage.DISPATCH_WAIT: Cost(travelled * self.row_bytes, times=times),
            Stage.DISPATCH_LAYOUT: Cost(rows * self.row_bytes + laid_out, times=times),
            Stage.COMBINE_SEND: Cost(outputs + rows * self.token_bytes, times=times),
            Stage.COMBINE_WAIT: Cost(travelled * self.token_bytes, times=times),
            Stage.COMBINE_SUMS: Cost(rows * self.token_bytes + x, times=times),
        }

    @property
    def _choices(self) -> int:
        """Made by this rank; as many it gets, under even routing."""
        return self.load.num_tokens * self.model.num_experts_per_tok

    @property
    def _rows(self) -> float:
        """Rows that this rank sends and gets, to and from itself included: a token goes once to
        each rank that has some of its experts."""
        model, ranks = self.model, self.num_ranks
        experts, chosen = model.num_experts, model.num_experts_per_tok
        none_here = math.comb(experts - experts // ranks, chosen) / math.comb(experts, chosen)
        return self.load.num_tokens * ranks * (1 - none_here)

    @property
    def _used_experts(self) -> float:
        """Experts of this rank that at least one token of all ranks chose."""
        model = self.model
        missed = 1 - model.num_experts_per_tok / model.num_experts
        all_tokens = self.load.num_tokens * self.num_ranks
        return model.num_experts / self.num_ranks * (1 - missed**all_tokens)

    def _mlp(self, inner: int, times: int) -> Cost:
        made = self.load.num_tokens * self.token_bytes
        return self._linear(3 * self.model.hidden_size * inner, self.model.hidden_size, made, times)

    def _linear(self, weight: int, width: int, made_bytes: float, times: int) -> Cost:
        """A product of T rows of ``width`` with ``weight`` values."""
        num_tokens = self.load.num_tokens
        weights = weight * VALUE_BYTES[self.linear_dtype]
        num_bytes = weights + num_tokens * width * self.size + made_bytes
        return Cost(num_bytes, 2 * num_tokens * weight, self.linear_dtype, times)
