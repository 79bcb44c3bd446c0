"""What a rank feeds to the decoder: the tensors of a (micro-)batch, from its requests.

Shape letters: T tokens of the micro-batch (padding included).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch

from attention.base import AttentionBackend, AttentionBatch
from attention.block_tables import CacheRows
from moe_ep.dispatch.base import Mode
from moe_ep.engine.batch import ScheduledBatch
from moe_ep.engine.request import Request
from moe_ep.model.decoder import LastTokens, StepInput


class Piece(NamedTuple):
    """Tokens ``[start, start + length)`` of a request."""

    request: Request
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        """Whether the request's last known token is in it."""
        return self.start + self.length == len(self.request.token_ids)


@dataclass(frozen=True)
class MicroBatch:
    """Pieces in token order, of which the first ``num_decodes`` are decodes."""

    pieces: Sequence[Piece]
    num_decodes: int

    @property
    def num_tokens(self) -> int:
        return sum(piece.length for piece in self.pieces)


def whole_batch(batch: ScheduledBatch) -> MicroBatch:
    """The step's tokens as one micro-batch."""
    decodes = [Piece(request, request.num_computed_tokens, 1) for request in batch.decodes]
    prefills = [Piece(chunk.request, chunk.start, chunk.length) for chunk in batch.prefills]
    return MicroBatch(decodes + prefills, len(decodes))


def last_rows(batch: MicroBatch) -> list[int]:
    """Rows of the requests' last known tokens, of those whose last one is here, in order."""
    ends = accumulate(piece.length for piece in batch.pieces)
    return [end - 1 for end, piece in zip(ends, batch.pieces, strict=True) if piece.is_last]


def attention_batch(batch: MicroBatch, num_padded_tokens: int) -> AttentionBatch:
    return AttentionBatch(
        num_decodes=batch.num_decodes,
        query_lens=[piece.length for piece in batch.pieces],
        context_lens=[piece.start for piece in batch.pieces],
        block_tables=[piece.request.block_table for piece in batch.pieces],
        num_padded_tokens=num_padded_tokens,
    )


def token_rows(batch: MicroBatch, attention: AttentionBatch) -> torch.Tensor:
    """int64 ``[3, T]`` on the CPU: token ids, positions and cache slots (-1 for padding).
    attention: of the same batch."""
    tokens = (request.token_ids[start : start + length] for request, start, length in batch.pieces)
    lens = np.array(attention.query_lens, dtype=np.int64)
    starts = np.array(attention.context_lens, dtype=np.int64)
    request = np.arange(len(lens)).repeat(lens)
    positions = np.arange(len(request)) + (starts + lens - lens.cumsum())[request]
    slots = CacheRows(attention)(request, positions)
    rows = np.zeros((3, attention.num_padded_tokens), dtype=np.int64)
    rows[2] = -1
    rows[:, : len(request)] = list(chain.from_iterable(tokens)), positions, slots
    return torch.from_numpy(rows)


def make_step_input(
    batch: MicroBatch,
    *,
    attention: AttentionBackend,
    mode: Mode,
    num_padded_tokens: int | None,
    device: torch.device,
    index: int = 0,
    only_last: bool = False,
) -> StepInput:
    """num_padded_tokens: T; None for no padding. index: which micro-batch of the step it is.
    only_last: last hidden states are needed of each request's last known token only.
    """
    num_tokens = batch.num_tokens
    num_rows = num_tokens if num_padded_tokens is None else num_padded_tokens
    attended = attention_batch(batch, num_rows)
    token_ids, positions, slots = token_rows(batch, attended).to(device)
    step = StepInput(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        num_tokens=torch.tensor([num_tokens], dtype=torch.int32).to(device),
        attention_plan=attention.plan(attended),
        mode=mode,
        micro_batch=index,
    )
    return replace(step, last=_last_tokens(batch, step, attention)) if only_last else step


def _last_tokens(batch: MicroBatch, step: StepInput, attention: AttentionBackend) -> LastTokens:
    lasts = [piece for piece in batch.pieces if piece.is_last]
    pieces = [Piece(request, start + length - 1, 1) for request, start, length in lasts]
    device = step.token_ids.device
    rows = torch.tensor(last_rows(batch), dtype=torch.int64).to(device)
    alone = replace(
        step,
        token_ids=step.token_ids[rows],
        positions=step.positions[rows],
        slot_mapping=step.slot_mapping[rows],
        num_tokens=torch.tensor([len(pieces)], dtype=torch.int32).to(device),
        attention_plan=attention.plan(
            attention_batch(MicroBatch(pieces, len(pieces)), num_padded_tokens=len(pieces))
        ),
    )
    return LastTokens(rows, alone)
