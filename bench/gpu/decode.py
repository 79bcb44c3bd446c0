"""Absorbed MLA decode, for Triton and where installed FlashMLA, and the write of new latents."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attention import AttentionBatch, AttentionSpec, LatentCache, attention_problem
from attention import create_attention as create
from attention.base import BLOCK_SIZE
from bench.gpu import costs
from bench.gpu.case import KernelCase, Sizes
from bench.gpu.parity import (
    BF16_DIFF,
    NORM_EPS,
    assert_decoded,
    assert_rows_agree,
    decoded,
    latent_of,
)

BF16 = torch.bfloat16


def mla_decode_case(
    lengths: Sequence[int], num_heads: int, sizes: Sizes, device: torch.device
) -> KernelCase:
    """One new token per request; lengths: cached tokens, the new one included. The schedule of
    FlashMLA, made once per step, is made by the call that the parity check looks at."""
    scale = sizes.softmax_scale
    spec = AttentionSpec(num_heads, sizes.rank, sizes.nope, sizes.rope, sizes.value, scale, BF16)
    cache, tables = draw_cache(lengths, spec, device)
    q = torch.randn(len(lengths), num_heads, spec.latent_dim, device=device).clamp_(-1, 1).to(BF16)
    batch = AttentionBatch(
        num_decodes=len(lengths),
        query_lens=[1] * len(lengths),
        context_lens=[length - 1 for length in lengths],
        block_tables=tables,
        num_padded_tokens=len(lengths),
    )

    def call(name: str) -> Callable[[], Any]:
        backend = create(name, spec, device=device)
        plan = backend.plan(batch)
        return lambda: backend.decode(q=q, cache=cache, plan=plan)

    def check(got: torch.Tensor) -> None:
        for request, length in enumerate(lengths):
            table = torch.tensor(tables[request], device=device)
            latents = cache[table].flatten(0, 2)[:length]
            assert_decoded(got[request], decoded(q[request], latents, spec))

    names = [name for name in ("triton", "flash_mla") if attention_problem(name, spec) is None]
    return KernelCase(
        "mla_decode",
        {"batch": len(lengths), "context": max(lengths), "heads": num_heads},
        costs.mla_decode_cost(lengths, num_heads, sizes.rank, sizes.rope),
        {name: call(name) for name in names},
        check,
        "flash_mla",
    )


def write_latent_case(num_tokens: int, sizes: Sizes, device: torch.device) -> KernelCase:
    from attention.triton_latent import write_latent

    rank, width = sizes.rank, sizes.rank + sizes.rope
    raw = torch.randn(num_tokens, width, dtype=BF16, device=device)
    weight = (1 + 0.1 * torch.randn(rank, device=device)).to(BF16)
    angles = torch.randn(num_tokens, sizes.rope // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    num_blocks_used = -(-2 * num_tokens // BLOCK_SIZE)
    slots = torch.randperm(num_blocks_used * BLOCK_SIZE, device=device)[:num_tokens]
    cache = torch.zeros(num_blocks_used, BLOCK_SIZE, 1, width, dtype=BF16, device=device)

    def call() -> torch.Tensor:
        return write_latent(
            raw,
            norm_weight=weight,
            norm_eps=NORM_EPS,
            cos=cos,
            sin=sin,
            is_interleaved=True,
            slot_mapping=slots,
            cache=cache,
        )

    def check(got: torch.Tensor) -> None:
        assert torch.equal(cache.flatten(0, 2)[slots], got), "the cache does not hold the result"
        want_compressed, want_rotated = latent_of(raw, weight, angles)
        assert_rows_agree(got[:, :rank], want_compressed, BF16_DIFF)
        assert_rows_agree(got[:, rank:], want_rotated, BF16_DIFF)

    cost = costs.write_latent_cost(num_tokens, rank, sizes.rope)
    return KernelCase("write_latent", {"tokens": num_tokens}, cost, {"triton": call}, check)


def draw_cache(
    lengths: Sequence[int], spec: AttentionSpec, device: torch.device
) -> "tuple[torch.Tensor, list[array[int]]]":
    """One layer's cache with values as FlashMLA's own tests draw them, and shuffled block tables;
    what lies past a request's end is NaN."""
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    order = torch.randperm(sum(counts)).tolist()
    tables = [array("i", [order.pop() for _ in range(count)]) for count in counts]
    cache = LatentCache(
        num_layers=1,
        num_blocks=sum(counts),
        latent_dim=spec.latent_dim,
        dtype=spec.dtype,
        device=device,
    ).layer(0)
    cache.normal_().div_(10).clamp_(-1, 1)
    for table, length in zip(tables, lengths, strict=True):
        if length % BLOCK_SIZE:
            cache[table[-1], length % BLOCK_SIZE :] = torch.nan
    return cache, tables
