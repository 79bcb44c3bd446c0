"""The expanded layout of V2: one row for each (token, expert of this rank), grouped by expert.

Shape letters: T tokens of this rank, K choices, R ranks, S experts of this rank, N tokens received,
M rows of the expanded layout, H hidden.
"""

import random

import torch

from tests.emulators.deep_ep.checks import device_assert, put
from tests.emulators.deep_ep.config import align
from tests.emulators.deep_ep.exchange import Part
from tests.emulators.unwritten import GARBAGE, unwritten

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32


def group_ends(counts: list[int], alignment: int, *, do_expand: bool) -> list[int]:
    """``psum_num_recv_tokens_per_expert``: with expand the unpadded end of each group, without it
    the inclusive sum of padded counts."""
    ends, start = [], 0
    for count in counts:
        padded_end = start + align(count, alignment)
        ends.append(start + count if do_expand else padded_end)
        start = padded_end
    return ends


class EPHandle:
    def __init__(
        self,
        do_expand: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        topk_idx: torch.Tensor,
        num_recv_tokens: int,
        num_expanded_tokens: int,
        num_recv_tokens_per_expert_list: list,
        psum_num_recv_tokens_per_scaleup_rank: torch.Tensor,
        psum_num_recv_tokens_per_expert: torch.Tensor,
        num_unaligned_recv_tokens_per_expert: torch.Tensor,
        recv_src_metadata: torch.Tensor,
        dst_buffer_slot_idx: torch.Tensor,
        token_metadata_at_forward: torch.Tensor | None,
        channel_linked_list: torch.Tensor | None,
    ) -> None:
        self.do_expand = do_expand
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = num_sms
        self.topk_idx = topk_idx
        self.num_recv_tokens = num_recv_tokens
        self.num_expanded_tokens = num_expanded_tokens
        self.num_recv_tokens_per_expert_list = num_recv_tokens_per_expert_list
        self.psum_num_recv_tokens_per_scaleup_rank = psum_num_recv_tokens_per_scaleup_rank
        self.psum_num_recv_tokens_per_expert = psum_num_recv_tokens_per_expert
        self.num_unaligned_recv_tokens_per_expert = num_unaligned_recv_tokens_per_expert
        self.recv_src_metadata = recv_src_metadata
        self.dst_buffer_slot_idx = dst_buffer_slot_idx
        self.token_metadata_at_forward = token_metadata_at_forward
        self.channel_linked_list = channel_linked_list


class Expansion:
    """Sizes of one dispatch; ``sources`` is set when the host has waited for the rows."""

    def __init__(
        self,
        *,
        num_ranks: int,
        order: random.Random,
        num_max: int,
        num_local: int,
        num_topk: int,
        alignment: int,
    ) -> None:
        self.num_ranks, self.order = num_ranks, order
        self.num_max, self.num_local, self.num_topk = num_max, num_local, num_topk
        self.alignment = alignment
        self.sources: list[Part] | None = None

    def allocate(
        self,
        sources: list[Part] | None,
        rows: torch.Tensor,
        sf: torch.Tensor | None,
        *,
        is_column_major: bool,
    ) -> "ExpandedRows":
        self.sources = sources
        num_tokens, counts = self.num_ranks * self.num_max, []
        num_rows = num_tokens * min(self.num_topk, self.num_local)
        num_rows = align(num_rows + (self.alignment - 1) * self.num_local, self.alignment)
        if sources is not None:
            num_tokens = sum(len(part["token"]) for part in sources)
            counts = [align(n, self.alignment) for n in self.expert_counts(sources)]
            num_rows = sum(counts)
        out = ExpandedRows(self, num_tokens, num_rows, counts)
        out.x = unwritten((num_rows, rows.shape[1]), rows.dtype)
        if sf is not None:
            stride = (1, align(num_rows, 4)) if is_column_major else (sf.shape[1], 1)
            out.sf = torch.empty_strided((num_rows, sf.shape[1]), stride, dtype=sf.dtype)
            out.sf.fill_(float("nan") if sf.dtype == F32 else GARBAGE)
        return out

    def expert_counts(self, sources: list[Part]) -> list[int]:
        chosen = torch.cat([part["topk_idx"].flatten() for part in sources])
        return torch.bincount(chosen[chosen >= 0], minlength=self.num_local).tolist()


class ExpandedRows:
    x: torch.Tensor
    sf: torch.Tensor | None = None

    def __init__(
        self, sizes: Expansion, num_tokens: int, num_rows: int, padded_counts: list[int]
    ) -> None:
        self._sizes = sizes
        self._num_tokens, self._num_rows, self._padded_counts = num_tokens, num_rows, padded_counts
        self.weights = unwritten((num_rows,), F32)
        self._psum_rank = unwritten((sizes.num_ranks,), I32)
        self._psum_expert = unwritten((sizes.num_local,), I32)
        self._counts = unwritten((sizes.num_local,), I32)
        self._metadata = unwritten((num_tokens, sizes.num_topk + 2), I32)

    def handle(self, topk_idx: torch.Tensor, num_experts: int, num_sms: int) -> EPHandle:
        return EPHandle(
            True,
            num_experts,
            self._sizes.alignment,
            self._sizes.num_max,
            num_sms,
            topk_idx,
            self._num_tokens,
            self._num_rows,
            self._padded_counts,
            self._psum_rank,
            self._psum_expert,
            self._counts,
            self._metadata,
            unwritten(tuple(topk_idx.shape), I32),
            None,
            None,
        )

    def fill(self, sources: list[Part]) -> None:
        sizes = self._sizes
        counts = sizes.expert_counts(sources)
        ends = group_ends(counts, sizes.alignment, do_expand=True)
        self._counts.copy_(torch.tensor(counts))
        self._psum_expert.copy_(torch.tensor(ends))
        self._psum_rank.copy_(torch.tensor([len(part["token"]) for part in sources]).cumsum(0))
        places = [
            sizes.order.sample(range(end - n, end), n) for end, n in zip(ends, counts, strict=True)
        ]
        i = 0
        for source, part in enumerate(sources):
            for token in range(len(part["token"])):
                self._place(i, source, part, token, places)
                i += 1

    def _place(self, i: int, source: int, part: Part, row: int, places: list[list[int]]) -> None:
        metadata = self._metadata[i]
        chosen = part["topk_idx"][row].tolist()
        first = next(k for k, expert in enumerate(chosen) if expert >= 0)
        metadata[0] = source * self._sizes.num_max + int(part["token"][row])
        metadata[1] = source * self._sizes.num_topk + first
        metadata[2:] = -1
        for k, expert in enumerate(chosen):
            if expert >= 0:
                place = places[expert].pop()
                metadata[2 + k] = place
                put(self.x, slice(place, place + 1), part["x"][row : row + 1])
                self.weights[place] = part["topk_weights"][row, k]
                if self.sf is not None:
                    self.sf[place] = part["sf"][row]


def sum_in_bf16(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Sum ``rows[places[i, k]]`` over k, -1 skipped, in float32 in order of k, rounded once.

    The kernel adds one or two rows in BF16, which rounds to the same bits.
    """
    total = torch.zeros(len(places), rows.shape[1])
    for k in range(places.shape[1]):
        used = (places[:, k] >= 0).nonzero().flatten()
        total[used] += rows[places[used, k]].float()
    return total.to(BF16)


def returned_places(
    topk_idx: torch.Tensor, returned: list[Part], num_local: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the partial sum of each token's ranks lies; a rank counts at its first choice."""
    pool = torch.cat([part["x"] for part in returned])
    first = 0
    where: dict[tuple[int, int], int] = {}
    for source, part in enumerate(returned):
        for row, token in enumerate(part["token"].tolist()):
            where[source, token] = first + row
        first += len(part["token"])
    places = torch.full(topk_idx.shape, -1)
    for token, experts in enumerate(topk_idx.tolist()):
        seen: set[int] = set()
        for k, expert in enumerate(experts):
            rank = expert // num_local
            if expert >= 0 and rank not in seen:
                seen.add(rank)
                device_assert((rank, token) in where, "a partial sum that is waited for is missing")
                places[token, k] = where[rank, token]
    return places, pool
