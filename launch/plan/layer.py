"""The stages of one layer on one rank, for one micro-batch; names are the engine's own stages.

Shapes follow the decoder (``moe_ep/model``, ``attention/mla.py``): one product for q_a and kv_a,
absorbed products per head in decode, one grouped product each for gate-up and down.
Shape letters: T tokens, H hidden, N heads.
"""

import math
from dataclasses import dataclass, replace

from launch.plan.cards import Card, Fabric
from launch.plan.exchange import Exchange
from launch.plan.kernels import (
    Cost,
    Parameters,
    elementwise,
    mla_decode_core,
    prefill_core,
    product,
)
from moe_ep.config import ModelConfig
from moe_ep.progress import Stage

NORMAL_MODE_SMS = 24  # that a normal-mode exchange takes while it runs (DeepEP's tuned configs)
Stages = dict[Stage, Cost]


@dataclass(frozen=True)
class Deployment:
    """What runs where. num_slots: experts of a rank in each layer. imbalance: rows of the busiest
    rank over the mean. cache_value_bytes: 2 for BF16 latents, 1 for FP8. overlap: two
    micro-batches take turns."""

    model: ModelConfig
    card: Card
    fabric: Fabric
    ep_size: int
    num_slots: int
    imbalance: float = 1.0
    cache_value_bytes: int = 2
    overlap: bool = False

    @property
    def weights(self) -> str:
        """``fp8`` or ``bfloat16``: what products multiply."""
        return self.model.quantization or "bfloat16"

    @property
    def exchange(self) -> Exchange:
        return Exchange(
            card=self.card,
            fabric=self.fabric,
            model=self.model,
            ep_size=self.ep_size,
            imbalance=self.imbalance,
        )

    def with_fewer_sms(self, num_sms: int) -> "Deployment":
        """As seen by kernels that run next to others which hold some SMs."""
        share = 1 - num_sms / self.card.num_sms
        card = replace(
            self.card,
            num_sms=self.card.num_sms - num_sms,
            fp8_flops=self.card.fp8_flops * share,
            bf16_flops=self.card.bf16_flops * share,
        )
        return replace(self, card=card)


@dataclass(frozen=True)
class Batch:
    """One rank's tokens in one step. num_tokens: query tokens. context: cached tokens per request
    in decode, length of each prompt in prefill. queries_per_request: 1 and drafted tokens.
    num_drafts: passes of the draft layer after the step. expansions: how often each token's keys
    are made from its latent in prefill, above 1 where later chunks of a prompt do it again."""

    phase: str
    num_tokens: float
    context: float
    queries_per_request: float = 1.0
    num_drafts: int = 0
    expansions: float = 1.0

    @property
    def num_requests(self) -> float:
        """In prefill, prompts that end in the step, on average."""
        per_request = self.queries_per_request if self.phase == "decode" else self.context
        return self.num_tokens / per_request

    def half(self) -> "Batch":
        return replace(self, num_tokens=self.num_tokens / 2)


def attention_stages(d: Deployment, batch: Batch, p: Parameters) -> Stages:
    """Projections, core and output of one layer, and the norms around them.

    Traffic of the small kernels, in bytes per token: a norm reads and writes the hidden states and
    the residual; to quantise is to read 2 bytes and write 1; rotary embedding touches its own
    dimensions only.
    """
    model, tokens, card = d.model, batch.num_tokens, d.card
    hidden, heads = model.hidden_size, model.num_heads
    q_out = heads * model.qk_head_dim
    first_q = model.q_lora_rank or q_out
    inner = heads * model.v_head_dim
    projections = _dense(d, p, tokens, first_q + model.latent_dim, hidden)
    if model.q_lora_rank is not None:
        projections += _dense(d, p, tokens, q_out, model.q_lora_rank)
    small = 3 * hidden + 4 * model.latent_dim + 4 * heads * model.qk_rope_head_dim
    small += 7 * (model.q_lora_rank or 0)
    projections += elementwise(card, p, traffic=tokens * small, kernels=5)
    output = elementwise(card, p, traffic=3 * tokens * inner)
    output += _dense(d, p, tokens, hidden, inner)
    if batch.phase == "decode":
        projections += _per_head(d, p, tokens, model.kv_lora_rank, model.qk_nope_head_dim)
        output += _per_head(d, p, tokens, model.v_head_dim, model.kv_lora_rank)
    else:
        projections += _expanded_keys(d, p, tokens * batch.expansions)
    return {
        Stage.NORMS: elementwise(card, p, traffic=2 * 8 * tokens * hidden, kernels=2),
        Stage.ATTENTION_PROJECTIONS: projections,
        Stage.ATTENTION_CORE: _core(d, batch, p),
        Stage.ATTENTION_OUTPUT: output,
    }


def _expanded_keys(d: Deployment, p: Parameters, tokens: float) -> Cost:
    """Keys and values of every head from the latents; the keys are copied next to the rotary part
    that all heads share."""
    model = d.model
    keys = model.num_heads * model.qk_nope_head_dim
    folded = keys + model.num_heads * model.v_head_dim
    copied = 3 * model.kv_lora_rank + 2 * keys + 2 * model.num_heads * model.qk_head_dim
    return _dense(d, p, tokens, folded, model.kv_lora_rank) + elementwise(
        d.card, p, traffic=tokens * copied, kernels=2
    )


def moe_stages(d: Deployment, batch: Batch, p: Parameters) -> Stages:
    """Gate, exchange, experts and shared expert of one layer; the exchange is counted as if nothing
    overlapped it, send and wait together as the wait."""
    model, tokens = d.model, batch.num_tokens
    travel = d.exchange.low_latency if batch.phase == "decode" else d.exchange.normal
    stages = {
        Stage.GATE: gate(d, tokens, p),
        Stage.DISPATCH_WAIT: travel(p, tokens, "dispatch"),
        Stage.EXPERTS: experts(d, batch, p),
        Stage.COMBINE_WAIT: travel(p, tokens, "combine"),
    }
    if d.ep_size == 1:
        stages[Stage.DISPATCH_WAIT] = stages[Stage.COMBINE_WAIT] = Cost(0.0, "latency")
    if model.num_shared_experts:
        width = model.num_shared_experts * model.moe_intermediate_size
        stages[Stage.SHARED_EXPERT] = mlp(d, p, tokens, width)
    return stages


def gate(d: Deployment, tokens: float, p: Parameters) -> Cost:
    hidden = d.model.hidden_size
    scores = product(d.card, p, m=tokens, n=d.model.num_experts, k=hidden, dtype="bfloat16")
    return scores + elementwise(d.card, p, traffic=4 * tokens * hidden, kernels=3)


def experts(d: Deployment, batch: Batch, p: Parameters, *, is_random: bool = True) -> Cost:
    """Of the busiest rank. is_random: some slots get no token when there are few; otherwise rows
    are dealt out evenly."""
    model = d.model
    rows = batch.num_tokens * model.num_experts_per_tok / d.num_slots * d.imbalance  # of a slot
    active = d.num_slots * (1 - math.exp(-rows) if is_random else min(1.0, rows))
    return _grouped_mlp(
        d, p, active, rows * d.num_slots / active, is_prefill=batch.phase != "decode"
    )


def mlp(d: Deployment, p: Parameters, tokens: float, width: int) -> Cost:
    """A SwiGLU network: two products and the activation, with quantisation before each."""
    hidden = d.model.hidden_size
    return (
        _dense(d, p, tokens, 2 * width, hidden)
        + elementwise(d.card, p, traffic=tokens * (3 * hidden + 5 * width), kernels=2)
        + _dense(d, p, tokens, hidden, width)
    )


def dense_stages(d: Deployment, batch: Batch, p: Parameters) -> Stages:
    """The feed-forward network of a dense layer."""
    return {Stage.DENSE_MLP: mlp(d, p, batch.num_tokens, d.model.intermediate_size)}


def _grouped_mlp(
    d: Deployment, p: Parameters, groups: float, rows: float, *, is_prefill: bool
) -> Cost:
    model, total = d.model, groups * rows
    inner, hidden = model.moe_intermediate_size, model.hidden_size
    # Prefill scatters FP8 rows into groups and gathers BF16 ones again.
    moved = total * 5 * hidden if is_prefill else 0.0
    return (
        product(d.card, p, m=rows, n=2 * inner, k=hidden, groups=groups, dtype=d.weights)
        + elementwise(d.card, p, traffic=total * 5 * inner + moved, kernels=1)
        + product(d.card, p, m=rows, n=hidden, k=inner, groups=groups, dtype=d.weights)
    )


def _dense(d: Deployment, p: Parameters, tokens: float, n: int, k: int) -> Cost:
    return product(d.card, p, m=tokens, n=n, k=k, dtype=d.weights)


def _per_head(d: Deployment, p: Parameters, tokens: float, n: int, k: int) -> Cost:
    heads = d.model.num_heads
    return product(d.card, p, m=tokens, n=n, k=k, groups=heads, dtype="bfloat16")


def _core(d: Deployment, batch: Batch, p: Parameters) -> Cost:
    model = d.model
    if batch.phase == "decode":
        return mla_decode_core(
            d.card, p,
            num_queries=batch.num_tokens,
            context=batch.context,
            num_heads=model.num_heads,
            latent_dim=model.latent_dim,
            value_dim=model.kv_lora_rank,
            cache_value_bytes=d.cache_value_bytes,
            queries_per_request=batch.queries_per_request,
        )  # fmt: skip
    return prefill_core(
        d.card, p,
        num_tokens=batch.num_tokens,
        context=batch.context,
        num_heads=model.num_heads,
        qk_dim=model.qk_head_dim,
        value_dim=model.v_head_dim,
    )  # fmt: skip
