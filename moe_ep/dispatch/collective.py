"""Dispatch over any torch.distributed group: gloo between CPU processes, NCCL between GPUs.

One protocol for both modes; the modes differ in the layout of the received rows and in the limit
on tokens. Every token goes once to each rank that holds some of its slots:

1. ``counts``: every pair of ranks exchanges how many rows and entries will follow (two int32).
2. ``dispatch``: one message per pair, of exactly the bytes needed (see ``wire.py``).
3. ``combine``: the receiving rank adds the weighted outputs of its own slots, in float32, in order
   of k, and sends back one row per row received, in the out dtype. The source adds the rows of the
   ranks in float32 in rank order.

So the order of every sum is fixed by the routing, never by arrival, and a token's bits depend on
its own choices only. The time limit of every wait is the group's. With two micro-batches in flight
on CPUs a thread waits for the counts (``lane.py``); over NCCL, whose stream is the caller's, the
caller does.

Shape letters: T tokens on this rank, K choices per token, R ranks, S slots per rank, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed import ProcessGroup

from moe_ep.dispatch.base import Dispatched, Dispatcher, DispatchSpec, Mode, Part, Pending
from moe_ep.dispatch.encode import encode_rows
from moe_ep.dispatch.lane import Lane
from moe_ep.dispatch.layout import (
    Entries,
    LayoutBuffer,
    place,
    sum_order,
    sums,
    weighted_sums,
)
from moe_ep.dispatch.routing import (
    SendPlan,
    check_group,
    check_outputs,
    plan_send,
    read_choices,
    spec_problem,
)
from moe_ep.dispatch.wire import WORD, WORD_BYTES, WireFormat

COUNT_BYTES = 8  # per peer: int32 rows, int32 entries


@dataclass
class Traffic:
    """What this rank has sent to others since the start; its own share never leaves it.

    rows: (token, rank) pairs sent in dispatch. returned_rows: rows sent back in combine.
    """

    rows: int = 0
    entries: int = 0
    returned_rows: int = 0
    count_bytes: int = 0
    dispatch_bytes: int = 0
    combine_bytes: int = 0


@dataclass(frozen=True)
class _Handle:
    """The plan that was sent, and what arrived: row_counts int64 ``[R]``, and where it was put."""

    plan: SendPlan
    row_counts: np.ndarray
    entries: Entries
    positions: np.ndarray


class _Received(NamedTuple):
    """A dispatch that has started: ``payload`` waits for the words, of so many rows and entries of
    every rank (int64 ``[R]``)."""

    payload: Callable[[], torch.Tensor]
    row_counts: np.ndarray
    entry_counts: np.ndarray


class CollectiveDispatcher(Dispatcher):
    """One rank's end of the exchange. The group is the caller's and is not destroyed here."""

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None) -> None:
        if (problem := self.supports(spec)) is not None:
            raise ValueError(problem)
        self._group = check_group(group, spec)
        self.spec = spec
        self.traffic = Traffic()
        self._rank = self._group.rank()
        self._wire = WireFormat(spec)
        self._lane = Lane()

    @classmethod
    def supports(cls, spec: DispatchSpec) -> str | None:
        return spec_problem(spec) or WireFormat.problem(spec)

    def dispatch(
        self, *, x: torch.Tensor, topk_slots: torch.Tensor, topk_weights: torch.Tensor, mode: Mode
    ) -> Pending[Dispatched]:
        spec = self.spec
        choices = read_choices(
            x=x, topk_slots=topk_slots, topk_weights=topk_weights, mode=mode, spec=spec
        )
        plan = plan_send(
            choices,
            num_tokens=len(x),
            num_ranks=spec.num_ranks,
            num_slots=spec.num_slots_per_rank,
        )
        exchange = self._lane.open(may_hand_over=x.is_cpu)
        counts = exchange.start(lambda: self._start_counts(plan, x.device))
        num_used = int(plan.row_tokens.max()) + 1 if len(plan.row_tokens) else 0
        rows, scales = encode_rows(x[:num_used], spec.payload_dtype)  # while the counts travel
        message, sizes = self._wire.pack(plan, rows, scales)
        if not exchange.is_handed_over:
            self.enter(Part.COUNTS)
        received = exchange.start(lambda: self._start_payload(message, sizes, counts()))
        self._note_dispatch(plan, sizes)
        return exchange.pending(lambda: self._lay_out(received(), plan, mode))

    def combine(self, *, y: torch.Tensor, dispatched: Dispatched) -> Pending[torch.Tensor]:
        spec = self.spec
        check_outputs(y, dispatched, spec)
        handle: _Handle = dispatched.handle
        plan, entries = handle.plan, handle.entries
        starts = sum_order(entries.rows, int(handle.row_counts.sum()))
        values = y.reshape(-1, spec.hidden)
        partial = weighted_sums(values, handle.positions, starts, entries.weights)
        row_words = spec.hidden * spec.out_dtype.itemsize // WORD_BYTES
        sizes = (handle.row_counts * row_words).tolist()
        back_sizes = (plan.row_counts * row_words).tolist()
        message = partial.view(WORD).flatten()
        exchange = self._lane.open(may_hand_over=y.is_cpu)
        back = exchange.start(lambda: self._start("combine", message, sizes, back_sizes))
        self._note_combine(handle.row_counts, sizes)

        def finish() -> torch.Tensor:
            rows = back()().view(-1, row_words).view(spec.out_dtype)
            self.enter(Part.SUMS)
            by_token = np.argsort(plan.row_tokens, kind="stable")  # a token's rows in rank order
            token_starts = sum_order(plan.row_tokens[by_token], plan.num_tokens)
            return sums(rows, by_token, token_starts)

        return exchange.pending(finish)

    def destroy(self) -> None:
        self._lane.close()

    def _lay_out(self, received: _Received, plan: SendPlan, mode: Mode) -> Dispatched:
        payload, row_counts, entry_counts = received
        message = payload()
        self.enter(Part.LAYOUT)
        entries, sources = self._wire.unpack(message, row_counts, entry_counts)
        places = place(entries, self.spec, mode)
        layout = LayoutBuffer(self.spec, mode, places, message.device)
        first = 0
        for source in sources:
            last = first + len(source.row_idx)
            layout.fill(places.positions[first:last], *source)
            first = last
        return layout.finish(_Handle(plan, row_counts, entries, places.positions))

    def _start_counts(self, plan: SendPlan, device: torch.device) -> Callable[[], torch.Tensor]:
        counts = np.empty((self.spec.num_ranks, 2), dtype=np.int32)
        counts[:, 0], counts[:, 1] = plan.row_counts, plan.entry_counts
        return self._start("counts", torch.from_numpy(counts).to(device), [], [])

    def _start_payload(
        self, message: torch.Tensor, sizes: list[int], counts: Callable[[], torch.Tensor]
    ) -> _Received:
        """Waits for the counts."""
        row_counts, entry_counts = counts().cpu().numpy().astype(np.int64).T
        received_sizes = self._wire.sizes(row_counts, entry_counts)
        payload = self._start("dispatch", message, sizes, received_sizes)
        return _Received(payload, row_counts, entry_counts)

    def _start(
        self, stage: str, sent: torch.Tensor, sizes: list[int], received_sizes: list[int]
    ) -> Callable[[], torch.Tensor]:
        """Start one all-to-all of words; without sizes every rank's share is equal. The call that
        is returned waits for what comes."""
        received = sent.new_empty(sum(received_sizes)) if sizes else torch.empty_like(sent)
        try:
            work = self._group.alltoall_base(received, sent, received_sizes, sizes)
        except RuntimeError as error:
            raise self._failure(stage, error) from error

        def finish() -> torch.Tensor:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure(stage, error) from error
            return received

        return finish

    def _failure(self, stage: str, error: RuntimeError) -> RuntimeError:
        return RuntimeError(
            f"rank {self._rank}: the {stage} exchange failed; a peer died or is late: {error}"
        )

    def _note_dispatch(self, plan: SendPlan, sizes: list[int]) -> None:
        traffic = self.traffic
        traffic.rows += self._to_others(plan.row_counts)
        traffic.entries += self._to_others(plan.entry_counts)
        traffic.count_bytes += COUNT_BYTES * (self.spec.num_ranks - 1)
        traffic.dispatch_bytes += self._to_others(sizes) * WORD_BYTES

    def _note_combine(self, row_counts: np.ndarray, sizes: list[int]) -> None:
        self.traffic.returned_rows += self._to_others(row_counts)
        self.traffic.combine_bytes += self._to_others(sizes) * WORD_BYTES

    def _to_others(self, per_rank: list[int] | np.ndarray) -> int:
        return int(sum(per_rank) - per_rank[self._rank])
