"""Runs one step on this rank: tensors from the scheduled batch, the forward pass, sampling.

Knows nothing of queues, nor of other ranks beyond the step shape that all agreed on.

Shape letters: T tokens of the step (padding included), H hidden, V vocabulary.
"""

from dataclasses import dataclass, field, replace

import torch

from attention.base import BLOCK_SIZE, AttentionBackend, AttentionBatch
from attention.latent_cache import LatentCache
from moe_ep import overlap
from moe_ep.engine.batch import PrefillChunk, ScheduledBatch
from moe_ep.engine.request import Request, SampledToken, TokenLogprobs
from moe_ep.engine.sampler import Sampler, prompt_logprobs
from moe_ep.engine.step_shape import StepShape
from moe_ep.model.decoder import Decoder, StepInput


@dataclass
class _Tokens:
    """The batch as flat lists in token order, decodes first."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    context_lens: list[int] = field(default_factory=list)
    block_tables: list[list[int]] = field(default_factory=list)

    def add(self, request: Request, start: int, length: int) -> None:
        positions = range(start, start + length)
        table = request.block_table
        self.token_ids += request.token_ids[start : start + length]
        self.positions += positions
        self.slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]
        self.query_lens.append(length)
        self.context_lens.append(start)
        self.block_tables.append(table)


class Runner:
    """The model of one rank with its cache: from a scheduled batch to sampled tokens."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        cache: LatentCache,
        attention: AttentionBackend,
        sampler: Sampler,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self.attention = attention
        self.sampler = sampler
        self.device = cache.tensor.device

    def run(self, batch: ScheduledBatch, shape: StepShape) -> dict[str, SampledToken]:
        """Run the agreed step and return what ``Scheduler.update`` needs of it, by request id.

        Collective. A rank without tokens takes part with none.
        """
        tokens = _flatten(batch)
        step = self._step_input(tokens, batch.num_decode_tokens, shape)
        (hidden,) = overlap.run([self.decoder.forward(step, self.cache)])
        self.decoder.progress.stage = "sampling"
        sampled = self._sample(hidden, batch)
        for request_id, entries in self._prompt_logprobs(hidden, batch).items():
            token = sampled.get(request_id, SampledToken(None))
            sampled[request_id] = replace(token, prompt_logprobs=entries)
        return sampled

    def _step_input(self, tokens: _Tokens, num_decodes: int, shape: StepShape) -> StepInput:
        num_tokens = len(tokens.token_ids)
        num_padded = num_tokens if shape.padded_tokens is None else shape.padded_tokens
        num_padding = num_padded - num_tokens
        plan = self.attention.plan(
            AttentionBatch(
                num_decodes=num_decodes,
                query_lens=tokens.query_lens,
                context_lens=tokens.context_lens,
                block_tables=tokens.block_tables,
                num_padded_tokens=num_padded,
            )
        )
        rows = (
            tokens.token_ids + [0] * num_padding,
            tokens.positions + [0] * num_padding,
            tokens.slots + [-1] * num_padding,
        )
        # One transfer for all three.
        token_ids, positions, slots = torch.tensor(rows, dtype=torch.int64).to(self.device)
        return StepInput(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            attention_plan=plan,
            num_tokens=num_tokens,
            mode=shape.mode,
        )

    def _sample(self, hidden: torch.Tensor, batch: ScheduledBatch) -> dict[str, SampledToken]:
        requests = batch.sampling_requests
        if not requests:
            return {}
        logits = self.decoder.logits(hidden[_sampled_rows(batch)])
        sampled = self.sampler.sample(logits, requests)
        return {request.request_id: token for request, token in zip(requests, sampled, strict=True)}

    def _prompt_logprobs(
        self, hidden: torch.Tensor, batch: ScheduledBatch
    ) -> dict[str, tuple[TokenLogprobs, ...]]:
        found = {}
        row = batch.num_decode_tokens
        for chunk in batch.prefills:
            if chunk.prompt_logprob_rows:
                found[chunk.request.request_id] = self._chunk_logprobs(hidden[row:], chunk)
            row += chunk.length
        return found

    def _chunk_logprobs(
        self, hidden: torch.Tensor, chunk: PrefillChunk
    ) -> tuple[TokenLogprobs, ...]:
        rows, request = chunk.prompt_logprob_rows, chunk.request
        first_target = chunk.start + rows.start + 1  # row i is about the token after its own
        return prompt_logprobs(
            self.decoder.logits(hidden[rows.start : rows.stop]),
            token_ids=request.token_ids[first_target : first_target + len(rows)],
            num_top=request.params.prompt_logprobs or 0,
            request_id=request.request_id,
        )


def _flatten(batch: ScheduledBatch) -> _Tokens:
    tokens = _Tokens()
    for request in batch.decodes:
        tokens.add(request, request.num_computed_tokens, 1)
    for chunk in batch.prefills:
        tokens.add(chunk.request, chunk.start, chunk.length)
    return tokens


def _sampled_rows(batch: ScheduledBatch) -> list[int]:
    """Row of the last known token of each of ``batch.sampling_requests``, in the same order."""
    rows = list(range(batch.num_decode_tokens))
    end = batch.num_decode_tokens
    for chunk in batch.prefills:
        end += chunk.length
        if chunk.is_last:
            rows.append(end - 1)
    return rows
