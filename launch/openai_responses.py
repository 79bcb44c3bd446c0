"""OpenAI-compatible responses: from what a continuation produced to the JSON the client gets.

Beyond OpenAI's fields a choice carries vLLM's ``stop_reason`` (the stop string or id that ended
it), and on request ``token_ids`` and ``prompt_logprobs``.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from launch.continuation import Delta
from launch.openai_api import ChatRequest, CompletionRequest, GenerationRequest
from moe_ep.engine.request import TokenLogprobs

TokenText = Callable[[int], str]


@dataclass
class Usage:
    """Tokens of one HTTP request: every prompt counted once, every choice's output added.

    cached_tokens: of the prompts, what the cache knew when their first choice started.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Form(Protocol):
    """How one endpoint spells its answers. One object serves one HTTP request."""

    id_prefix: str
    object: str
    chunk_object: str

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """A finished choice, from everything it produced."""

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        """A choice of one streamed event; called in the order of the text."""


class CompletionForm:
    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, request: CompletionRequest, token_text: TokenText) -> None:
        self.request = request
        self.token_text = token_text
        self._text_lens: dict[int, int] = {}

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(index, delta),
            **_ending(delta),
            **_extras(self.request, delta, self.token_text),
        }

    chunk = choice

    def _logprobs(self, index: int, delta: Delta) -> dict[str, list[Any]] | None:
        if self.request.logprobs is None:
            return None
        prompt = (delta.prompt_logprobs or ()) if self.request.echo else ()
        entries = [*prompt, *delta.logprobs]
        ids = [*delta.echoed_ids, *delta.token_ids]
        tokens = [self.token_text(token_id) for token_id in ids]
        offsets = []
        offset = self._text_lens.get(index, 0)
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._text_lens[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [entry and entry.logprob for entry in entries],
            "top_logprobs": [entry and self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The sampled token is always among them, as in OpenAI's answers."""
        top = zip(entry.top_ids, entry.top_logprobs, strict=True)
        pairs = [*top, (entry.token_id, entry.logprob)]
        return {self.token_text(token_id): logprob for token_id, logprob in pairs}


class ChatForm:
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, token_text: TokenText) -> None:
        self.request = request
        self.token_text = token_text
        self._started: set[int] = set()

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"index": index, "message": message, **self._rest(delta)}

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        role = {} if index in self._started else {"role": "assistant"}
        self._started.add(index)
        return {"index": index, "delta": {**role, "content": delta.text}, **self._rest(delta)}

    def _rest(self, delta: Delta) -> dict[str, Any]:
        return {
            "logprobs": self._logprobs(delta.logprobs),
            **_ending(delta),
            **_extras(self.request, delta, self.token_text),
        }

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, list[Any]] | None:
        if not self.request.logprobs:
            return None
        content = []
        for entry in entries:
            top = zip(entry.top_ids, entry.top_logprobs, strict=True)
            alternatives = [self._token(token_id, logprob) for token_id, logprob in top]
            token = self._token(entry.token_id, entry.logprob)
            content.append({**token, "top_logprobs": alternatives})
        return {"content": content}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8"))}


def envelope(response_id: str, object_name: str, model: str) -> dict[str, Any]:
    """What every answer and every streamed event starts with."""
    created = int(time.time())
    return {"id": response_id, "object": object_name, "created": created, "model": model}


def _ending(delta: Delta) -> dict[str, Any]:
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}


def _extras(request: GenerationRequest, delta: Delta, token_text: TokenText) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if request.return_token_ids:
        extras["token_ids"] = list(delta.token_ids)
    if request.prompt_logprobs is not None and delta.prompt_logprobs is not None:
        extras["prompt_logprobs"] = [
            entry and _prompt_entry(entry, token_text) for entry in delta.prompt_logprobs
        ]
    return extras


def _prompt_entry(entry: TokenLogprobs, token_text: TokenText) -> dict[str, dict[str, Any]]:
    """vLLM's form: token id to its log-probability, rank and text; the prompt's own token is in."""
    ranked = enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1)
    by_id = {token_id: (logprob, rank) for rank, (token_id, logprob) in ranked}
    by_id[entry.token_id] = (entry.logprob, entry.rank)
    return {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": token_text(token_id)}
        for token_id, (logprob, rank) in by_id.items()
    }
