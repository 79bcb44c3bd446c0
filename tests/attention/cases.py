"""Random MLA problems over a poisoned cache, and their answer from a naive float64 attention."""

from array import array
from dataclasses import dataclass, replace

import torch

from attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionPlan,
    AttentionSpec,
    LatentCache,
)
from attention.base import BLOCK_SIZE

# Decodes around the edges of blocks and of what backends work on at a time.
RAGGED = [(0, 1), (62, 1), (63, 1), (64, 1), (5, 1), (130, 1), (577, 1), (1100, 1), (511, 1)]


def make_spec(
    dtype: torch.dtype = torch.float32,
    *,
    num_heads: int = 4,
    kv_lora_rank: int = 32,
    qk_nope_head_dim: int = 16,
    qk_rope_head_dim: int = 8,
    v_head_dim: int = 24,
) -> AttentionSpec:
    return AttentionSpec(
        num_heads=num_heads,
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=qk_nope_head_dim,
        qk_rope_head_dim=qk_rope_head_dim,
        v_head_dim=v_head_dim,
        softmax_scale=(qk_nope_head_dim + qk_rope_head_dim) ** -0.5,
        dtype=dtype,
    )


def flash_mla_spec(num_heads: int = 4) -> AttentionSpec:
    """The latent that FlashMLA reads, in BF16, with small heads."""
    return make_spec(
        torch.bfloat16,
        num_heads=num_heads,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
    )


@dataclass(frozen=True)
class Case:
    """One step: queries of its new tokens, every request's latents, the cache that holds them.

    q: ``[T, N, nope + rope]``, rotated. latents: per request ``[context + query, latent_dim]``.
    cache: everything that no request wrote is NaN; the new tokens' latents are in it.
    """

    spec: AttentionSpec
    batch: AttentionBatch
    q: torch.Tensor
    latents: list[torch.Tensor]
    w_kv_b: torch.Tensor
    cache: torch.Tensor


def make_case(
    spec: AttentionSpec, lens: list[tuple[int, int]], num_decodes: int, *, seed: int = 0
) -> Case:
    """lens: (context, query) of each request, decodes first. Blocks are shuffled over the cache."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(spec.dtype)

    latents = [draw(context + query, spec.latent_dim) for context, query in lens]
    tables, cache = scatter(latents, spec, generator)
    batch = AttentionBatch(
        num_decodes=num_decodes,
        query_lens=[query for _, query in lens],
        context_lens=[context for context, _ in lens],
        block_tables=tables,
        num_padded_tokens=sum(query for _, query in lens),
    )
    head_dim = spec.qk_nope_head_dim + spec.qk_rope_head_dim
    rows = spec.qk_nope_head_dim + spec.v_head_dim
    w_kv_b = draw(spec.num_heads, rows, spec.kv_lora_rank) * spec.kv_lora_rank**-0.5
    q = 2 * draw(batch.num_tokens, spec.num_heads, head_dim)
    return Case(spec, batch, q, latents, w_kv_b.to(spec.dtype), cache)


def first_decodes(case: Case, num_requests: int) -> Case:
    """The first requests of the step alone; all of them decode."""
    batch = case.batch
    query_lens = batch.query_lens[:num_requests]
    alone = AttentionBatch(
        num_decodes=num_requests,
        query_lens=query_lens,
        context_lens=batch.context_lens[:num_requests],
        block_tables=batch.block_tables[:num_requests],
        num_padded_tokens=sum(query_lens),
    )
    q, latents = case.q[: sum(query_lens)], case.latents[:num_requests]
    return replace(case, batch=alone, q=q, latents=latents)


def scatter(
    latents: list[torch.Tensor], spec: AttentionSpec, generator: torch.Generator
) -> "tuple[list[array[int]], torch.Tensor]":
    """Block tables with one spare entry each, and the cache: NaN where no latent lies."""
    num_blocks = [-(-len(latent) // BLOCK_SIZE) + 1 for latent in latents]
    order = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
    cache = LatentCache(
        num_layers=1, num_blocks=len(order), latent_dim=spec.latent_dim, dtype=spec.dtype
    )
    cache.tensor.fill_(torch.nan)
    tables = []
    for latent, count in zip(latents, num_blocks, strict=True):
        tables.append(array("i", [order.pop() for _ in range(count)]))
        for start in range(0, len(latent), BLOCK_SIZE):
            piece = latent[start : start + BLOCK_SIZE]
            cache.tensor[0, tables[-1][start // BLOCK_SIZE], : len(piece), 0] = piece
    return tables, cache.layer(0)


def naive(case: Case) -> torch.Tensor:
    """float64 ``[T, N, v]``: rebuild every key and value, one request at a time."""
    spec = case.spec
    w_uk, w_uv = case.w_kv_b.double().split([spec.qk_nope_head_dim, spec.v_head_dim], dim=1)
    outs = []
    queries = case.q.double().split(case.batch.query_lens)
    for latent, q, context in zip(case.latents, queries, case.batch.context_lens, strict=True):
        compressed, rotated = latent.double().split([spec.kv_lora_rank, spec.qk_rope_head_dim], -1)
        keys = torch.einsum("npc,tc->ntp", w_uk, compressed)
        values = torch.einsum("nvc,tc->ntv", w_uv, compressed)
        keys = torch.cat([keys, rotated.expand(spec.num_heads, -1, -1)], dim=-1)
        scores = torch.einsum("qnd,ntd->nqt", q, keys) * spec.softmax_scale
        last_seen = context + torch.arange(len(q))
        scores.masked_fill_(torch.arange(len(latent)) > last_seen[:, None], -torch.inf)
        outs.append(torch.einsum("nqt,ntv->qnv", scores.softmax(-1), values))
    return torch.cat(outs)


def decode(backend: AttentionBackend, case: Case) -> torch.Tensor:
    """The absorb path from expanded queries to ``[T, N, v]``; the folding in float32."""
    nope = case.spec.qk_nope_head_dim
    w_uk, w_uv = case.w_kv_b.float().split([nope, case.spec.v_head_dim], dim=1)
    absorbed = torch.einsum("tnp,npc->tnc", case.q[..., :nope].float(), w_uk)
    q = torch.cat([absorbed.to(case.q.dtype), case.q[..., nope:]], dim=-1)
    return torch.einsum("tnc,nvc->tnv", decode_absorbed(backend, case, q).float(), w_uv)


def decode_absorbed(backend: AttentionBackend, case: Case, q: torch.Tensor) -> torch.Tensor:
    """The contract's ``decode`` for absorbed queries ``[T, N, latent_dim]``."""
    device = backend.device
    plan = backend.plan(case.batch)
    summed = backend.decode(q=q.to(device), cache=case.cache.to(device), plan=plan).cpu()
    assert summed.shape == (case.batch.num_tokens, case.spec.num_heads, case.spec.kv_lora_rank)
    assert summed.dtype == case.spec.dtype
    return summed


def run_prefill(
    backend: AttentionBackend, case: Case, plan: AttentionPlan, rows: slice
) -> torch.Tensor:
    """The expand path of some rows of the case."""
    device = backend.device
    out = backend.prefill(
        q=case.q[rows].to(device),
        cache=case.cache.to(device),
        w_kv_b=case.w_kv_b.to(device),
        plan=plan,
    )
    assert out.dtype == case.spec.dtype
    return out.cpu()


def prefill(backend: AttentionBackend, case: Case) -> torch.Tensor:
    plan = backend.plan(replace(case.batch, num_decodes=0))
    return run_prefill(backend, case, plan, slice(None))
