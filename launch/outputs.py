"""What ``LLM`` returns: the same classes and fields as vLLM's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launch.continuation import Delta
from moe_ep.engine.request import TokenLogprobs


@dataclass(frozen=True)
class Logprob:
    """rank: 1 is the most likely token. decoded_token: its text by itself, None without a
    tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None


Logprobs = dict[int, Logprob]


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation. logprobs: per token, the entries asked for and the token's own, by id.
    stop_reason: the stop string or id that ended it, None for end-of-sequence or length."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[Logprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its ``n`` continuations. prompt: None when token ids were given.
    prompt_logprobs: entry 0 is None, as nothing precedes the first token. num_cached_tokens: of the
    prompt, what the cache knew when the first continuation started; None when that one was
    aborted before."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int | None = None


TokenText = Callable[[int], str | None]


def completion_output(
    index: int, delta: Delta, has_logprobs: bool, token_text: TokenText
) -> CompletionOutput:
    """From everything one continuation produced."""
    return CompletionOutput(
        index=index,
        text=delta.text,
        token_ids=list(delta.token_ids),
        cumulative_logprob=sum(e.logprob for e in delta.logprobs) if has_logprobs else None,
        logprobs=[_by_id(e, token_text) for e in delta.logprobs] if has_logprobs else None,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
    )


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None] | None, token_text: TokenText
) -> list[Logprobs | None] | None:
    if entries is None:
        return None
    return [None if entry is None else _by_id(entry, token_text) for entry in entries]


def _by_id(entry: TokenLogprobs, token_text: TokenText) -> Logprobs:
    own = Logprob(entry.logprob, entry.rank, token_text(entry.token_id))
    top = {
        token_id: Logprob(logprob, rank, token_text(token_id))
        for rank, (token_id, logprob) in enumerate(
            zip(entry.top_ids, entry.top_logprobs, strict=True), start=1
        )
    }
    return {entry.token_id: own, **top}
