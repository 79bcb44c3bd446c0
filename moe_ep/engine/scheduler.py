"""Which requests take part in a step, with how many tokens, on which cache blocks.

Knows nothing of tensors, of other ranks or of time. Everything is decided in the order of arrival:
the running requests are always the oldest ones alive, and only a younger request ever gives way to
an older one. Because whatever is admitted fits into the pool alone, the oldest request takes part
in every step, and so every request finishes.
"""

import logging
from collections import Counter, deque
from collections.abc import Collection, Mapping

from moe_ep.engine.admission import AdmissionLimits, admission_error, max_request_len
from moe_ep.engine.batch import PrefillChunk, ScheduledBatch
from moe_ep.engine.kv_blocks import BlockPool, blocks_needed
from moe_ep.engine.prefix_cache import PrefixCache
from moe_ep.engine.request import (
    EngineRequest,
    FinishReason,
    Request,
    SampledToken,
    StepOutput,
)

logger = logging.getLogger(__name__)


class Scheduler:
    """Continuous batching over one rank's block pool. Not thread-safe: the engine loop owns it.

    max_num_seqs: most requests that run at a time. max_num_batched_tokens: most tokens in a step,
    at least max_num_seqs so that every decode fits. eos_token_ids: end a request unless it ignores
    them. prefix_caching: a request starts after what the cache knows of its tokens.
    """

    def __init__(
        self,
        *,
        pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
        prefix_caching: bool,
    ) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs: {max_num_seqs} given; from 1 to max_num_batched_tokens"
                f" ({max_num_batched_tokens}) are allowed"
            )
        self.pool = pool
        self.limits = AdmissionLimits(max_model_len, pool.num_blocks, block_size)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self._prefixes = PrefixCache(pool, block_size) if prefix_caching else None
        self._num_arrived = 0
        self._kv_tokens = 0
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []  # both in order of arrival,
        self._waiting: deque[Request] = deque()  # and all running before all waiting

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_tokens(self) -> int:
        """Known tokens of all running and waiting requests: this rank's load. Like the counts, it
        may be read from any thread."""
        return self._kv_tokens

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: EngineRequest) -> None:
        """Queue a request; ValueError (field, given, allowed) when it can never run."""
        params, prompt_len = request.params, len(request.prompt_token_ids)
        if request.request_id in self._requests:
            raise ValueError(f"request_id: {request.request_id!r} given; it is already in use")
        if params.temperature > 0 and params.seed is None:
            raise ValueError("seed: None given; a request that is not greedy needs a number")
        error = admission_error(prompt_len, params, self.limits)
        if error is not None:
            raise ValueError(error)
        queued = Request(
            request_id=request.request_id,
            params=params,
            prompt_len=prompt_len,
            arrival=self._num_arrived,
            max_len=max_request_len(prompt_len, params, self.limits),
            token_ids=list(request.prompt_token_ids),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        self._num_arrived += 1
        self._kv_tokens += prompt_len
        self._requests[request.request_id] = queued
        self._waiting.append(queued)

    def schedule(self) -> ScheduledBatch:
        """Pick the next step's tokens and give them blocks.

        Not empty while there is work. A batch that is never run loses nothing: the next call picks
        the same tokens again.
        """
        batch = ScheduledBatch()
        budget = self.max_num_batched_tokens - sum(r.is_decode for r in self._running)
        # 1. Running requests, oldest first; making room shortens the list at its young end.
        position = 0
        while position < len(self._running):
            budget -= self._continue(self._running[position], budget, batch)
            position += 1
        # 2. New and resumed ones. None preempted above can be among them: of its blocks at least
        # one was needed elsewhere, and it would have to get back as many.
        while budget > 0 and self._can_start_next():
            request = self._waiting.popleft()
            self._running.append(request)
            if self._prefixes is not None:
                self._prefixes.take(request)
            budget -= self._continue(request, budget, batch)
        assert batch.num_tokens > 0 or not self.has_work, "no request could take part in the step"
        return batch

    def update(
        self,
        batch: ScheduledBatch,
        sampled: Mapping[str, SampledToken],
    ) -> list[StepOutput]:
        """Account for a step that has run; finished requests leave and free their blocks.

        sampled: by request id, for each request that samples in the batch (``token_id``) or has
        ``prompt_logprob_rows`` (one entry per row, ``token_id`` None unless it samples too). One
        with an ``error`` is aborted, and the reason logged; the others go on. Requests that were
        aborted after the batch was made are passed over.
        """
        starts = [(request, request.num_computed_tokens) for request in batch.decodes]
        starts += [(chunk.request, chunk.start) for chunk in batch.prefills]
        for request in batch.decodes:
            request.num_computed_tokens += 1
        for chunk in batch.prefills:
            self._advance(chunk, sampled)
        errors = {name: token.error for name, token in sampled.items() if token.error is not None}
        failed = [r for r, _ in starts if r.request_id in errors and self._is_alive(r)]
        ends = [self._fail(request, errors[request.request_id]) for request in failed]
        if self._prefixes is not None:
            for request, start in starts:
                if self._is_alive(request):
                    self._prefixes.publish(request, start)
        alive = [r for r in batch.sampling_requests if self._is_alive(r)]
        return ends + [self._append(request, sampled[request.request_id]) for request in alive]

    def abort(self, request_id: str) -> StepOutput | None:
        """End a request between steps; None when it is unknown or has finished."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        return self._abort(request)

    def check_integrity(self) -> None:
        """Blocks belong to running requests only, shared ones are full, and no request has one
        twice; the order of arrival holds."""
        self.pool.check_integrity()
        owners = Counter(block for request in self._running for block in request.block_table)
        counts = {block: self.pool.ref_count(block) for block in range(self.pool.num_blocks)}
        assert {b: n for b, n in counts.items() if n} == owners, f"{counts} owners, not {owners}"
        for request in self._running:
            table = request.block_table
            assert len(set(table)) == len(table), f"a block twice in {request}"
            num_full = request.num_computed_tokens // self.limits.block_size
            assert all(owners[b] == 1 for b in table[num_full:]), f"may be written: {request}"
        for request in self._waiting:
            assert not request.block_table, f"waits and holds blocks: {request}"
            assert request.num_computed_tokens == 0, f"waits and has computed tokens: {request}"
        arrivals = [request.arrival for request in (*self._running, *self._waiting)]
        assert arrivals == sorted(arrivals), f"order of arrival broken: {arrivals}"
        assert len(arrivals) == len(self._requests), "requests neither running nor waiting"
        num_known = sum(len(request.token_ids) for request in self._requests.values())
        assert num_known == self._kv_tokens, f"{num_known} known tokens, {self._kv_tokens} counted"

    def _continue(self, request: Request, budget: int, batch: ScheduledBatch) -> int:
        """Add a running request to the batch; returns the prefill tokens spent."""
        if request.is_decode:  # its token was set aside from the budget
            if self._reserve(request, 1):
                batch.decodes.append(request)
            return 0
        start = request.num_computed_tokens
        length = self._reserve(request, min(budget, request.num_missing_tokens))
        if length > 0:
            is_last = length == request.num_missing_tokens
            batch.prefills.append(PrefillChunk(request, start, length, is_last))
        return length

    def _reserve(self, request: Request, num_tokens: int) -> int:
        """Get blocks for the next tokens, from younger requests if need be; returns how many fit.

        The youngest request itself keeps what it has and waits: whoever is older takes it when
        that is needed, and otherwise its work is not lost.
        """
        num_blocks = blocks_needed(request.num_computed_tokens + num_tokens, self.limits.block_size)
        num_short = num_blocks - len(request.block_table)
        while num_short > self.pool.num_free and self._running[-1] is not request:
            self._preempt(self._running.pop())
        if num_short > 0:
            request.block_table.extend(self.pool.allocate(min(num_short, self.pool.num_free)))
        num_slots = len(request.block_table) * self.limits.block_size
        return min(num_tokens, num_slots - request.num_computed_tokens)

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._waiting.appendleft(request)

    def _can_start_next(self) -> bool:
        """Whether the oldest waiting request may run: only if all its known tokens, those of the
        running requests and one more token each have blocks, lest it be preempted at once."""
        if not self._waiting or self.num_running >= self.max_num_seqs:
            return False
        num_short = sum(
            blocks_needed(len(request.token_ids) + 1, self.limits.block_size)
            - len(request.block_table)
            for request in (*self._running, self._waiting[0])
        )
        known = [] if self._prefixes is None else self._prefixes.known(self._waiting[0])
        return num_short - len(known) <= self.pool.num_free - self.pool.num_kept(known)

    @staticmethod
    def _advance(chunk: PrefillChunk, sampled: Mapping[str, SampledToken]) -> None:
        rows, request = chunk.prompt_logprob_rows, chunk.request
        assert chunk.start == request.num_computed_tokens, f"{request} does not match {chunk}"
        if rows and request.prompt_logprobs is not None:
            entries = sampled[request.request_id].prompt_logprobs
            assert len(entries) == len(rows), f"{len(entries)} entries for {len(rows)} rows"
            request.prompt_logprobs += entries
        request.num_computed_tokens += chunk.length

    def _is_alive(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def _fail(self, request: Request, error: str) -> StepOutput:
        logger.error("request %s aborted: %s", request.request_id, error)
        self.pool.forget(request.block_table)  # what went wrong may lie in them
        return self._abort(request)

    def _abort(self, request: Request) -> StepOutput:
        self._remove(request)
        return StepOutput(request.request_id, (), finish_reason=FinishReason.ABORT)

    def _append(self, request: Request, token: SampledToken) -> StepOutput:
        token_id, is_first = token.token_id, request.num_output_tokens == 0
        assert token_id is not None, f"nothing was sampled for {request}"
        request.token_ids.append(token_id)
        self._kv_tokens += 1
        finish_reason, stop_reason = self._finish(request, token_id)
        if finish_reason is not None:
            self._remove(request)
        prompt_logprobs = request.prompt_logprobs if is_first else None
        return StepOutput(
            request_id=request.request_id,
            token_ids=(token_id,),
            logprobs=() if token.logprobs is None else (token.logprobs,),
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            num_cached_tokens=request.num_cached_tokens if is_first else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _finish(self, request: Request, token_id: int) -> tuple[FinishReason | None, int | None]:
        params = request.params
        if request.num_output_tokens >= params.min_tokens:
            if token_id in self.eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP, None
            if token_id in params.stop_token_ids:
                return FinishReason.STOP, token_id
        if len(request.token_ids) >= request.max_len:
            return FinishReason.LENGTH, None
        return None, None

    def _remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._kv_tokens -= len(request.token_ids)
        (self._running if request in self._running else self._waiting).remove(request)
        self._release(request)

    def _release(self, request: Request) -> None:
        self.pool.free(request.block_table)
        del request.block_table[:]
