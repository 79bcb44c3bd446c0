"""Expanded MLA prefill, the products that rebuild keys and values included: the kernel, and the
tiles of ``attention.torch_prefill``, a few small kernels each."""

from collections.abc import Sequence

import torch

from attention import AttentionBatch, AttentionSpec
from attention.gpu_prefill import plan_launches
from attention.torch_prefill import plan_prefills
from attention.torch_prefill import run_prefill as run_torch
from bench.gpu import costs
from bench.gpu.case import KernelCase, Sizes
from bench.gpu.decode import draw_cache
from bench.gpu.parity import PREFILL_DIFF, assert_rows_agree, prefilled

BF16 = torch.bfloat16


def mla_prefill_case(
    lens: Sequence[tuple[int, int]], num_heads: int, sizes: Sizes, device: torch.device
) -> KernelCase:
    """lens: cached and new tokens of each request."""
    from attention.triton_prefill import run_prefill as run_triton

    spec = AttentionSpec(
        num_heads, sizes.rank, sizes.nope, sizes.rope, sizes.value, sizes.softmax_scale, BF16
    )
    query_lens = [query for _, query in lens]
    num_keys = [context + query for context, query in lens]
    cache, tables = draw_cache(num_keys, spec, device)
    q = torch.randn(sum(query_lens), num_heads, sizes.nope + sizes.rope, device=device).to(BF16)
    shape = (num_heads, sizes.nope + sizes.value, sizes.rank)
    w_kv_b = (10 * torch.randn(shape, device=device) / sizes.rank**0.5).to(BF16)
    batch = AttentionBatch(
        num_decodes=0,
        query_lens=query_lens,
        context_lens=[context for context, _ in lens],
        block_tables=tables,
        num_padded_tokens=len(q),
    )
    launches, groups = plan_launches(batch, device), tuple(plan_prefills(batch, device))
    inputs = {"q": q, "cache": cache, "w_kv_b": w_kv_b, "spec": spec}

    def check(got: torch.Tensor) -> None:
        parts = zip(got.split(query_lens), q.split(query_lens), tables, num_keys, strict=True)
        for part, queries, table, length in parts:
            latents = cache[torch.tensor(table, device=device)].flatten(0, 2)[:length]
            assert_rows_agree(part, prefilled(queries, latents, w_kv_b, spec), PREFILL_DIFF)

    return KernelCase(
        "mla_prefill",
        {"tokens": len(q), "context": max(num_keys), "heads": num_heads},
        costs.mla_prefill_cost(lens, spec),
        {
            "triton": lambda: run_triton(**inputs, launches=launches),
            "torch": lambda: run_torch(**inputs, groups=groups),
        },
        check,
        "torch",
    )
