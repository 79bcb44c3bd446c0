"""Builds this rank's decoder: every tensor by its checkpoint name, from any weight source.

The one place that knows tensor names. Experts that the placement gives to other ranks are never
read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attention import AttentionBackend, AttentionSpec
from attention.mla import MLA
from eplb.placement import Placement
from moe_ep.config import ModelConfig
from moe_ep.dispatch import Dispatcher
from moe_ep.experts import Experts
from moe_ep.gate import Gate
from moe_ep.layer import MoELayer
from moe_ep.linear import Linear
from moe_ep.model.decoder import Decoder, DecoderLayer, DenseMLP
from moe_ep.model.loader import WeightSource
from moe_ep.model.norm import RMSNorm
from moe_ep.model.rope import RotaryEmbedding
from moe_ep.progress import Progress


@dataclass(frozen=True)
class DecoderParts:
    """What the decoder is built around: chosen backends, this rank's placement, and the progress.

    make_experts: returns an empty expert bank for one layer.
    """

    dtype: torch.dtype
    attention: AttentionBackend
    dispatcher: Dispatcher
    make_experts: Callable[[], Experts]
    placement: Placement
    rank: int
    progress: Progress


def attention_spec(model: ModelConfig, dtype: torch.dtype) -> AttentionSpec:
    return AttentionSpec(
        num_heads=model.num_heads,
        kv_lora_rank=model.kv_lora_rank,
        qk_nope_head_dim=model.qk_nope_head_dim,
        qk_rope_head_dim=model.qk_rope_head_dim,
        v_head_dim=model.v_head_dim,
        softmax_scale=model.softmax_scale,
        dtype=dtype,
    )


def build_decoder(model: ModelConfig, source: WeightSource, parts: DecoderParts) -> Decoder:
    """Load every tensor of this rank's share; raises ``LoadError`` when one is missing."""
    rope = RotaryEmbedding(
        dim=model.qk_rope_head_dim,
        theta=model.rope_theta,
        interleave=model.rope_interleave,
        yarn=model.yarn,
        max_positions=model.max_position_embeddings,
    )
    builder = _Builder(model, source, parts, rope)
    embedding = source.tensor("model.embed_tokens.weight", parts.dtype)
    head = embedding if model.tie_word_embeddings else source.tensor("lm_head.weight", parts.dtype)
    return Decoder(
        embedding=embedding,
        layers=[builder.layer(index) for index in range(model.num_layers)],
        final_norm=builder.norm("model.norm.weight", model.rms_norm_eps),
        lm_head=Linear(head, parts.dtype),
        rope=rope,
        progress=parts.progress,
    )


class _Builder:
    def __init__(
        self, model: ModelConfig, source: WeightSource, parts: DecoderParts, rope: RotaryEmbedding
    ) -> None:
        self.model = model
        self.source = source
        self.parts = parts
        self.rope = rope
        self.spec = attention_spec(model, parts.dtype)
        self.slot_table = parts.placement.slot_table(parts.rank)

    def layer(self, index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}."
        eps = self.model.rms_norm_eps
        is_dense = index < self.model.first_k_dense_replace
        return DecoderLayer(
            input_norm=self.norm(prefix + "input_layernorm.weight", eps),
            attention=self._attention(prefix + "self_attn."),
            post_attention_norm=self.norm(prefix + "post_attention_layernorm.weight", eps),
            mlp=self._mlp(prefix + "mlp.") if is_dense else self._moe(index, prefix + "mlp."),
        )

    def norm(self, name: str, eps: float) -> RMSNorm:
        return RMSNorm(self.source.tensor(name, self.parts.dtype), eps)

    def _linear(self, prefix: str) -> Linear:
        bias = self.source.optional(prefix + "bias", self.parts.dtype)
        return Linear(
            self.source.tensor(prefix + "weight", self.parts.dtype), self.parts.dtype, bias
        )

    def _attention(self, prefix: str) -> MLA:
        spec = self.spec
        heads = spec.num_heads
        w_kv_b = self.source.tensor(prefix + "kv_b_proj.weight", self.parts.dtype)
        return MLA(
            spec=spec,
            backend=self.parts.attention,
            qkv=self._queries_and_latents(prefix),
            kv_a_norm=self.norm(prefix + "kv_a_layernorm.weight", self.model.latent_norm_eps),
            o_proj=self._linear(prefix + "o_proj."),
            rope=self.rope,
            w_kv_b=w_kv_b.view(heads, spec.qk_nope_head_dim + spec.v_head_dim, spec.kv_lora_rank),
        )

    def _queries_and_latents(
        self, prefix: str
    ) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """The first product of both is one product: a call less, which small batches feel."""
        shape = (-1, self.spec.num_heads, self.model.qk_head_dim)
        rank = self.model.q_lora_rank
        first = self._joined_linear(prefix, "q_proj" if rank is None else "q_a_proj")
        sizes = [first.out_features - self.spec.latent_dim, self.spec.latent_dim]
        if rank is None:

            def direct(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                q, latent = first(x).split(sizes, dim=-1)
                return q.unflatten(-1, shape[1:]), latent

            return direct
        norm = self.norm(prefix + "q_a_layernorm.weight", self.model.latent_norm_eps)
        q_b = self._linear(prefix + "q_b_proj.")

        def low_rank(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            q_a, latent = first(x).split(sizes, dim=-1)
            return q_b(norm(q_a)).view(shape), latent

        return low_rank

    def _joined_linear(self, prefix: str, query: str) -> Linear:
        """The query's first projection on top of the latent's."""
        names = [f"{prefix}{name}." for name in (query, "kv_a_proj_with_mqa")]
        dtype = self.parts.dtype
        weights = [self.source.tensor(name + "weight", dtype) for name in names]
        biases = [self.source.optional(name + "bias", dtype) for name in names]
        bias = None
        if any(given is not None for given in biases):
            pairs = zip(weights, biases, strict=True)
            bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])
        return Linear(torch.cat(weights), dtype, bias)

    def _mlp(self, prefix: str) -> DenseMLP:
        gate, up, down = (
            self.source.tensor(f"{prefix}{name}_proj.weight", self.parts.dtype)
            for name in ("gate", "up", "down")
        )
        return DenseMLP(gate, up, down)

    def _moe(self, index: int, prefix: str) -> MoELayer:
        model, parts = self.model, self.parts
        moe_index = index - model.first_k_dense_replace
        experts = parts.make_experts()
        for slot, expert in enumerate(parts.placement.local_experts(moe_index, parts.rank)):
            experts.load_slot(slot, self.source.expert(index, expert))
        return MoELayer(
            gate=self._gate(prefix + "gate."),
            dispatcher=parts.dispatcher,
            experts=experts,
            shared_expert=self._mlp(prefix + "shared_experts.")
            if model.num_shared_experts
            else None,
            slot_table=self.slot_table[moe_index],
            progress=parts.progress,
        )

    def _gate(self, prefix: str) -> Gate:
        model = self.model
        return Gate(
            weight=self.source.tensor(prefix + "weight", torch.float32),
            bias=self.source.optional(prefix + "e_score_correction_bias", torch.float32),
            num_topk=model.num_experts_per_tok,
            n_group=model.n_group,
            topk_group=model.topk_group,
            scoring_func=model.scoring_func,
            topk_method=model.topk_method,
            norm_topk_prob=model.norm_topk_prob,
            routed_scaling_factor=model.routed_scaling_factor,
        )
