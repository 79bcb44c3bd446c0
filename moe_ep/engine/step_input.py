"""What a rank feeds to the decoder: the tensors of a (micro-)batch, from its requests.

Shape letters: T tokens of the micro-batch (padding included).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from attention.base import BLOCK_SIZE, AttentionBackend, AttentionBatch
from moe_ep.dispatch.base import Mode
from moe_ep.engine.batch import ScheduledBatch
from moe_ep.engine.request import Request
from moe_ep.model.decoder import StepInput


class Piece(NamedTuple):
    """Tokens ``[start, start + length)`` of a request."""

    request: Request
    start: int
    length: int


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


def attention_batch(batch: MicroBatch, num_padded_tokens: int) -> AttentionBatch:
    return AttentionBatch(
        num_decodes=batch.num_decodes,
        query_lens=[piece.length for piece in batch.pieces],
        context_lens=[piece.start for piece in batch.pieces],
        block_tables=[piece.request.block_table for piece in batch.pieces],
        num_padded_tokens=num_padded_tokens,
    )


def token_rows(batch: MicroBatch, num_padded_tokens: int) -> torch.Tensor:
    """int64 ``[3, T]`` on the CPU: token ids, positions and cache slots (-1 for padding)."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for request, start, length in batch.pieces:
        span, table = range(start, start + length), request.block_table
        token_ids += request.token_ids[start : start + length]
        positions += span
        slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in span]
    padding = num_padded_tokens - len(token_ids)
    rows = (token_ids + [0] * padding, positions + [0] * padding, slots + [-1] * padding)
    return torch.tensor(rows, dtype=torch.int64)


def make_step_input(
    batch: MicroBatch,
    *,
    attention: AttentionBackend,
    mode: Mode,
    num_padded_tokens: int | None,
    device: torch.device,
    index: int = 0,
) -> StepInput:
    """num_padded_tokens: T; None for no padding. index: which micro-batch of the step it is."""
    num_tokens = batch.num_tokens
    num_rows = num_tokens if num_padded_tokens is None else num_padded_tokens
    token_ids, positions, slots = token_rows(batch, num_rows).to(device)
    return StepInput(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        num_tokens=torch.tensor([num_tokens], dtype=torch.int32).to(device),
        attention_plan=attention.plan(attention_batch(batch, num_rows)),
        mode=mode,
        micro_batch=index,
    )
