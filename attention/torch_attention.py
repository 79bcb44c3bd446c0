"""The attention core in plain torch, fast on CPUs.

Shape letters: D decode tokens, P prefill tokens, N heads, B decode requests, I work items,
Q query tokens per decode request, c cache rows per item, C kv_lora_rank, Z tile of queries,
Y keys scored at a time.

Decode cuts every request into items of c cache rows, so that work is proportional to the sum of
the context lengths and not to the batch times the longest. The rows of an item are gathered into a
contiguous piece for two batched products, and the items of a request are merged by log-sum-exp in
the order of positions. Gathering costs about half of one of the products; products on views of the
cache would save it, but only for requests whose blocks happen to be neighbours, at one small
product per request, and they would read rows that nobody wrote.

Products accumulate in float32 and round scores to the compute dtype, as the weights they become
are rounded anyway; softmax, its statistics and merging are float32.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from attention.base import (
    BLOCK_SIZE,
    AttentionBackend,
    AttentionBatch,
    AttentionPlan,
    AttentionSpec,
)

ITEM_ROWS = (64, 128, 256, 512)  # sizes to choose the rows per decode item from
ITEM_COST = 16  # what an item costs besides its rows, in rows
GROUP_ROWS = 8192  # cache rows gathered at a time in decode: bounds memory
KEY_ROWS = 1024  # keys scored (and rebuilt from cached context) at a time in prefill
QUERY_ROWS = 128  # queries per prefill tile; divides KEY_ROWS, so the diagonal is in one tile
MASKED = -1e30  # finite: an item that a query does not see at all gets weight 0, not NaN


@dataclass(frozen=True)
class DecodeWork:
    """The decodes of a step as items of ``rows_per_item`` cache rows, by request and position.

    cache_rows: int64 ``[I, c]``, row of the flattened cache; places past the end of a request
        repeat the item's first row. mask: ``[I, Q, c]``, 0 or MASKED. query_rows: int64 ``[I, Q]``,
        row among the decode tokens. item_request: int64 ``[I]``. token_rows: int64 ``[D]``, each
        token's row in ``[B * Q]``. groups: item ranges that are worked on at a time.
    """

    num_requests: int
    cache_rows: torch.Tensor
    mask: torch.Tensor
    query_rows: torch.Tensor
    item_request: torch.Tensor
    token_rows: torch.Tensor
    groups: tuple[slice, ...]

    @property
    def is_split(self) -> bool:
        return len(self.item_request) > self.num_requests


@dataclass(frozen=True)
class PrefillWork:
    """One prefill chunk: its rows among the prefill tokens, and the cache rows of its context in
    pieces of at most KEY_ROWS."""

    rows: slice
    context_rows: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class TorchPlan(AttentionPlan):
    decode: DecodeWork | None
    prefills: tuple[PrefillWork, ...]


class TorchAttention(AttentionBackend):
    """Absorb and expand path over batched matrix products."""

    def __init__(self, spec: AttentionSpec, *, device: torch.device | str = "cpu") -> None:
        if reason := self.supports(spec):
            raise ValueError(reason)
        self.spec = spec
        self.device = torch.device(device)

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if spec.dtype not in (torch.float32, torch.bfloat16):
            return f"torch attention computes in float32 or bfloat16, not {spec.dtype}"
        return None

    def plan(self, batch: AttentionBatch) -> TorchPlan:
        return TorchPlan(
            num_tokens=batch.num_tokens,
            num_decode_tokens=batch.num_decode_tokens,
            decode=self._plan_decode(batch) if batch.num_decode_tokens else None,
            prefills=tuple(self._plan_prefills(batch)),
        )

    def _plan_decode(self, batch: AttentionBatch) -> DecodeWork:
        requests = range(batch.num_decodes)
        query_lens = torch.tensor(batch.query_lens[: batch.num_decodes])
        context_lens = torch.tensor(batch.context_lens[: batch.num_decodes])
        lengths = (query_lens + context_lens).tolist()
        rows_per_item = _rows_per_item(lengths)
        items = [(r, start) for r in requests for start in range(0, lengths[r], rows_per_item)]
        request, start = torch.tensor(items).unbind(-1)  # [I]
        # 1. Rows: positions past the end repeat the item's first one, which is always written.
        positions = start[:, None] + torch.arange(rows_per_item)  # [I, c]
        is_past = positions >= (query_lens + context_lens)[request, None]
        cache_rows = _CacheRows(batch)(request[:, None], positions.where(~is_past, start[:, None]))
        # 2. Queries: requests with fewer than Q repeat their last one, which nobody reads.
        nth = torch.arange(int(query_lens.max())).minimum(query_lens[:, None] - 1)  # [B, Q]
        first_row = query_lens.cumsum(0) - query_lens
        is_hidden = positions[:, None, :] > (context_lens[:, None] + nth)[request, :, None]
        mask = torch.zeros(is_hidden.shape).masked_fill_(is_hidden, MASKED)
        is_token = torch.arange(nth.shape[1]) < query_lens[:, None]  # [B, Q]
        step = max(1, GROUP_ROWS // rows_per_item)
        return DecodeWork(
            num_requests=batch.num_decodes,
            cache_rows=cache_rows.to(self.device),
            mask=mask.to(self.device, self.spec.dtype),
            query_rows=(first_row[:, None] + nth)[request].to(self.device),
            item_request=request.to(self.device),
            token_rows=is_token.flatten().nonzero().flatten().to(self.device),
            groups=tuple(slice(at, at + step) for at in range(0, len(items), step)),
        )

    def _plan_prefills(self, batch: AttentionBatch) -> list[PrefillWork]:
        rows_of, row, works = _CacheRows(batch), 0, []
        for request in range(batch.num_decodes, len(batch.query_lens)):
            context = rows_of(request, torch.arange(batch.context_lens[request]))
            end = row + batch.query_lens[request]
            pieces = context.to(self.device).split(KEY_ROWS) if len(context) else ()
            works.append(PrefillWork(slice(row, end), pieces))
            row = end
        return works

    def decode(self, *, q: torch.Tensor, cache: torch.Tensor, plan: TorchPlan) -> torch.Tensor:
        assert plan.decode is not None, "this step has no decodes"
        work, rank = plan.decode, self.spec.kv_lora_rank
        rows = cache.view(-1, self.spec.latent_dim)
        parts = [self._decode_items(q, rows, work, group) for group in work.groups]
        out = torch.cat([part for part, _ in parts]) if len(parts) > 1 else parts[0][0]
        if work.is_split:
            lse = torch.cat([lse for _, lse in parts])
            out = _merge_items(out, lse, work).to(q.dtype)
        out = out.view(-1, self.spec.num_heads, rank)  # [B * Q, N, C]
        return out if len(out) == len(q) else out[work.token_rows]

    def _decode_items(
        self, q: torch.Tensor, rows: torch.Tensor, work: DecodeWork, group: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax over each item alone: sums ``[I, Q * N, C]`` and log-sum-exp ``[I, Q * N]``."""
        num_heads, dim = self.spec.num_heads, self.spec.latent_dim
        mask = work.mask[group]
        num_items, num_queries, num_rows = mask.shape
        if num_queries > 1:
            mask = mask.repeat_interleave(num_heads, dim=1)
        queries = q.index_select(0, work.query_rows[group].flatten())
        queries = queries.view(num_items, num_queries * num_heads, dim)
        keys = rows.index_select(0, work.cache_rows[group].flatten())
        keys = keys.view(num_items, num_rows, dim)
        values = keys[..., : self.spec.kv_lora_rank]
        scores = torch.baddbmm(mask, queries, keys.mT, alpha=self.spec.softmax_scale)
        probs, lse = _softmax(scores)
        return torch.bmm(probs, values), lse

    def prefill(
        self,
        *,
        q: torch.Tensor,
        latent: torch.Tensor,
        cache: torch.Tensor,
        w_kv_b: torch.Tensor,
        plan: TorchPlan,
    ) -> torch.Tensor:
        rows = cache.view(-1, self.spec.latent_dim)
        keys, values = self._expand(latent, w_kv_b)
        out = q.new_empty(len(q), self.spec.num_heads, self.spec.v_head_dim)
        for work in plan.prefills:
            tiles = _Tiles(q[work.rows], self.spec.softmax_scale)
            for piece in work.context_rows:
                tiles.add_context(*self._expand(rows.index_select(0, piece), w_kv_b))
            tiles.add_new(keys[:, work.rows], values[:, work.rows])
            out[work.rows] = tiles.result().transpose(0, 1)
        return out

    def _expand(
        self, latent: torch.Tensor, w_kv_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """latent ``[Y, C + rope]`` -> keys ``[N, Y, nope + rope]``, values ``[N, Y, v]``."""
        spec = self.spec
        compressed, rotated = latent.split([spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        both = torch.bmm(compressed.expand(spec.num_heads, -1, -1), w_kv_b.mT)
        keys, values = both.split([spec.qk_nope_head_dim, spec.v_head_dim], dim=-1)
        return torch.cat([keys, rotated.expand(spec.num_heads, -1, -1)], dim=-1), values


class _Tiles:
    """The queries ``[T, N, nope + rope]`` of one prefill chunk in tiles, with their sums so far."""

    def __init__(self, queries: torch.Tensor, scale: float) -> None:
        self.tiles = queries.transpose(0, 1).split(QUERY_ROWS, dim=1)  # [N, Z, nope + rope] each
        self.scale = scale
        self.sums: list[_Sum | None] = [None] * len(self.tiles)
        self._unused = queries.new_zeros(1)  # the addend of a product without one

    def add_context(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Every query sees all of these keys ``[N, Y, nope + rope]`` and values ``[N, Y, v]``."""
        for idx in range(len(self.tiles)):
            self._add(idx, keys, values, is_diagonal=False)

    def add_new(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Query j sees the first j + 1 of these keys ``[N, T, nope + rope]``."""
        for start in range(0, keys.shape[1], KEY_ROWS):
            for idx in range(start // QUERY_ROWS, len(self.tiles)):
                first = idx * QUERY_ROWS  # the tile's first query
                seen = slice(start, min(start + KEY_ROWS, first + QUERY_ROWS))
                self._add(idx, keys[:, seen], values[:, seen], is_diagonal=seen.stop > first)

    def result(self) -> torch.Tensor:
        """``[N, T, v]`` in float32."""
        return torch.cat([total.out for total in self.sums if total is not None], dim=1)

    def _add(
        self, idx: int, keys: torch.Tensor, values: torch.Tensor, *, is_diagonal: bool
    ) -> None:
        tile = self.tiles[idx]
        scores = torch.baddbmm(self._unused, tile, keys.mT, beta=0, alpha=self.scale)
        if is_diagonal:
            num_queries = tile.shape[1]
            is_later = torch.ones(num_queries, num_queries, dtype=torch.bool, device=tile.device)
            scores[..., -num_queries:].masked_fill_(is_later.triu_(diagonal=1), MASKED)
        probs, lse = _softmax(scores)
        part = _Sum(torch.bmm(probs, values).float(), lse[..., None])
        total = self.sums[idx]
        self.sums[idx] = part if total is None else total.merged(part)


class _Sum(NamedTuple):
    """Weighted values ``[N, Z, v]`` over some keys and their log-sum-exp ``[N, Z, 1]``, float32."""

    out: torch.Tensor
    lse: torch.Tensor

    def merged(self, other: "_Sum") -> "_Sum":
        lse = torch.logaddexp(self.lse, other.lse)
        out = self.out * (self.lse - lse).exp() + other.out * (other.lse - lse).exp()
        return _Sum(out, lse)


class _CacheRows:
    """Maps (request, position) to rows of the flattened cache."""

    def __init__(self, batch: AttentionBatch) -> None:
        self._blocks = torch.tensor([block for table in batch.block_tables for block in table])
        lens = torch.tensor([len(table) for table in batch.block_tables], dtype=torch.int64)
        self._first = lens.cumsum(0) - lens

    def __call__(self, request: torch.Tensor | int, positions: torch.Tensor) -> torch.Tensor:
        block = self._blocks[self._first[request] + positions // BLOCK_SIZE]
        return block * BLOCK_SIZE + positions % BLOCK_SIZE


def _rows_per_item(lengths: list[int]) -> int:
    """The item size that costs least over requests of these lengths."""

    def cost(rows: int) -> int:
        return sum(-(-length // rows) for length in lengths) * (rows + ITEM_COST)

    return min(ITEM_ROWS, key=cost)


def _softmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities over the last dimension in the dtype of scores, log-sum-exp in float32.

    The largest probability is exp(max) over the sum of all, so the sum comes without another pass
    of exponentials.
    """
    probs = torch.softmax(scores, dim=-1, dtype=torch.float32)
    lse = scores.amax(dim=-1).float() - probs.amax(dim=-1).log()
    return probs.to(scores.dtype), lse


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
