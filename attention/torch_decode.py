"""Absorbed decode in plain torch: every request in items of bounded length, items in groups.

Shape letters: D decode tokens, B requests, Q query tokens per request, I items (i of one group),
r cache rows of an item, N heads, C kv_lora_rank.

An item is up to ITEM_ROWS cache rows of one request; its length is rounded up to whole blocks, and
items of equal length form groups, so that work is proportional to the sum of the context lengths
and not to the batch times the longest. A group is gathered into one contiguous piece for two
batched products, small enough to stay near the core; items of one request are merged by log-sum-exp
in a fixed order. Gathering costs about as much as one of the products. Products on views of the
cache would save it, but only for requests whose blocks happen to be neighbours, at one small
product per request (slower in sum), and they would read rows that nobody wrote.

Products accumulate in float32 and round scores to the type in which they are computed, as the
weights they become are rounded anyway; softmax, its statistics and merging are float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from attention.base import BLOCK_SIZE, AttentionBatch, AttentionSpec
from attention.block_tables import CacheRows
from attention.torch_ops import MASKED, softmax_lse

ITEM_ROWS = 512  # whole blocks
# Of products in each type: 2.4 MB of latents of 576 bfloat16 values, 1.2 MB in float32, which CPUs
# with smaller caches use. There, 2048 rows take 1.0 to 1.5 times as long.
GROUP_ROWS = {torch.bfloat16: 2048, torch.float32: 512}


class _Items(NamedTuple):
    """All int64 ``[I]``; num_rows: padded, rising."""

    request: torch.Tensor
    start: torch.Tensor
    num_rows: torch.Tensor


class _Group(NamedTuple):
    """Items of equal length. cache_rows: int64 ``[i * r]``, row of the flattened cache; places past
    the end of a request repeat its item's first row. mask: ``[i, Q, r]``, 0 or MASKED. query_rows:
    int64 ``[i * Q]``, row among the decode tokens."""

    cache_rows: torch.Tensor
    mask: torch.Tensor
    query_rows: torch.Tensor


@dataclass(frozen=True)
class DecodeWork:
    """The decodes of one step. item_request: int64 ``[I]``, in the order of the groups' items.

    token_rows: int64 ``[D]``, where each token's result lies: among ``[I * Q]`` when every request
    is one item, else among ``[B * Q]``.
    """

    num_requests: int
    groups: tuple[_Group, ...]
    item_request: torch.Tensor
    token_rows: torch.Tensor

    @property
    def is_split(self) -> bool:
        return len(self.item_request) > self.num_requests


def plan_decode(batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> DecodeWork:
    """Cut the first ``num_decodes`` requests into groups of items. dtype: of the products."""
    query_lens = torch.tensor(batch.query_lens[: batch.num_decodes])
    context_lens = torch.tensor(batch.context_lens[: batch.num_decodes])
    # Requests with fewer than Q queries repeat their last one, which nobody reads.
    nth = torch.arange(int(query_lens.max())).minimum(query_lens[:, None] - 1)  # [B, Q]
    first_row = query_lens.cumsum(0) - query_lens
    last_seen, query_rows = context_lens[:, None] + nth, first_row[:, None] + nth
    items = _items(context_lens + query_lens)
    groups = _groups(items, CacheRows(batch), last_seen, query_rows, dtype)
    place = torch.arange(batch.num_decodes)
    if len(items.request) == batch.num_decodes:
        place = items.request.argsort()
    token_rows = place[:, None] * nth.shape[1] + nth  # [B, Q]
    is_token = torch.arange(nth.shape[1]) < query_lens[:, None]
    return DecodeWork(
        num_requests=batch.num_decodes,
        groups=tuple(_Group(*(tensor.to(device) for tensor in group)) for group in groups),
        item_request=items.request.to(device),
        token_rows=token_rows[is_token].to(device),
    )


def run_decode(
    *, q: torch.Tensor, cache: torch.Tensor, work: DecodeWork, spec: AttentionSpec
) -> torch.Tensor:
    """The contract's ``decode``: q ``[D, N, latent_dim]`` -> ``[D, N, C]``."""
    rows = cache.view(-1, spec.latent_dim)
    parts = [_run_group(q, rows, group, spec, with_lse=work.is_split) for group in work.groups]
    merged = torch.cat([out for out, _ in parts])
    if work.is_split:
        lse = torch.cat([lse for _, lse in parts if lse is not None])
        merged = _merge_items(merged, lse, work)
    merged = merged.view(-1, spec.num_heads, spec.kv_lora_rank)
    return merged.index_select(0, work.token_rows).to(q.dtype)


def _items(lengths: torch.Tensor) -> _Items:
    """Of requests of these lengths; in the order of their own, then of requests."""
    num_items = -(-lengths // ITEM_ROWS)
    request = torch.arange(len(lengths)).repeat_interleave(num_items)
    nth = torch.arange(len(request)) - (num_items.cumsum(0) - num_items)[request]
    start = nth * ITEM_ROWS
    num_rows = (-((start - lengths[request]) // BLOCK_SIZE) * BLOCK_SIZE).clamp(max=ITEM_ROWS)
    order = num_rows.argsort(stable=True)
    return _Items(request[order], start[order], num_rows[order])


def _groups(
    items: _Items,
    rows_of: CacheRows,
    last_seen: torch.Tensor,
    query_rows: torch.Tensor,
    dtype: torch.dtype,
) -> Iterator[_Group]:
    """Runs of items of equal length, at most GROUP_ROWS rows each. last_seen: the last position
    that a query sees, and query_rows, both ``[B, Q]``."""
    sizes, counts = items.num_rows.unique_consecutive(return_counts=True)
    parts = (part.split(counts.tolist()) for part in (items.request, items.start[:, None]))
    for size, request, start in zip(sizes.tolist(), *parts, strict=True):
        row, step = torch.arange(size), max(1, GROUP_ROWS[dtype] // size)
        is_hidden = row > (last_seen[request] - start)[:, :, None]  # [i, Q, r]
        blocks = rows_of(request[:, None].numpy(), (start + row[::BLOCK_SIZE]).numpy())
        first_rows = torch.from_numpy(blocks)
        cache_rows = first_rows[:, :, None] + row[:BLOCK_SIZE]  # [i, r / 64, 64]
        is_past = is_hidden[:, -1, -BLOCK_SIZE:]  # only a request's last block is not full
        cache_rows[:, -1] = cache_rows[:, -1].where(~is_past, first_rows[:, :1])
        mask = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, MASKED)
        yield from map(
            _Group,
            cache_rows.flatten().split(step * size),
            mask.split(step),
            query_rows[request].flatten().split(step * query_rows.shape[1]),
        )


def _run_group(
    q: torch.Tensor, rows: torch.Tensor, group: _Group, spec: AttentionSpec, *, with_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Softmax over each item alone: sums ``[i, Q * N, C]`` and log-sum-exp ``[i, Q * N]``."""
    num_items, num_queries, num_rows = group.mask.shape
    mask = group.mask
    if num_queries > 1:
        mask = mask.repeat_interleave(spec.num_heads, dim=1)
    queries = q.index_select(0, group.query_rows).to(mask.dtype)
    queries = queries.view(num_items, -1, spec.latent_dim)
    keys = rows.index_select(0, group.cache_rows).to(mask.dtype)
    keys = keys.view(num_items, num_rows, spec.latent_dim)
    scores = torch.baddbmm(mask, queries, keys.mT, alpha=spec.softmax_scale)
    probs, lse = softmax_lse(scores, with_lse=with_lse)
    # The rotated part is summed too and dropped: rows without gaps are faster than fewer columns.
    return torch.bmm(probs, keys)[..., : spec.kv_lora_rank], lse


def _merge_items(out: torch.Tensor, lse: torch.Tensor, work: DecodeWork) -> torch.Tensor:
    """out ``[I, R, C]``, lse ``[I, R]`` -> float32 ``[B, R, C]``, summed in the order of items."""
    request = work.item_request
    top = lse.new_full((work.num_requests, lse.shape[1]), MASKED)
    top.scatter_reduce_(0, request[:, None].expand_as(lse), lse, "amax")
    weight = (lse - top[request]).exp()
    total = torch.zeros_like(top).index_add_(0, request, weight)
    summed = out.new_zeros(*top.shape, out.shape[-1], dtype=torch.float32)
    summed.index_add_(0, request, out * weight[..., None])
    return summed / total[..., None]
