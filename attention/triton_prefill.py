"""Triton kernel of expanded MLA prefill.

Imports triton, so it is imported where it is used, inside functions.

Shape letters: P prefill tokens, Y keys of a launch, Z tiles of a launch, N heads, C kv_lora_rank.

One program serves one tile of queries (``attention.gpu_prefill``) and one head: an online softmax
over blocks of keys, which are counted from the request's first token. A tile whose keys take
several launches stores the state of that loop at the end of one and goes on from it in the next. So
its result is one chain of float32 sums that neither launches nor, between tiles, chunks of the
prompt show in. Merging results by log-sum-exp would give each cut bits of its own.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from attention import torch_prefill
from attention.base import AttentionSpec
from attention.gpu_prefill import TILE_COLUMNS, Launch
from attention.triton_kernels import LOG2_E, MASKED, dot, narrow

SHARED_BYTES = 227 * 1024  # that one program may have on SM90


class _Config(NamedTuple):
    num_keys: int  # of a block; divides KEY_ROWS
    num_stages: int  # blocks of keys and values in flight
    num_warps: int


def run_prefill(
    *,
    q: torch.Tensor,
    cache: torch.Tensor,
    w_kv_b: torch.Tensor,
    launches: tuple[Launch, ...],
    spec: AttentionSpec,
) -> torch.Tensor:
    """The contract's ``prefill``: q ``[P, N, nope + rope]`` -> ``[P, N, v]``, computed in the dtype
    of w_kv_b."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    weight = w_kv_b.flatten(0, 1).mT
    cache_rows = cache.view(-1, spec.latent_dim)
    num_keys = max((len(launch.cache_rows) for launch in launches), default=0)
    rebuilt = weight.new_empty(num_keys, weight.shape[1])
    out = q.new_empty(len(q), spec.num_heads, spec.v_head_dim)
    num_carried = 0 if all(launch.is_final for launch in launches) else len(q)
    # Of each row and head, if there is a launch to carry them to: sums, then maximum and weight.
    shape, float32 = (num_carried, spec.num_heads), torch.float32
    state = (
        q.new_empty(*shape, spec.v_head_dim, dtype=float32),
        q.new_empty(*shape, 2, dtype=float32),
    )
    for launch in launches:
        latents = cache_rows.index_select(0, launch.cache_rows).to(weight.dtype)
        first = 0
        for num_rows in launch.products:
            rows = slice(first, first + num_rows)
            torch.mm(latents[rows, : spec.kv_lora_rank], weight, out=rebuilt[rows])
            first = rows.stop
        _attend(q, rebuilt, latents, launch.tiles, out, state, spec)
    return out


def _attend(
    q: torch.Tensor,
    rebuilt: torch.Tensor,
    latents: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor],
    spec: AttentionSpec,
) -> None:
    """One launch: the tiles meet keys and values ``rebuilt [Y, N * (nope + v)]``."""
    block_rows = torch_prefill.QUERY_ROWS
    config = _config(spec, block_rows, rebuilt.dtype.itemsize)
    assert torch_prefill.KEY_ROWS % config.num_keys == 0, "a block must lie in one piece"
    _prefill[(len(tiles), spec.num_heads)](
        q,
        rebuilt,
        latents,
        tiles,
        out,
        *state,
        q.stride(0),
        q.stride(1),
        spec.softmax_scale * LOG2_E,
        COLUMNS=TILE_COLUMNS,
        HEADS=spec.num_heads,
        RANK=spec.kv_lora_rank,
        NOPE=spec.qk_nope_head_dim,
        ROPE=spec.qk_rope_head_dim,
        VALUE=spec.v_head_dim,
        BLOCK_NOPE=_padded(spec.qk_nope_head_dim),
        BLOCK_ROPE=_padded(spec.qk_rope_head_dim),
        BLOCK_VALUE=_padded(spec.v_head_dim),
        BLOCK_ROWS=block_rows,
        BLOCK_KEYS=config.num_keys,
        num_stages=config.num_stages,
        num_warps=config.num_warps,
    )


def _config(spec: AttentionSpec, block_rows: int, value_bytes: int) -> _Config:
    """The largest blocks of which shared memory holds the queries and all that are in flight.

    DeepSeek-V3 in BF16: 128 queries of 192 values are 48 KiB, a block of 64 keys and values of 320
    is 40 KiB, so three stages make 168 KiB. Eight warps are two groups, and ``wgmma`` takes 64 rows
    of each. float32 is multiplied in registers, which more warps have more of.
    """
    head_dim = _padded(spec.qk_nope_head_dim) + _padded(spec.qk_rope_head_dim)
    query_bytes = block_rows * head_dim * value_bytes
    key_bytes = (head_dim + _padded(spec.v_head_dim)) * value_bytes
    num_keys, num_stages = next(
        (num_keys, num_stages)
        for num_keys, num_stages in ((64, 3), (64, 2), (32, 2), (16, 2), (16, 1))
        if query_bytes + num_stages * num_keys * key_bytes <= SHARED_BYTES or num_stages == 1
    )
    return _Config(num_keys, num_stages, num_warps=8 if value_bytes == 2 else 16)


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


@triton.jit
def _load_rows(rows, is_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """``[R, BLOCK]``: SIZE values from each address ``rows [R]``, and zeros. is_row: ``[R]``, or
    None where every address is one."""
    col = tl.arange(0, BLOCK)
    at = rows[:, None] + col[None, :]
    if is_row is not None:
        values = tl.load(at, mask=is_row[:, None] & (col < SIZE)[None, :], other=0.0)
    elif SIZE < BLOCK:
        values = tl.load(at, mask=(col < SIZE)[None, :], other=0.0)
    else:
        values = tl.load(at)
    return values


@triton.jit
def _meet(
    q_nope,
    q_rope,
    top,
    total,
    acc,
    keys,
    rotated,
    start,
    stop,
    first_query,
    scale,
    KEY_STRIDE: tl.constexpr,
    LATENT: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """The state of the softmax after the keys ``start`` to ``stop``. keys, rotated: where those of
    position 0 would be. IS_WHOLE: these are whole blocks, which every query sees."""
    row = tl.arange(0, BLOCK_KEYS)
    for first in range(start, stop, BLOCK_KEYS):
        place = tl.cast(first, tl.int64)
        at = keys + place * KEY_STRIDE + row * KEY_STRIDE
        rotated_at = rotated + place * LATENT + row * LATENT
        key = first + row
        is_key = None if IS_WHOLE else key < stop
        k_nope = _load_rows(at, is_key, NOPE, q_nope.shape[1])
        k_rope = _load_rows(rotated_at, is_key, ROPE, q_rope.shape[1])
        value = _load_rows(at + NOPE, is_key, VALUE, acc.shape[1])
        scores = tl.zeros((acc.shape[0], BLOCK_KEYS), dtype=tl.float32)
        scores = dot(q_rope, tl.trans(k_rope), dot(q_nope, tl.trans(k_nope), scores))
        if is_key is not None:
            last_seen = first_query + tl.arange(0, acc.shape[0])
            is_seen = is_key[None, :] & (key[None, :] <= last_seen[:, None])
            scores = tl.where(is_seen, scores, MASKED)
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
        decay = tl.exp2(top - new_top)
        probs = tl.exp2(scores * scale - new_top[:, None])
        total = total * decay + tl.sum(probs, axis=1)
        acc = dot(narrow(probs, value.dtype), value, acc * decay[:, None])
        top = new_top
    return top, total, acc


# Tiles of a launch begin anywhere in what the plan copied: not worth a kernel of its own.
@triton.jit(do_not_specialize_on_alignment=["tiles"])
def _prefill(
    q,
    rebuilt,
    latents,
    tiles,
    out,
    sums,
    weights,
    q_token_stride,
    q_head_stride,
    scale,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    KEY_STRIDE: tl.constexpr = HEADS * (NOPE + VALUE)
    LATENT: tl.constexpr = RANK + ROPE
    head = tl.program_id(1)
    tile = tiles + tl.program_id(0) * COLUMNS
    first_row, num_rows = tl.load(tile), tl.load(tile + 1)
    origin = tl.load(tile + 2)
    start, stop = tl.load(tile + 3), tl.load(tile + 4)
    is_last = tl.load(tile + 5) != 0
    # 1. Queries, and the state of the softmax over earlier launches' keys, if there were any.
    row = tl.arange(0, BLOCK_ROWS)
    is_row = row < num_rows
    token = first_row.to(tl.int64) + row
    query = q + token * q_token_stride + head * q_head_stride
    dtype = rebuilt.dtype.element_ty
    q_nope = _load_rows(query, is_row, NOPE, BLOCK_NOPE).to(dtype)
    q_rope = _load_rows(query + NOPE, is_row, ROPE, BLOCK_ROPE).to(dtype)
    target = token * HEADS + head
    is_carried = row < tl.where(start > 0, num_rows, 0)
    top = tl.load(weights + target * 2, mask=is_carried, other=MASKED)
    total = tl.load(weights + target * 2 + 1, mask=is_carried, other=0.0)
    acc = _load_rows(sums + target * VALUE, is_carried, VALUE, BLOCK_VALUE)
    # 2. Whole blocks that every query sees, then those that end, for some queries or all, within.
    keys = rebuilt + origin.to(tl.int64) * KEY_STRIDE + head * (NOPE + VALUE)
    rotated = latents + origin.to(tl.int64) * LATENT + RANK
    first_query = tl.where(is_last, stop - num_rows, stop)
    num_seen = tl.minimum(first_query + 1, stop) - start
    whole = start + num_seen // BLOCK_KEYS * BLOCK_KEYS
    top, total, acc = _meet(
        q_nope,
        q_rope,
        top,
        total,
        acc,
        keys,
        rotated,
        start,
        whole,
        first_query,
        scale,
        KEY_STRIDE,
        LATENT,
        NOPE,
        ROPE,
        VALUE,
        BLOCK_KEYS,
        IS_WHOLE=True,
    )
    top, total, acc = _meet(
        q_nope,
        q_rope,
        top,
        total,
        acc,
        keys,
        rotated,
        whole,
        stop,
        first_query,
        scale,
        KEY_STRIDE,
        LATENT,
        NOPE,
        ROPE,
        VALUE,
        BLOCK_KEYS,
        IS_WHOLE=False,
    )
    # 3. The result, or the state for the next launch.
    col = tl.arange(0, BLOCK_VALUE)
    place = target[:, None] * VALUE + col[None, :]
    mask = is_row[:, None] & (col < VALUE)[None, :]
    if is_last:
        result = acc / total[:, None]
        tl.store(out + place, narrow(result, out.dtype.element_ty), mask=mask)
    else:
        tl.store(sums + place, acc, mask=mask)
        tl.store(weights + target * 2, top, mask=is_row)
        tl.store(weights + target * 2 + 1, total, mask=is_row)
