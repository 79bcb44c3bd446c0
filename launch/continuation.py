"""One continuation of one prompt: the engine's token ids with their text and the reason of the end.

Knows no HTTP. The service, the batch runner and the command line all stream through it.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from launch.text import IncrementalDetokenizer, StopStrings
from moe_ep.engine.request import FinishReason, SamplingParams, StepOutput, TokenLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from launch.client import EngineClient

T = TypeVar("T")


@dataclass(frozen=True)
class Delta:
    """What arrived at one moment, or, merged, everything that arrived.

    text: complete characters that cannot be part of a stop string; empty without a tokenizer.
    prompt_logprobs: on the first delta only, when asked for. num_cached_tokens: of the prompt; on
    the first delta with a token only. finish_reason: on the last only.
    stop_reason: the stop string or id that ended it. echoed_ids: the prompt's own tokens when the
    text starts with the prompt.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    echoed_ids: tuple[int, ...] = ()


def merge(deltas: Sequence[Delta]) -> Delta:
    """Consecutive deltas of one continuation, at least one, as one."""
    first, last = deltas[0], deltas[-1]
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        prompt_logprobs=first.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        echoed_ids=first.echoed_ids,
    )


async def continue_prompt(
    client: "EngineClient",
    tokenizer: "PreTrainedTokenizerBase | None",
    prompt_ids: Sequence[int],
    params: SamplingParams,
    request_id: str,
) -> AsyncGenerator[Delta, None]:
    """Stream one continuation. Closing the iterator early aborts it on its rank."""
    text = _Text(tokenizer, prompt_ids, params)
    async with aclosing(client.generate(prompt_ids, params, request_id)) as outputs:
        async for output in outputs:
            delta = text.delta(output)
            yield delta
            if delta.finish_reason is not None:
                return


class _Text:
    """Detokenises one continuation and watches for its stop strings."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | None",
        prompt_ids: Sequence[int],
        params: SamplingParams,
    ) -> None:
        self._detokenizer = tokenizer and IncrementalDetokenizer(tokenizer, prompt_ids)
        self._stops = StopStrings(params.stop, params.min_tokens)
        self._num_tokens = 0

    def delta(self, output: StepOutput) -> Delta:
        self._num_tokens += len(output.token_ids)
        text = self._push(output)
        reason = output.finish_reason and output.finish_reason.value
        stop_reason: int | str | None = output.stop_reason
        if self._stops.matched is not None:
            reason, stop_reason = FinishReason.STOP.value, self._stops.matched
        return Delta(
            text=text,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            num_cached_tokens=output.num_cached_tokens,
            finish_reason=reason,
            stop_reason=stop_reason,
        )

    def _push(self, output: StepOutput) -> str:
        if self._detokenizer is None:
            return ""
        # The id that ended it is no part of the text, special token or not.
        ended_by_id = output.finish_reason is FinishReason.STOP
        shown_ids = output.token_ids[:-1] if ended_by_id else output.token_ids
        text = self._stops.push(self._detokenizer.push(shown_ids), self._num_tokens)
        if output.finish_reason is not None:
            text += self._stops.push(self._detokenizer.flush(), self._num_tokens)
            text += self._stops.flush()
        return text


async def interleave(
    streams: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams as they come, each with its stream's index.

    The first error ends all of them; so does closing the iterator. Items queue without bound when
    the reader is slow: a continuation is as short as its ``max_tokens`` anyway.
    """
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_drain(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(
    index: int,
    stream: AsyncGenerator[T, None],
    queue: "asyncio.Queue[tuple[int, T] | Exception | None]",
) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait((index, item))
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)
