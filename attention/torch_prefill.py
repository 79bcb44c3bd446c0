"""Expanded prefill in plain torch: tiles of queries against keys and values rebuilt from latents.

Shape letters: P prefill tokens, T queries of one chunk, Z queries of one tile, Y keys, N heads,
C kv_lora_rank.

New tokens are expanded once for all chunks. Cached context is gathered and expanded in pieces of
KEY_ROWS, so memory does not grow with the context. A tile skips keys that lie after it, which
halves the causal part; tiles over several pieces are merged by log-sum-exp in order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from attention.base import AttentionBackend, AttentionBatch, AttentionPlan, AttentionSpec
from attention.torch_ops import MASKED, CacheRows, softmax_lse

KEY_ROWS = 1024
QUERY_ROWS = 128  # divides KEY_ROWS, so that a tile's diagonal lies in one piece


@dataclass(frozen=True)
class PrefillWork:
    """One prefill chunk: its rows among the prefill tokens, and the cache rows (int64) of its
    context in pieces of at most KEY_ROWS."""

    rows: slice
    context_rows: tuple[torch.Tensor, ...]

    @property
    def is_merged(self) -> bool:
        """Whether a query's keys come in more than one piece."""
        return bool(self.context_rows) or self.rows.stop - self.rows.start > KEY_ROWS


def plan_prefills(batch: AttentionBatch, device: torch.device) -> Iterator[PrefillWork]:
    """The requests after the first ``num_decodes``, in token order."""
    rows_of, start = CacheRows(batch), 0
    for request in range(batch.num_decodes, len(batch.query_lens)):
        end = start + batch.query_lens[request]
        positions = torch.arange(batch.context_lens[request])
        rows = rows_of(torch.tensor(request), positions).to(device)
        yield PrefillWork(slice(start, end), rows.split(KEY_ROWS) if len(rows) else ())
        start = end


@dataclass(frozen=True)
class Expansion:
    """Rebuilds keys and values from latents."""

    w_uk: torch.Tensor  # [N, nope, C]
    w_uv: torch.Tensor  # [N, v, C]
    spec: AttentionSpec

    def __call__(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """latent ``[Y, C + rope]`` -> keys ``[N, Y, nope + rope]``, values ``[N, Y, v]``."""
        spec = self.spec
        compressed, rotated = latent.split([spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        compressed, rotated = (t.expand(spec.num_heads, -1, -1) for t in (compressed, rotated))
        keys = torch.cat([torch.bmm(compressed, self.w_uk.mT), rotated], dim=-1)
        return keys, torch.bmm(compressed, self.w_uv.mT)


def run_prefill(
    *,
    q: torch.Tensor,
    latent: torch.Tensor,
    cache: torch.Tensor,
    expand: Expansion,
    works: tuple[PrefillWork, ...],
) -> torch.Tensor:
    """The contract's ``prefill``: q ``[P, N, nope + rope]`` -> ``[P, N, v]``."""
    spec = expand.spec
    rows = cache.view(-1, spec.latent_dim)
    keys, values = expand(latent)
    out = q.new_empty(len(q), spec.num_heads, spec.v_head_dim)
    for work in works:
        tiles = _Tiles(q[work.rows], spec.softmax_scale, is_merged=work.is_merged)
        for piece in work.context_rows:
            tiles.add_context(*expand(rows.index_select(0, piece)))
        tiles.add_new(keys[:, work.rows], values[:, work.rows])
        out[work.rows] = tiles.result().transpose(0, 1)
    return out


class _Sum(NamedTuple):
    """Weighted values ``[N, Z, v]`` over some keys and their log-sum-exp ``[N, Z, 1]``, float32."""

    out: torch.Tensor
    lse: torch.Tensor

    def merged(self, other: "_Sum") -> "_Sum":
        lse = torch.logaddexp(self.lse, other.lse)
        out = self.out * (self.lse - lse).exp() + other.out * (other.lse - lse).exp()
        return _Sum(out, lse)


class _Tiles:
    """The queries ``[T, N, nope + rope]`` of one chunk in tiles, with their sums so far.

    is_merged: a tile meets its keys in more than one call.
    """

    def __init__(self, queries: torch.Tensor, scale: float, *, is_merged: bool) -> None:
        self.tiles = queries.transpose(0, 1).split(QUERY_ROWS, dim=1)  # [N, Z, nope + rope] each
        self.scale = scale
        self.is_merged = is_merged
        self.sums: list[_Sum | None] = [None] * len(self.tiles)
        self.outs: list[torch.Tensor] = []  # of tiles that are not merged
        self._unused = queries.new_zeros(1)  # the addend of a product without one
        self._later = queries.new_full((QUERY_ROWS, QUERY_ROWS), MASKED).triu_(diagonal=1)

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
        """``[N, T, v]``, in float32 when merged."""
        merged = [total.out for total in self.sums if total is not None]
        return torch.cat(merged or self.outs, dim=1)

    def _add(
        self, idx: int, keys: torch.Tensor, values: torch.Tensor, *, is_diagonal: bool
    ) -> None:
        tile = self.tiles[idx]
        # A product over heads that lie apart in memory takes a third longer than copying the keys.
        keys = keys.contiguous()
        scores = torch.baddbmm(self._unused, tile, keys.mT, beta=0, alpha=self.scale)
        if is_diagonal:
            num_queries = tile.shape[1]
            scores[..., -num_queries:].add_(self._later[:num_queries, :num_queries])
        probs, lse = softmax_lse(scores, with_lse=self.is_merged)
        out = torch.bmm(probs, values)
        if lse is None:
            self.outs.append(out)
            return
        part = _Sum(out.float(), lse[..., None])
        total = self.sums[idx]
        self.sums[idx] = part if total is None else total.merged(part)


@dataclass(frozen=True)
class PrefillPlan(AttentionPlan):
    """The part of a plan that ``TorchPrefill`` runs."""

    prefills: tuple[PrefillWork, ...]


class TorchPrefill(AttentionBackend):
    """What backends share whose prefill is this module: only their decode is their own."""

    def __init__(self, spec: AttentionSpec, *, device: torch.device | str = "cpu") -> None:
        if reason := self.supports(spec):
            raise ValueError(reason)
        self.spec = spec
        self.device = torch.device(device)

    def prefill(
        self,
        *,
        q: torch.Tensor,
        latent: torch.Tensor,
        cache: torch.Tensor,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        plan: PrefillPlan,
    ) -> torch.Tensor:
        expand = Expansion(w_uk, w_uv, self.spec)
        return run_prefill(q=q, latent=latent, cache=cache, expand=expand, works=plan.prefills)
