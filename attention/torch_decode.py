"""Absorbed decode in plain torch: every request in items of bounded length, items in groups.

Shape letters: D decode tokens, B requests, Q query tokens per request, I items (i of one group),
r cache rows of an item, N heads, C kv_lora_rank.

An item is up to ITEM_ROWS cache rows of one request; its length is rounded up to a multiple of
ROW_STEP and items of equal length form groups, so that work is proportional to the sum of the
context lengths and not to the batch times the longest. A group is gathered into one contiguous
piece for two batched products, small enough to stay near the core; items of one request are merged
by log-sum-exp in a fixed order. Gathering costs about as much as one of the products. Products on
views of the cache would save it, but only for requests whose blocks happen to be neighbours, at
one small product per request (slower in sum), and they would read rows that nobody wrote.

Products accumulate in float32 and round scores to the type in which they are computed, as the
weights they become are rounded anyway; softmax, its statistics and merging are float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from attention.base import AttentionBatch, AttentionSpec
from attention.torch_ops import MASKED, CacheRows, softmax_lse

ITEM_ROWS = 512
ROW_STEP = 64
# Of products in each type: 2.4 MB of latents of 576 bfloat16 values, 1.2 MB in float32, which CPUs
# with smaller caches use. There, 2048 rows take 1.0 to 1.5 times as long.
GROUP_ROWS = {torch.bfloat16: 2048, torch.float32: 512}


class _Item(NamedTuple):
    num_rows: int  # padded
    request: int
    start: int


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
    items = sorted(_items(batch))
    rows_of, groups = CacheRows(batch), []
    for part in _grouped(items, GROUP_ROWS[dtype]):
        requests = torch.tensor([item.request for item in part])
        start = torch.tensor([item.start for item in part])[:, None]
        positions = start + torch.arange(part[0].num_rows)  # [i, r]
        is_hidden = positions[:, None, :] > last_seen[requests][:, :, None]  # [i, Q, r]
        is_past = positions > last_seen[requests, -1:]
        cache_rows = rows_of(requests[:, None], positions.where(~is_past, start))
        group = _Group(
            cache_rows=cache_rows.flatten(),
            mask=torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, MASKED),
            query_rows=query_rows[requests].flatten(),
        )
        groups.append(_Group(*(tensor.to(device) for tensor in group)))
    item_request = torch.tensor([item.request for item in items])
    place = torch.arange(batch.num_decodes)
    if len(items) == batch.num_decodes:
        place = item_request.argsort()
    token_rows = place[:, None] * nth.shape[1] + nth  # [B, Q]
    is_token = torch.arange(nth.shape[1]) < query_lens[:, None]
    return DecodeWork(
        num_requests=batch.num_decodes,
        groups=tuple(groups),
        item_request=item_request.to(device),
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


def _items(batch: AttentionBatch) -> Iterator[_Item]:
    for request in range(batch.num_decodes):
        length = batch.context_lens[request] + batch.query_lens[request]
        for start in range(0, length, ITEM_ROWS):
            steps = -(-(length - start) // ROW_STEP)
            yield _Item(min(steps * ROW_STEP, ITEM_ROWS), request, start)


def _grouped(items: list[_Item], most_rows: int) -> Iterator[list[_Item]]:
    """Runs of items of equal length, at most ``most_rows`` rows each; items are sorted."""
    for num_rows, same in groupby(items, key=lambda item: item.num_rows):
        members, step = list(same), max(1, most_rows // num_rows)
        yield from (members[at : at + step] for at in range(0, len(members), step))


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
