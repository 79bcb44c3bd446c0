"""Expanded prefill in plain torch: tiles of queries against keys and values rebuilt from latents.

Shape letters: P prefill tokens, Z queries of one tile, Y keys of one piece, N heads,
C kv_lora_rank.

Everything is cut by position: queries into tiles of QUERY_ROWS, keys into pieces of KEY_ROWS. New
keys come out of the cache like older ones. A tile meets its pieces one by one, less the keys that
lie after it, and sums over several pieces are merged by log-sum-exp in their order. So memory does
not grow with the context, and where a prompt was cut into chunks does not show in the result when
it was between two tiles, as far as a matrix product's rows do not depend on their number.

Not chosen: PyTorch's flash attention, at a third of this speed on CPUs without matrix units.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from attention.base import AttentionBackend, AttentionBatch, AttentionPlan, AttentionSpec
from attention.block_tables import CacheRows
from attention.products import product_dtype
from attention.torch_ops import MASKED, softmax_lse

KEY_ROWS = 1024
QUERY_ROWS = 128  # divides KEY_ROWS, so that a tile's own keys lie in one piece


class Tile(NamedTuple):
    """Queries that meet the first ``num_keys`` keys of a piece.

    queries: rows among the prefill tokens. is_first, is_last: the piece is the first, the last one
    that they meet; its last keys are then those of the queries themselves.
    """

    queries: slice
    num_keys: int
    is_first: bool
    is_last: bool


class Prompt(NamedTuple):
    """New tokens of a request. queries: their positions. first_row: among the prefill tokens."""

    request: int
    queries: range
    first_row: int


class Piece(NamedTuple):
    """Neighbouring keys of one request: cache positions ``start`` to ``stop``."""

    prompt: Prompt
    start: int
    stop: int

    @property
    def num_keys(self) -> int:
        return self.stop - self.start

    def tiles(self) -> Iterator[Tile]:
        """Of the request's queries, those that see any of these keys."""
        _, queries, first_row = self.prompt
        first = max(queries.start, self.start)
        while first < queries.stop:
            last = min((first // QUERY_ROWS + 1) * QUERY_ROWS, queries.stop)
            yield Tile(
                queries=slice(first_row + first - queries.start, first_row + last - queries.start),
                num_keys=min(self.stop, last) - self.start,
                is_first=self.start == 0,
                is_last=first < self.stop,
            )
            first = last

    def cache_rows(self, rows_of: CacheRows) -> torch.Tensor:
        """int64 ``[Y]``, on the CPU."""
        return torch.from_numpy(rows_of(self.prompt.request, np.arange(self.start, self.stop)))


@dataclass(frozen=True)
class KeyGroup:
    """Pieces that one product rebuilds, and what meets each of them. cache_rows: int64."""

    cache_rows: torch.Tensor
    pieces: list[Piece]
    tiles: list[tuple[Tile, ...]]


def plan_prefills(batch: AttentionBatch, device: torch.device) -> Iterator[KeyGroup]:
    """The requests after the first ``num_decodes``, in token order."""
    if not batch.has_prefills:
        return
    rows_of = CacheRows(batch)
    for pieces in cut_keys(batch):
        rows = torch.cat([piece.cache_rows(rows_of) for piece in pieces])
        yield KeyGroup(rows.to(device), pieces, [tuple(piece.tiles()) for piece in pieces])


def cut_keys(batch: AttentionBatch) -> Iterator[list[Piece]]:
    """All keys of the prefills, in token order: at most KEY_ROWS for each product.

    A piece of KEY_ROWS keys is a product of its own, in which the number of other keys that a step
    rebuilds cannot show. Shorter pieces share one.
    """
    group: list[Piece] = []
    for piece in _pieces(batch):
        if group and sum(p.num_keys for p in group) + piece.num_keys > KEY_ROWS:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _pieces(batch: AttentionBatch) -> Iterator[Piece]:
    first_row = 0
    for request in range(batch.num_decodes, len(batch.query_lens)):
        context, num_queries = batch.context_lens[request], batch.query_lens[request]
        end = context + num_queries
        prompt = Prompt(request, range(context, end), first_row)
        for start in range(0, end, KEY_ROWS):
            yield Piece(prompt, start, min(start + KEY_ROWS, end))
        first_row += num_queries


def run_prefill(
    *,
    q: torch.Tensor,
    cache: torch.Tensor,
    w_kv_b: torch.Tensor,
    groups: tuple[KeyGroup, ...],
    spec: AttentionSpec,
) -> torch.Tensor:
    """The contract's ``prefill``: q ``[P, N, nope + rope]`` -> ``[P, N, v]``, computed in the dtype
    of w_kv_b."""
    cache_rows = cache.view(-1, spec.latent_dim)
    tiles = _Tiles(q, spec, w_kv_b.dtype)
    for group in groups:
        latents = cache_rows.index_select(0, group.cache_rows).to(w_kv_b.dtype)
        compressed, rotated = latents.split([spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        rebuilt = F.linear(compressed, w_kv_b.flatten(0, 1)).unflatten(-1, (spec.num_heads, -1))
        sizes = [piece.num_keys for piece in group.pieces]
        for met_by, kv, shared in zip(
            group.tiles, rebuilt.split(sizes), rotated.split(sizes), strict=True
        ):
            k, v = kv.transpose(0, 1).split([spec.qk_nope_head_dim, spec.v_head_dim], dim=-1)
            keys = torch.cat([k, shared.expand(spec.num_heads, -1, -1)], dim=-1)
            values = v.contiguous()
            for tile in met_by:
                tiles.add(tile, keys[:, : tile.num_keys], values[:, : tile.num_keys])
    return tiles.out


class _Sum(NamedTuple):
    """Weighted values ``[N, Z, v]`` over some keys and their log-sum-exp ``[N, Z, 1]``, float32."""

    out: torch.Tensor
    lse: torch.Tensor

    def merged(self, other: "_Sum") -> "_Sum":
        lse = torch.logaddexp(self.lse, other.lse)
        out = self.out * (self.lse - lse).exp() + other.out * (other.lse - lse).exp()
        return _Sum(out, lse)


class _Tiles:
    """The results ``out [P, N, v]`` of all queries ``q [P, N, nope + rope]``, and the sums of tiles
    that have not met all their pieces."""

    def __init__(self, q: torch.Tensor, spec: AttentionSpec, dtype: torch.dtype) -> None:
        self.q = q.to(dtype)
        self.scale = spec.softmax_scale
        self.out = q.new_empty(len(q), spec.num_heads, spec.v_head_dim)
        self._sums: dict[int, _Sum] = {}  # by the tile's first row
        self._unused = self.q.new_zeros(1)  # the addend of a product without one
        self._later = self.q.new_full((QUERY_ROWS, QUERY_ROWS), MASKED).triu_(diagonal=1)

    def add(self, tile: Tile, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys ``[N, Y, nope + rope]`` and values ``[N, Y, v]`` that the tile meets next."""
        queries = self.q[tile.queries].transpose(0, 1)
        # A product over heads that lie apart in memory takes a third longer than copying the keys.
        keys = keys.contiguous()
        scores = torch.baddbmm(self._unused, queries, keys.mT, beta=0, alpha=self.scale)
        if tile.is_last:
            num_queries = scores.shape[1]
            scores[..., -num_queries:].add_(self._later[:num_queries, :num_queries])
        is_only = tile.is_first and tile.is_last
        probs, lse = softmax_lse(scores, with_lse=not is_only)
        out = torch.bmm(probs, values)
        if lse is not None:
            total = _Sum(out.float(), lse[..., None])
            if not tile.is_first:
                total = self._sums.pop(tile.queries.start).merged(total)
            if not tile.is_last:
                self._sums[tile.queries.start] = total
                return
            out = total.out
        self.out[tile.queries] = out.transpose(0, 1)


@dataclass(frozen=True)
class PrefillPlan(AttentionPlan):
    """prefills: what ``TorchPrefill`` runs, KeyGroups, or one of its children, of its own type."""

    prefills: tuple[Any, ...]


class TorchPrefill(AttentionBackend):
    """What backends share whose prefill is this module: only their decode is their own."""

    def __init__(self, spec: AttentionSpec, *, device: torch.device | str = "cpu") -> None:
        if reason := self.supports(spec):
            raise ValueError(reason)
        self.spec = spec
        self.device = torch.device(device)

    def prefill(
        self, *, q: torch.Tensor, cache: torch.Tensor, w_kv_b: torch.Tensor, plan: PrefillPlan
    ) -> torch.Tensor:
        w_kv_b = w_kv_b.to(product_dtype(self.spec.dtype, self.device))  # as the layer keeps it
        return run_prefill(q=q, cache=cache, w_kv_b=w_kv_b, groups=plan.prefills, spec=self.spec)
