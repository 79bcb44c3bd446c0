"""Triton kernels of absorbed MLA decode over the paged latent.

Imports triton, so it is imported where it is used, inside functions. With ``TRITON_INTERPRET=1``
the kernels run on a CPU, slowly, for tests at small sizes.

Shape letters: D decode tokens, B requests, I items, N heads, C kv_lora_rank.

One program serves one item (``attention.decode_items``) and up to BLOCK_ROWS of the
request's (query token, head) pairs, which all read the same latents. Results of a request that is
one item are final; those of several are float32 partial results with the base-2 logarithm of their
weight, merged in the order of the items by a second kernel.
"""

import torch
import triton
import triton.language as tl

from attention.base import BLOCK_SIZE, AttentionSpec
from attention.decode_items import DecodeItems

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Finite: an item of which a query sees nothing merges with weight 0, and not as NaN.
MASKED = tl.constexpr(-1e30)
LOG2_E = 1.4426950408889634
# Few items want small tiles, for more programs. The last bound stands for more, too. Multiples of
# 16, which is what triton specialises integers on, so that kernels are not compiled anew.
TUNED_ITEMS = (16, 64, 256)
# Parts of one copy, which begin anywhere in it: not worth a kernel for each alignment.
PLANNED = [
    "item_request",
    "item_start",
    "item_stop",
    "first_item",
    "first_token",
    "query_lens",
    "context_lens",
    "first_block",
    "blocks",
]


def decode(
    q: torch.Tensor, cache: torch.Tensor, items: DecodeItems, spec: AttentionSpec
) -> torch.Tensor:
    """The contract's ``decode``: q ``[D, N, latent_dim]`` -> ``[D, N, C]``."""
    q = q.contiguous()
    num_heads, rank = spec.num_heads, spec.kv_lora_rank
    num_rows = items.max_query_len * num_heads
    num_items = len(items.item_request)
    out = torch.empty(q.shape[0], num_heads, rank, dtype=q.dtype, device=q.device)
    partial = lse = None
    if items.is_split:
        shape = (num_items, num_rows)
        partial = torch.empty(*shape, rank, dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    requests = (items.first_item, items.first_token, items.query_lens)
    _decode[lambda meta: (triton.cdiv(num_rows, meta["BLOCK_ROWS"]), num_items)](
        q,
        cache,
        items.item_request,
        items.item_start,
        items.item_stop,
        *requests,
        items.context_lens,
        items.first_block,
        items.blocks,
        out,
        partial,
        lse,
        num_rows,
        spec.softmax_scale * LOG2_E,
        num_heads,
        next((bound for bound in TUNED_ITEMS if num_items <= bound), TUNED_ITEMS[-1]),
        RANK=rank,
        ROPE=spec.qk_rope_head_dim,
        BLOCK_RANK=max(16, triton.next_power_of_2(rank)),
        BLOCK_ROPE=max(16, triton.next_power_of_2(spec.qk_rope_head_dim)),
        PAGE=BLOCK_SIZE,
    )
    if items.is_split:
        _merge[(num_rows, items.num_requests)](
            partial,
            lse,
            *requests,
            out,
            num_rows,
            num_heads,
            RANK=rank,
            BLOCK_RANK=triton.next_power_of_2(rank),
        )
    return out


def _decode_configs() -> list[triton.Config]:
    if INTERPRETED.value:
        return [triton.Config({"BLOCK_ROWS": 16, "BLOCK_KEYS": 32}, num_warps=4, num_stages=1)]
    # With BF16 latents of 512 + 64, none spills registers; 64 rows are what wgmma takes.
    tiles = ((16, 32, 8, 2), (16, 64, 8, 2), (32, 32, 8, 2), (64, 32, 8, 2), (64, 64, 8, 2))
    return [
        triton.Config({"BLOCK_ROWS": rows, "BLOCK_KEYS": keys}, num_warps=warps, num_stages=stages)
        for rows, keys, warps, stages in tiles
    ]


@triton.jit
def dot(a, b, acc):
    # The interpreter would multiply BF16 bit patterns. "ieee": float32 stays float32 on a GPU.
    if INTERPRETED:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 to ``dtype``, to nearest even; the interpreter alone would truncate to BF16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.autotune(configs=_decode_configs(), key=["num_heads", "tuned_items", "RANK", "ROPE"])
@triton.jit(do_not_specialize_on_alignment=PLANNED)
def _decode(
    q,
    cache,
    item_request,
    item_start,
    item_stop,
    first_item,
    first_token,
    query_lens,
    context_lens,
    first_block,
    blocks,
    out,
    partial,
    lse,
    max_rows,
    scale,
    num_heads,
    tuned_items,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    tl.static_assert(PAGE % BLOCK_KEYS == 0, "a tile must lie in one page")
    LATENT: tl.constexpr = RANK + ROPE
    item = tl.program_id(1)
    request = tl.load(item_request + item)
    start, stop = tl.load(item_start + item), tl.load(item_stop + item)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    num_rows = tl.load(query_lens + request) * num_heads
    if (stop <= start) | (tl.program_id(0) * BLOCK_ROWS >= num_rows):
        return
    # 1. Queries; those of one request and all heads lie next to each other.
    is_row = row < num_rows
    last_seen = tl.load(context_lens + request) + row // num_heads
    target = tl.load(first_token + request).to(tl.int64) * num_heads + row
    col, rope = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    is_col, is_rope = col < RANK, rope < ROPE
    q_at = q + target[:, None] * LATENT
    q_latent = tl.load(q_at + col[None, :], mask=is_row[:, None] & is_col[None, :], other=0.0)
    q_rope = tl.load(
        q_at + RANK + rope[None, :], mask=is_row[:, None] & is_rope[None, :], other=0.0
    )
    # 2. Online softmax over the item's latents, in base 2.
    top = tl.full((BLOCK_ROWS,), MASKED, dtype=tl.float32)
    total = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_RANK), dtype=tl.float32)
    table = blocks + tl.load(first_block + request)
    for first in range(start, stop, BLOCK_KEYS):
        block = tl.load(table + first // PAGE).to(tl.int64)
        place = tl.arange(0, BLOCK_KEYS)
        is_key = first + place < stop
        key_at = cache + (block * PAGE + first % PAGE + place)[:, None] * LATENT
        latent = tl.load(key_at + col[None, :], mask=is_key[:, None] & is_col[None, :], other=0.0)
        rotated = tl.load(
            key_at + RANK + rope[None, :], mask=is_key[:, None] & is_rope[None, :], other=0.0
        )
        scores = tl.zeros((BLOCK_ROWS, BLOCK_KEYS), dtype=tl.float32)
        scores = dot(q_rope, tl.trans(rotated), dot(q_latent, tl.trans(latent), scores)) * scale
        is_seen = is_key[None, :] & (first + place[None, :] <= last_seen[:, None])
        scores = tl.where(is_seen, scores, MASKED)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        decay = tl.exp2(top - new_top)
        probs = tl.exp2(scores - new_top[:, None])
        total = total * decay + tl.sum(probs, axis=1)
        acc = dot(narrow(probs, cache.dtype.element_ty), latent, acc * decay[:, None])
        top = new_top
    # 3. The request's result, or this item's part of it.
    result = acc / total[:, None]
    mask = is_row[:, None] & is_col[None, :]
    is_whole = tl.load(first_item + request + 1) - tl.load(first_item + request) == 1
    if is_whole:
        at = out + target[:, None] * RANK + col[None, :]
        tl.store(at, narrow(result, out.dtype.element_ty), mask=mask)
    elif partial is not None:
        place = item.to(tl.int64) * max_rows + row
        tl.store(partial + place[:, None] * RANK + col[None, :], result, mask=mask)
        tl.store(lse + place, top + tl.log2(total), mask=is_row)


@triton.jit(do_not_specialize_on_alignment=["first_item", "first_token", "query_lens"])
def _merge(
    partial,
    lse,
    first_item,
    first_token,
    query_lens,
    out,
    max_rows,
    num_heads,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    row, request = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(first_item + request), tl.load(first_item + request + 1)
    if (last - first <= 1) | (row >= tl.load(query_lens + request) * num_heads):
        return
    col = tl.arange(0, BLOCK_RANK)
    top = tl.full((), MASKED, dtype=tl.float32)
    total = tl.zeros((), dtype=tl.float32)
    acc = tl.zeros((BLOCK_RANK,), dtype=tl.float32)
    for item in range(first, last):
        place = tl.cast(item, tl.int64) * max_rows + row
        part = tl.load(lse + place)
        new_top = tl.maximum(top, part)
        decay, weight = tl.exp2(top - new_top), tl.exp2(part - new_top)
        total = total * decay + weight
        acc = acc * decay + weight * tl.load(partial + place * RANK + col, mask=col < RANK, other=0)
        top = new_top
    target = tl.load(first_token + request).to(tl.int64) * num_heads + row
    result = narrow(acc / total, out.dtype.element_ty)
    tl.store(out + target * RANK + col, result, mask=col < RANK)
