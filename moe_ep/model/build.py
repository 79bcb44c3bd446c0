"""Builds this rank's decoder: every tensor by its checkpoint name, from any weight source.

The one place that knows tensor names. Experts that the placement gives to other ranks are never
read.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attention import AttentionBackend, AttentionSpec
from attention.mla import MLA, Projection
from eplb.placement import Placement
from moe_ep.config import ModelConfig
from moe_ep.dispatch import Dispatcher
from moe_ep.experts import Experts, ExpertWeights
from moe_ep.fp8 import BLOCK
from moe_ep.gate import Gate
from moe_ep.layer import MoELayer
from moe_ep.linear import Linear
from moe_ep.linear_fp8 import DeepGemmLinear, StoredWeight, create_linear
from moe_ep.model.decoder import Decoder, DecoderLayer, DenseMLP
from moe_ep.model.loader import WeightSource
from moe_ep.model.norm import RMSNorm
from moe_ep.model.rope import RotaryEmbedding
from moe_ep.progress import Progress
from moe_ep.router import Router

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecoderParts:
    """What the decoder is built around: chosen backends, this rank's placement, and the progress.

    slot_table: int64 ``[L, E, W]``, by which this rank routes (``eplb.dispatch``).
    device: where weights are kept. keeps_fp8: multiply FP8 projections as they are stored, where
    their sizes allow it. make_experts: returns an empty expert bank for one layer.
    """

    dtype: torch.dtype
    device: torch.device
    keeps_fp8: bool
    attention: AttentionBackend
    dispatcher: Dispatcher
    make_experts: Callable[[], Experts]
    placement: Placement
    slot_table: torch.Tensor
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
        device=parts.device,
    )
    builder = _Builder(model, source, parts, rope)
    embedding = builder.tensor("model.embed_tokens.weight")
    head = embedding if model.tie_word_embeddings else builder.tensor("lm_head.weight")
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
        self.slot_table = parts.slot_table.to(parts.device)
        self._told: set[str] = set()

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Dense, in the compute type by default, on the device."""
        return self.source.tensor(name, dtype or self.parts.dtype).to(self.parts.device)

    def optional(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        return self.tensor(name, dtype) if self.source.has(name) else None

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
        return RMSNorm(self.tensor(name), eps)

    def _linear(self, *prefixes: str) -> Linear | DeepGemmLinear:
        """One product for all projections of an input, the first one's outputs first."""
        dtype = self.parts.dtype
        weights = [self._stored(prefix + "weight") for prefix in prefixes]
        biases = [self.optional(prefix + "bias") for prefix in prefixes]
        bias = None
        if any(given is not None for given in biases):
            bias = torch.cat(
                [
                    stored.weight.new_zeros(len(stored.weight), dtype=dtype) if b is None else b
                    for stored, b in zip(weights, biases, strict=True)
                ]
            )
        return create_linear(weights, dtype, bias, keeps_fp8=self._keeps_fp8(weights))

    def _stored(self, name: str) -> StoredWeight:
        weight, scale = self.source.raw(name)
        device = self.parts.device
        return StoredWeight(weight.to(device), None if scale is None else scale.to(device))

    def _keeps_fp8(self, weights: list[StoredWeight]) -> bool:
        """Weights of odd sizes are restored rather than multiplied one by one: it costs memory
        instead of calls, and no published FP8 checkpoint has them."""
        if not self.parts.keeps_fp8:
            return False
        answers = [DeepGemmLinear.supports(stored, self.parts.dtype) for stored in weights]
        reasons = {reason for reason in answers if reason is not None}
        if any(len(stored.weight) % BLOCK for stored in weights[:-1]):
            shapes = [list(stored.weight.shape) for stored in weights]
            reasons.add(f"weights {shapes} cannot share a scale per 128x128")
        for reason in reasons - self._told:
            logger.info("FP8 projections are restored to %s: %s", self.parts.dtype, reason)
        self._told |= reasons
        return not reasons

    def _attention(self, prefix: str) -> MLA:
        spec = self.spec
        heads = spec.num_heads
        w_kv_b = self.tensor(prefix + "kv_b_proj.weight")
        qkv, latents = self._queries_and_latents(prefix)
        return MLA(
            spec=spec,
            backend=self.parts.attention,
            qkv=qkv,
            latents=latents,
            kv_a_norm=self.norm(prefix + "kv_a_layernorm.weight", self.model.latent_norm_eps),
            o_proj=self._linear(prefix + "o_proj."),
            rope=self.rope,
            w_kv_b=w_kv_b.view(heads, spec.qk_nope_head_dim + spec.v_head_dim, spec.kv_lora_rank),
        )

    def _queries_and_latents(
        self, prefix: str
    ) -> tuple[Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], Projection]:
        """Both, and latents alone. The first product of both is one product: a call less, which
        small batches feel."""
        shape = (-1, self.spec.num_heads, self.model.qk_head_dim)
        rank = self.model.q_lora_rank
        query = "q_proj" if rank is None else "q_a_proj"
        first = self._linear(f"{prefix}{query}.", f"{prefix}kv_a_proj_with_mqa.")
        sizes = [first.out_features - self.spec.latent_dim, self.spec.latent_dim]

        def latents(x: torch.Tensor) -> torch.Tensor:
            return first(x).split(sizes, dim=-1)[1]

        if rank is None:

            def direct(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                q, latent = first(x).split(sizes, dim=-1)
                return q.unflatten(-1, shape[1:]), latent

            return direct, latents
        norm = self.norm(prefix + "q_a_layernorm.weight", self.model.latent_norm_eps)
        q_b = self._linear(prefix + "q_b_proj.")

        def low_rank(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            q_a, latent = first(x).split(sizes, dim=-1)
            return q_b(norm(q_a)).view(shape), latent

        return low_rank, latents

    def _mlp(self, prefix: str) -> DenseMLP:
        gate_up = self._linear(prefix + "gate_proj.", prefix + "up_proj.")
        return DenseMLP(gate_up, self._linear(prefix + "down_proj."))

    def _moe(self, index: int, prefix: str) -> MoELayer:
        model, parts = self.model, self.parts
        moe_index = index - model.first_k_dense_replace
        experts = parts.make_experts()
        for slot, expert in enumerate(parts.placement.local_experts(moe_index, parts.rank)):
            experts.load_slot(slot, self._expert(index, expert))
        return MoELayer(
            router=Router(self._gate(prefix + "gate."), self.slot_table[moe_index]),
            dispatcher=parts.dispatcher,
            experts=experts,
            shared_expert=self._mlp(prefix + "shared_experts.")
            if model.num_shared_experts
            else None,
        )

    def _expert(self, layer: int, expert: int) -> ExpertWeights:
        stored = vars(self.source.expert(layer, expert))
        given = {name: part for name, part in stored.items() if part is not None}
        return ExpertWeights(**{name: part.to(self.parts.device) for name, part in given.items()})

    def _gate(self, prefix: str) -> Gate:
        model = self.model
        return Gate(
            weight=self.tensor(prefix + "weight", torch.float32),
            bias=self.optional(prefix + "e_score_correction_bias", torch.float32),
            num_topk=model.num_experts_per_tok,
            n_group=model.n_group,
            topk_group=model.topk_group,
            scoring_func=model.scoring_func,
            topk_method=model.topk_method,
            norm_topk_prob=model.norm_topk_prob,
            routed_scaling_factor=model.routed_scaling_factor,
        )
