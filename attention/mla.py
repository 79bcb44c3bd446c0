"""Multi-head latent attention of one layer: absorb path for decodes, expand path for prefills.

Shape letters: T tokens (padding included), n real tokens, D decode tokens, N heads, H hidden,
C kv_lora_rank, P qk_nope_head_dim, V v_head_dim.

With k = W_UK c and v = W_UV c for a cached latent c, a score is (W_UK^T q) . c and an output is
W_UV (sum of p c): decodes move W_UK to the query and W_UV behind the sum and never rebuild keys,
which reads one latent row per cached token instead of N keys and values. Prefills, which meet each
cached token with many queries, rebuild keys and values because their smaller heads cost less
arithmetic. Both read the same cache.

Projections are callables of the model; nothing here knows how weights are stored or multiplied.
"""

from collections.abc import Callable
from enum import StrEnum

import torch
import torch.nn.functional as F

from attention.base import AttentionBackend, AttentionPlan, AttentionSpec
from attention.latent_cache import LatentCache
from attention.new_tokens import Norm, Rotation, enter_tokens
from attention.products import product_dtype

Projection = Callable[[torch.Tensor], torch.Tensor]


class Part(StrEnum):
    """The parts of one layer's attention, for whoever times them."""

    PROJECTIONS = "attention projections"
    CORE = "attention core"
    OUTPUT = "attention output"


class MLA:
    """One layer's attention.

    qkv: ``[T, H]`` -> queries ``[T, N, P + rope]``, a new tensor that is rotated in place, and raw
    latents ``[T, C + rope]``; together because both start with a product of x. latents: the latter
    alone.
    kv_a_norm: the norm of a latent's first C values. o_proj: ``[T, N * V]`` -> ``[T, H]``.
    w_kv_b: ``[N, P + V, C]``, of every head W_UK above W_UV; kept, in the type in which products
        are computed.
    """

    def __init__(
        self,
        *,
        spec: AttentionSpec,
        backend: AttentionBackend,
        qkv: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        latents: Projection,
        kv_a_norm: Norm,
        o_proj: Projection,
        rope: Rotation,
        w_kv_b: torch.Tensor,
    ) -> None:
        rows = spec.qk_nope_head_dim + spec.v_head_dim
        if w_kv_b.shape != (spec.num_heads, rows, spec.kv_lora_rank):
            expected = (spec.num_heads, rows, spec.kv_lora_rank)
            raise ValueError(f"w_kv_b must be {expected}, got {tuple(w_kv_b.shape)}")
        self.spec = spec
        self.backend = backend
        self.qkv, self.latents = qkv, latents
        self.kv_a_norm, self.o_proj = kv_a_norm, o_proj
        self.rope = rope
        self._w_kv_b = w_kv_b.to(product_dtype(spec.dtype, w_kv_b.device)).contiguous()
        w_uk, w_uv = self._w_kv_b.split([spec.qk_nope_head_dim, spec.v_head_dim], dim=1)
        if w_kv_b.is_cpu:
            # Small batches multiply fastest on CPUs, at the speed of reading the weight, when it is
            # contiguous over heads and the transpose of a row-major matrix: the absorb path has a
            # copy of its own, where W_UK is stored as [N, C, P].
            w_uk, w_uv = w_uk.mT.contiguous().mT, w_uv.contiguous()
        self._w_uk, self._w_uv = w_uk, w_uv  # [N, P, C], [N, V, C]

    def forward(
        self,
        x: torch.Tensor,
        *,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: LatentCache,
        layer_idx: int,
        slot_mapping: torch.Tensor,
        plan: AttentionPlan,
        enter: Callable[[Part], None],
    ) -> torch.Tensor:
        """x ``[T, H]`` -> ``[T, H]``; stores the new tokens' latents in the cache first.

        cos, sin: ``[T, rope / 2]``. slot_mapping: int64 ``[T]``, the token's place in the cache.
        enter: called as each part begins.
        Rows past the plan's real tokens are padding: never read (they may hold NaN), zero in the
        result, and nothing is stored for them.
        """
        num_padding = x.shape[0] - plan.num_tokens
        if num_padding:
            x, cos, sin, slot_mapping = (t[: plan.num_tokens] for t in (x, cos, sin, slot_mapping))
        if plan.num_tokens == 0:
            return x.new_zeros(num_padding, x.shape[1])
        enter(Part.PROJECTIONS)
        q, raw = self.qkv(x)
        q_rope = q[..., self.spec.qk_nope_head_dim :]
        self._enter(q_rope, raw, cos, sin, slot_mapping, cache, layer_idx)
        enter(Part.CORE)
        heads = self._attend(q, cache.layer(layer_idx), plan)
        enter(Part.OUTPUT)
        out = self.o_proj(heads.flatten(1))
        return F.pad(out, (0, 0, 0, num_padding)) if num_padding else out

    def store(
        self,
        x: torch.Tensor,
        *,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: LatentCache,
        layer_idx: int,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store the latents of ``x [T, H]`` and attend to nothing; arguments as of ``forward``.

        Padding, with slot -1, may hold NaN and is stored where nobody reads.
        """
        raw = self.latents(x)
        no_queries = raw.new_empty(len(raw), 0, self.spec.qk_rope_head_dim)
        self._enter(no_queries, raw, cos, sin, slot_mapping, cache, layer_idx)

    def _enter(
        self,
        q_rope: torch.Tensor,
        raw: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slot_mapping: torch.Tensor,
        cache: LatentCache,
        layer_idx: int,
    ) -> None:
        enter_tokens(
            q_rope,
            raw,
            norm=self.kv_a_norm,
            rope=self.rope,
            cos=cos,
            sin=sin,
            slot_mapping=slot_mapping,
            cache=cache,
            layer_idx=layer_idx,
        )

    def _attend(self, q: torch.Tensor, cache: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """q ``[n, N, P + rope]``, rotated -> ``[n, N, V]``."""
        split = plan.num_decode_tokens
        parts = []
        if split:
            q_nope, q_rope = q[:split].split(
                [self.spec.qk_nope_head_dim, self.spec.qk_rope_head_dim], dim=-1
            )
            absorbed = _by_head(q_nope, self._w_uk)
            query = torch.cat([absorbed, q_rope], dim=-1)  # [D, N, C + rope]
            summed = self.backend.decode(q=query, cache=cache, plan=plan)  # [D, N, C]
            parts.append(_by_head(summed, self._w_uv.mT))
        if split < plan.num_tokens:
            parts.append(
                self.backend.prefill(q=q[split:], cache=cache, w_kv_b=self._w_kv_b, plan=plan)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _by_head(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x ``[D, N, K]`` times weights ``[N, K, M]`` -> ``[D, N, M]`` in x's dtype."""
    return torch.bmm(x.transpose(0, 1).to(weights.dtype), weights).transpose(0, 1).to(x.dtype)
