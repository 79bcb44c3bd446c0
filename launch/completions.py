"""Answers completion requests with an engine: the part that HTTP service and batch runner share.

``prepare`` does everything that may refuse a request, so that after it only the engine can fail.
Knows no HTTP beyond the status that an error carries.
"""

import asyncio
import inspect
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from launch.api_error import ApiError, bad_request, unavailable
from launch.continuation import Delta, continue_prompt, interleave, merge
from launch.failure import EngineDeadError
from launch.metrics import Metrics
from launch.openai_api import ChatRequest, CompletionRequest, GenerationRequest
from launch.openai_responses import ChatForm, CompletionForm, Form, Usage, envelope
from launch.params import check_params, check_token_ids, completion_params
from launch.text import REPLACEMENT, decode
from moe_ep.engine.request import SamplingParams

if TYPE_CHECKING:
    from launch.client import EngineClient


class Completions:
    """Prepares requests of both endpoints and gives their jobs what they run with.

    Without a tokenizer only token ids are served. max_open: continuations that may be open at a
    time, running or queued; None when the caller limits itself.
    """

    def __init__(
        self,
        client: "EngineClient",
        metrics: Metrics,
        *,
        max_open: int | None = None,
    ) -> None:
        self.client = client
        self.tokenizer = client.tokenizer
        self.metrics = metrics
        self.model_name = client.config.served_model_name or client.config.model
        self._max_open = max_open
        self._num_open = 0

    async def prepare(self, request: GenerationRequest) -> "Job":
        """Accept a request and reserve its places, or raise ApiError. The caller closes the job."""
        self.check_alive()
        if request.model is not None:
            self.check_model(request.model)
        if request.stop and self.tokenizer is None:
            raise bad_request("stop", "needs text, and this model has no tokenizer")
        prompts = await self._prompts(request)
        params = request.sampling_params()
        try:
            self._check(prompts, params)
        except ValueError as error:
            raise _from_value_error(error, request.field_names) from None
        return Job(self, request, prompts, params)

    def _check(self, prompts: list[list[int]], params: SamplingParams) -> None:
        """ValueError starting with the field's name when the request can never run."""
        vocab_size = self.client.info.vocab_size
        check_params(params, vocab_size)
        if self._max_open is not None and len(prompts) * params.n > self._max_open:
            field = "n" if params.n > 1 else "prompt"
            raise ValueError(
                f"{field}: {params.n} choices (n) of each of {len(prompts)} prompts (prompt) given;"
                f" together at most {self._max_open} are allowed, as many as may run or wait"
            )
        for prompt_ids in prompts:
            check_token_ids(prompt_ids, vocab_size)
            self.client.check_admission(len(prompt_ids), params)

    def check_alive(self) -> None:
        if self.client.error is not None:
            raise unavailable(str(self.client.error))

    def check_model(self, name: str) -> None:
        if name != self.model_name:
            message = f"model: {name!r} is not served here; {self.model_name!r} is"
            raise ApiError(404, message, param="model", code="model_not_found")

    def token_text(self, token_id: int) -> str:
        """How log-probabilities show a token: its text, or its id when it has none of its own."""
        text = "" if self.tokenizer is None else str(self.tokenizer.decode([token_id]))
        return text if text and REPLACEMENT not in text else f"token_id:{token_id}"

    def reserve(self, count: int) -> None:
        """Take places for ``count`` continuations; ApiError 429 when too few are free."""
        if self._max_open is not None and self._num_open + count > self._max_open:
            message = f"{count} places needed, {self._num_open} of {self._max_open} are taken"
            raise ApiError(429, message, type="rate_limit_error", code="queue_full")
        self._num_open += count

    def release(self, count: int) -> None:
        self._num_open -= count

    async def _prompts(self, request: GenerationRequest) -> list[list[int]]:
        """Token ids of every prompt. Long texts are encoded off the event loop."""
        if isinstance(request, ChatRequest):
            return [await asyncio.to_thread(self._chat_ids, request)]
        assert isinstance(request, CompletionRequest)
        if self.tokenizer is None:
            if request.echo:
                raise bad_request("echo", "needs text, and this model has no tokenizer")
            if any(isinstance(prompt, str) for prompt in request.prompt):
                raise bad_request("prompt", "must be token ids: this model has no tokenizer")
        return [
            await asyncio.to_thread(self.tokenizer.encode, prompt)
            if isinstance(prompt, str) and self.tokenizer is not None
            else prompt
            for prompt in request.prompt
        ]

    def _chat_ids(self, request: ChatRequest) -> list[int]:
        tokenizer = self.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            lacks = "tokenizer" if tokenizer is None else "chat template"
            raise bad_request("messages", f"cannot be formatted: this model has no {lacks}")
        variables = request.chat_template_kwargs
        reserved = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
        for name in sorted(variables.keys() & reserved):
            raise bad_request(f"chat_template_kwargs.{name}", "is not a variable of the template")
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        try:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False, **variables
            )
        except Exception as error:  # a template raises whatever its author thought of
            raise bad_request("messages", f"refused by the chat template: {error}") from error
        return cast(list[int], ids)


class Job:
    """One accepted request. ``answer`` or ``events`` runs it, once; ``close`` frees its places."""

    def __init__(
        self,
        service: Completions,
        request: GenerationRequest,
        prompts: list[list[int]],
        params: SamplingParams,
    ) -> None:
        self._service = service
        self._request = request
        self._prompts = prompts
        self._params = params
        self._form = _form(request, service)
        self._id = self._form.id_prefix + uuid.uuid4().hex
        self._usage = Usage(sum(map(len, prompts)))
        self._num_places = len(prompts) * params.n
        service.reserve(self._num_places)

    async def answer(self) -> dict[str, Any]:
        """The complete answer; ApiError when the engine fails on the way."""
        deltas: list[list[Delta]] = [[] for _ in range(self._num_places)]
        async with aclosing(self._deltas()) as arrivals:
            async for index, delta in arrivals:
                deltas[index].append(delta)
        choices = [self._form.choice(i, merge(parts)) for i, parts in enumerate(deltas)]
        start = envelope(self._id, self._form.object, self._service.model_name)
        return {**start, "choices": choices, "usage": self._usage.json()}

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer piece by piece, as the endpoint streams it."""
        start = envelope(self._id, self._form.chunk_object, self._service.model_name)
        no_usage = {"usage": None} if self._request.includes_usage else {}
        async with aclosing(self._deltas()) as arrivals:
            async for index, delta in arrivals:
                yield {**start, "choices": [self._form.chunk(index, delta)], **no_usage}
        if self._request.includes_usage:
            yield {**start, "choices": [], "usage": self._usage.json()}

    def close(self) -> None:
        self._service.release(self._num_places)
        self._num_places = 0

    async def _deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Deltas of all choices as they come; the choices of one prompt are neighbours."""
        self._service.metrics.prompt_tokens.inc(self._usage.prompt_tokens)
        streams = [self._continue(index) for index in range(self._num_places)]
        try:
            async with aclosing(interleave(streams)) as arrivals:
                async for index, delta in arrivals:
                    self._usage.completion_tokens += len(delta.token_ids)
                    if delta.num_cached_tokens and index % self._params.n == 0:
                        self._usage.cached_tokens += delta.num_cached_tokens
                        self._service.metrics.cached_tokens.inc(delta.num_cached_tokens)
                    yield index, delta
        except EngineDeadError as error:
            raise unavailable(str(error)) from error

    async def _continue(self, index: int) -> AsyncGenerator[Delta, None]:
        service = self._service
        prompt_index, sample_index = divmod(index, self._params.n)
        prompt_ids = self._prompts[prompt_index]
        params = completion_params(self._params, sample_index)
        stream = continue_prompt(
            service.client, service.tokenizer, prompt_ids, params, f"{self._id}-{index}"
        )
        clock = service.metrics.clock()
        echo: Delta | None = self._echo(prompt_index)
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                clock.tokens(len(delta.token_ids))
                yield delta if echo is None else _after(echo, delta)
                echo = None
        clock.end()

    def _echo(self, prompt_index: int) -> Delta | None:
        """The prompt as the start of its choices' text, when the request asks for that."""
        if not isinstance(self._request, CompletionRequest) or not self._request.echo:
            return None
        assert self._service.tokenizer is not None
        prompt, ids = self._request.prompt[prompt_index], self._prompts[prompt_index]
        text = prompt if isinstance(prompt, str) else decode(self._service.tokenizer, ids)
        return Delta(text=text, echoed_ids=tuple(ids))


def _after(echo: Delta, delta: Delta) -> Delta:
    return replace(delta, text=echo.text + delta.text, echoed_ids=echo.echoed_ids)


def _form(request: GenerationRequest, service: Completions) -> Form:
    if isinstance(request, ChatRequest):
        return ChatForm(request, service.token_text)
    assert isinstance(request, CompletionRequest)
    return CompletionForm(request, service.token_text)


def _from_value_error(error: ValueError, names: dict[str, str]) -> ApiError:
    """The checks' refusals start with the field, perhaps with an index: ``prompt[3]: ...``."""
    field, _, message = str(error).partition(": ")
    name, bracket, index = field.partition("[")
    return bad_request(names.get(name, name) + bracket + index, message)
