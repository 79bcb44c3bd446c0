"""The words of one dispatch message: exact, without padding.

For n rows, m entries, H hidden and G = ceil(H / 128), a message is, in this order: ``[m, 2]``
entries (row * S + slot, then the bits of the float32 weight), ``[n, G]`` bits of the float32 scales
when the payload is FP8, and ``[n, H]`` rows. A word is an int32: every part is a whole number of
words, so all parts are aligned, and no backend needs to know how to send FP8.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from moe_ep.dispatch.base import DispatchSpec
from moe_ep.dispatch.layout import Entries
from moe_ep.dispatch.routing import SendPlan
from moe_ep.fp8 import FP8, num_blocks

WORD = torch.int32
WORD_BYTES = 4
ENTRY_WORDS = 2


class Source(NamedTuple):
    """What came from one rank. rows: ``[n, H]`` in the payload dtype. scales: float32 ``[n, G]`` or
    None. row_idx: int64 ``[m]``, the row of each entry.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    row_idx: np.ndarray


class _Parts(NamedTuple):
    """Views of one message: words ``[m, 2]``, ``[n, G]`` (G is 0 unless FP8) and ``[n, row]``."""

    entries: torch.Tensor
    scales: torch.Tensor
    rows: torch.Tensor


class WireFormat:
    """Writes and reads the messages of one spec."""

    def __init__(self, spec: DispatchSpec) -> None:
        self._spec = spec
        self._data_words = spec.hidden * spec.payload_dtype.itemsize // WORD_BYTES
        self._num_scales = num_blocks(spec.hidden) if spec.payload_dtype == FP8 else 0

    @staticmethod
    def problem(spec: DispatchSpec) -> str | None:
        """Why messages of this spec cannot be written; None when they can."""
        for field in ("payload_dtype", "out_dtype"):
            row_bytes = spec.hidden * getattr(spec, field).itemsize
            if row_bytes % WORD_BYTES:
                return (
                    f"hidden: {spec.hidden} given, a row of {row_bytes} bytes ({field}) "
                    f"is no multiple of {WORD_BYTES}"
                )
        most = max(spec.max_tokens_per_rank, spec.capacity) * spec.num_slots_per_rank
        if most >= 2**31:
            return f"max_tokens_per_rank x num_slots_per_rank: {most} given, under 2^31 allowed"
        return None

    @property
    def row_words(self) -> int:
        """Words of one row with its scales."""
        return self._data_words + self._num_scales

    def sizes(self, row_counts: np.ndarray, entry_counts: np.ndarray) -> list[int]:
        """Words of each rank's message."""
        return (row_counts * self.row_words + entry_counts * ENTRY_WORDS).tolist()

    def pack(
        self, plan: SendPlan, rows: torch.Tensor, scales: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[int]]:
        """All messages one after another in rank order, and their sizes in words.

        rows: encoded tokens, at least up to the last one that the plan names; scales as in
        ``encode_rows``.
        """
        sizes = self.sizes(plan.row_counts, plan.entry_counts)
        message = torch.empty(sum(sizes), dtype=WORD, device=rows.device)
        row_words = rows.view(WORD)
        scale_words = None if scales is None else scales.view(WORD)
        tokens = torch.from_numpy(plan.row_tokens).to(rows.device)
        entries = torch.from_numpy(self._encode_entries(plan)).to(rows.device)
        parts = self._parts(message, plan.row_counts, plan.entry_counts)
        chosen = tokens.split_with_sizes(plan.row_counts.tolist())
        for part, part_tokens, part_entries in zip(
            parts, chosen, entries.split_with_sizes(plan.entry_counts.tolist()), strict=True
        ):
            part.entries.copy_(part_entries)
            torch.index_select(row_words, 0, part_tokens, out=part.rows)
            if scale_words is not None:
                torch.index_select(scale_words, 0, part_tokens, out=part.scales)
        return message, sizes

    def unpack(
        self, message: torch.Tensor, row_counts: np.ndarray, entry_counts: np.ndarray
    ) -> tuple[Entries, list[Source]]:
        """Read the messages of all ranks.

        Returns the entries of all ranks in rank order, rows counted over all ranks, and each rank's
        share, which covers as many consecutive entries as its row_idx. Views of ``message``.
        """
        parts = list(self._parts(message, row_counts, entry_counts))
        words = torch.cat([part.entries for part in parts]).cpu().numpy()  # [m, 2]
        row_idx, slots = np.divmod(words[:, 0].astype(np.int64), self._spec.num_slots_per_rank)
        weights = np.ascontiguousarray(words[:, 1]).view(np.float32)
        first_rows = row_counts.cumsum() - row_counts
        rows = row_idx + first_rows.repeat(entry_counts)
        sources = []
        first = 0
        for part in parts:
            last = first + len(part.entries)
            scales = part.scales.view(torch.float32) if self._num_scales else None
            data = part.rows.view(self._spec.payload_dtype)
            sources.append(Source(data, scales, row_idx[first:last]))
            first = last
        return Entries(rows, slots, weights), sources

    def _encode_entries(self, plan: SendPlan) -> np.ndarray:
        words = np.empty((len(plan.entry_rows), ENTRY_WORDS), dtype=np.int32)
        words[:, 0] = plan.entry_rows * self._spec.num_slots_per_rank + plan.entry_slots
        words[:, 1] = plan.entry_weights.view(np.int32)
        return words

    def _parts(
        self, message: torch.Tensor, row_counts: np.ndarray, entry_counts: np.ndarray
    ) -> Iterator[_Parts]:
        """Views of each rank's message."""
        counts = list(zip(row_counts.tolist(), entry_counts.tolist(), strict=True))
        data, scales = self._data_words, self._num_scales
        sizes = [n for rows, m in counts for n in (m * ENTRY_WORDS, rows * scales, rows * data)]
        pieces = iter(message.split_with_sizes(sizes))
        for rows, num_entries in counts:
            yield _Parts(
                entries=next(pieces).view(num_entries, ENTRY_WORDS),
                scales=next(pieces).view(rows, scales),
                rows=next(pieces).view(rows, data),
            )
