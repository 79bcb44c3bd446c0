"""Runs one step on this rank: tensors from the scheduled batch, the forward pass, sampling.

Knows nothing of queues, nor of other ranks beyond the step shape that all agreed on.

Shape letters: T tokens of the step (padding included), H hidden, V vocabulary.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from attention.base import AttentionBackend
from attention.latent_cache import LatentCache
from moe_ep import overlap
from moe_ep.dispatch.base import Dispatcher
from moe_ep.engine.batch import PrefillChunk, ScheduledBatch
from moe_ep.engine.graphs import StepGraphs
from moe_ep.engine.micro_batches import TokenCost, largest_part, split
from moe_ep.engine.request import SampledToken, TokenLogprobs
from moe_ep.engine.sampler import Sampler, token_logprobs
from moe_ep.engine.step_input import MicroBatch, last_rows, make_step_input, whole_batch
from moe_ep.engine.step_shape import StepShape
from moe_ep.model.decoder import Decoder, StepInput
from moe_ep.progress import Stage

# Prompt rows whose logits are computed at a time, to bound the scratch of [rows, V].
_LOGPROB_ROWS = 64


class Runner:
    """The model of one rank with its cache: from a scheduled batch to sampled tokens."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        cache: LatentCache,
        attention: AttentionBackend,
        dispatcher: Dispatcher,
        sampler: Sampler,
        token_cost: TokenCost,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self.attention = attention
        self.dispatcher = dispatcher
        self.sampler = sampler
        self.token_cost = token_cost
        self.device = cache.tensor.device
        self._graphs: StepGraphs | None = None

    def run(self, batch: ScheduledBatch, shape: StepShape) -> dict[str, SampledToken]:
        """Run the agreed step and return what ``Scheduler.update`` needs of it, by request id.

        Collective. A rank without tokens takes part with none.
        """
        progress = self.decoder.progress
        progress.enter(Stage.INPUTS)
        whole = whole_batch(batch)
        parts = split(whole, self.token_cost, shape.micro_batch_rows) if shape.overlap else (whole,)
        # The last layer is worth its while for tokens that are sampled from, or looked at.
        only_last = bool(batch.prefills) and not _wants_prompt_logprobs(batch)
        outs = self._forward(parts, shape, only_last=only_last)
        rows = [out[: part.num_tokens] for out, part in zip(outs, parts, strict=True)]
        hidden = rows[0] if len(rows) == 1 else torch.cat(rows)  # in token order
        progress.enter(Stage.HEAD)
        has_only_last = only_last or not batch.prefills  # a decode's one token is its last
        sampled = self._sample(hidden if has_only_last else hidden[last_rows(whole)], batch)
        if not only_last:
            for request_id, entries in self._prompt_logprobs(hidden, batch).items():
                token = sampled.get(request_id, SampledToken(None))
                sampled[request_id] = _with_prompt_logprobs(token, entries)
        return sampled

    @torch.inference_mode()
    def capture(self, graphs: StepGraphs, sizes: Iterable[tuple[int, ...]]) -> None:
        """Capture decode steps of these padded sizes, before the first step. Collective."""
        graphs.capture(sizes, forward=self._run, decoder=self.decoder)
        self._graphs = graphs
        self.decoder.progress.enter(Stage.LOADING)

    def largest_part(self, batch: ScheduledBatch) -> int:
        """Tokens of the larger one of two micro-batches; padding could only make it smaller."""
        return largest_part(whole_batch(batch), self.token_cost)

    def _forward(
        self, parts: Sequence[MicroBatch], shape: StepShape, *, only_last: bool
    ) -> list[torch.Tensor]:
        """Last hidden states of each micro-batch: of its sampled tokens, or of all, padding
        included."""
        self.dispatcher.prepare(shape.mode)
        captured = None if self._graphs is None else self._graphs.find(shape)
        if captured is None:
            return self._run(
                [self._step_input(part, shape, i, only_last) for i, part in enumerate(parts)]
            )
        captured.fill(parts)
        self.decoder.progress.enter(Stage.GRAPH)
        return captured.replay()

    def _run(self, steps: Sequence[StepInput]) -> list[torch.Tensor]:
        return overlap.run([self.decoder.forward(step, self.cache) for step in steps])

    def _step_input(
        self, part: MicroBatch, shape: StepShape, index: int, only_last: bool
    ) -> StepInput:
        return make_step_input(
            part,
            attention=self.attention,
            mode=shape.mode,
            num_padded_tokens=shape.micro_batch_rows,
            device=self.device,
            index=index,
            only_last=only_last,
        )

    def _sample(self, hidden: torch.Tensor, batch: ScheduledBatch) -> dict[str, SampledToken]:
        """hidden: of the last known token of each of ``batch.sampling_requests``."""
        requests = batch.sampling_requests
        if not requests:
            return {}
        logits = self.decoder.logits(hidden)
        self.decoder.progress.enter(Stage.SAMPLING)
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
        all_rows, num_top = chunk.prompt_logprob_rows, chunk.request.params.prompt_logprobs or 0
        targets = chunk.request.token_ids[chunk.start + 1 :]  # row i is about the token after it
        entries: list[TokenLogprobs] = []
        for at in range(0, len(all_rows), _LOGPROB_ROWS):
            part = all_rows[at : at + _LOGPROB_ROWS]
            rows = slice(part.start, part.stop)
            entries += token_logprobs(self.decoder.logits(hidden[rows]), targets[rows], num_top)
        return tuple(entries)


def _with_prompt_logprobs(token: SampledToken, entries: tuple[TokenLogprobs, ...]) -> SampledToken:
    is_nan = any(math.isnan(entry.logprob) for entry in entries)
    error = token.error or ("its prompt logits hold a NaN" if is_nan else None)
    return replace(token, prompt_logprobs=entries, error=error)


def _wants_prompt_logprobs(batch: ScheduledBatch) -> bool:
    return any(chunk.prompt_logprob_rows for chunk in batch.prefills)
