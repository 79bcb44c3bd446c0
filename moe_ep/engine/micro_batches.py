"""How a step's tokens are split in two micro-batches that cost about alike.

Knows neither tensors nor other ranks. The first micro-batch takes every turn before the second
(``moe_ep.overlap``), so a prompt may be cut across both: what the second attends to, the first has
just written to the cache, in every layer.

Where a cut may fall is narrowed so that the results stay the same bits as without it. A chunk of a
prompt that starts at a multiple of CUT_ROWS may be cut at another one, where attention begins a new
piece of keys anyway. And no part is left with fewer than MIN_ROWS decodes or prefill tokens: matrix
libraries take other kernels, which round otherwise, for fewer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from attention.torch_prefill import KEY_ROWS
from moe_ep.config import ModelConfig
from moe_ep.engine.step_input import MicroBatch, Piece

CUT_ROWS = KEY_ROWS
MIN_ROWS = 4


@dataclass(frozen=True)
class TokenCost:
    """Multiply-adds of a layer: per token whatever it attends to, and per key that it attends to.

    Arithmetic, and not bytes, is what two halves of a batch share: each of them reads all weights.
    """

    token: float
    decode_key: float
    prefill_key: float

    @classmethod
    def of(cls, model: ModelConfig) -> "TokenCost":
        hidden, heads = model.hidden_size, model.num_heads
        query_input = model.q_lora_rank or hidden
        per_head = model.qk_nope_head_dim + model.v_head_dim
        attention = hidden * (model.q_lora_rank or 0) + hidden * model.latent_dim
        attention += query_input * heads * model.qk_head_dim
        attention += heads * (per_head * model.kv_lora_rank + model.v_head_dim * hidden)
        num_experts = model.num_experts_per_tok + model.num_shared_experts
        return cls(
            token=attention + 3 * hidden * model.moe_intermediate_size * num_experts,
            decode_key=heads * (model.latent_dim + model.kv_lora_rank),
            prefill_key=heads * (model.qk_head_dim + model.v_head_dim),
        )

    def __call__(self, start: int, length: int, *, is_decode: bool) -> float:
        """Of tokens ``[start, start + length)`` of a request, each of which sees all up to it."""
        num_keys = length * start + length * (length + 1) // 2
        return length * self.token + num_keys * (self.decode_key if is_decode else self.prefill_key)


class _Cut(NamedTuple):
    """A place between two tokens: the rows before it, and what they cost."""

    row: int
    cost: float


def split(
    batch: MicroBatch, cost: TokenCost, max_rows: int | None = None
) -> tuple[MicroBatch, MicroBatch]:
    """Two micro-batches whose tokens, one after the other, are those of the batch, in order.

    Of all places where the batch may be cut, that which divides the cost most evenly; either part
    may be empty. max_rows: most tokens of either part, if there is a limit; at least half of the
    batch's, which then consists of decodes.
    """
    num_rows = batch.num_tokens
    row = _best_row(batch, cost, num_rows if max_rows is None else max_rows)
    return _part(batch, 0, row), _part(batch, row, num_rows)


def largest_part(batch: MicroBatch, cost: TokenCost) -> int:
    """Tokens of the larger one of the two that ``split`` makes without a limit."""
    num_rows = batch.num_tokens
    row = _best_row(batch, cost, num_rows)
    return max(row, num_rows - row)


def _best_row(batch: MicroBatch, cost: TokenCost, most: int) -> int:
    """The row before which to cut, so that neither part has more than ``most`` rows."""
    cuts = list(_cuts(batch, cost))
    (num_rows, total), thin = cuts[-1], _thin_rows(batch)
    best = min(
        (cut for cut in cuts if num_rows - most <= cut.row <= most),
        key=lambda cut: (cut.row in thin, abs(2 * cut.cost - total)),
    )
    return best.row


def _cuts(batch: MicroBatch, cost: TokenCost) -> Iterator[_Cut]:
    """Every place where the batch may be cut, from before its first token to after its last."""
    cut = _Cut(0, 0.0)
    yield cut
    for index, piece in enumerate(batch.pieces):
        is_decode = index < batch.num_decodes
        step = piece.length if piece.start % CUT_ROWS else CUT_ROWS
        row, spent = cut
        for length in (*range(step, piece.length, step), piece.length):
            cut = _Cut(row + length, spent + cost(piece.start, length, is_decode=is_decode))
            yield cut


def _thin_rows(batch: MicroBatch) -> set[int]:
    """Rows where a cut would leave a part with some, but fewer than MIN_ROWS, tokens of a phase
    that has more of them."""
    rows: set[int] = set()
    for first, last in ((0, batch.num_decodes), (batch.num_decodes, batch.num_tokens)):
        margin = min(MIN_ROWS, last - first)
        rows.update(range(first + 1, first + margin), range(last - margin + 1, last))
    return rows


def _part(batch: MicroBatch, first: int, last: int) -> MicroBatch:
    """Rows ``first`` to ``last`` of the batch."""
    pieces: list[Piece] = []
    num_decodes = row = 0
    for index, (request, begin, length) in enumerate(batch.pieces):
        start, stop = max(first - row, 0), min(last - row, length)
        if start < stop:
            pieces.append(Piece(request, begin + start, stop - start))
            num_decodes += index < batch.num_decodes
        row += length
    return MicroBatch(pieces, num_decodes)
