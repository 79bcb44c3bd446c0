"""``LLM``: the engine for scripts and notebooks, with the calls and results of vLLM's class.

Blocking calls on one side, on the other an event loop in a thread that lives as long as the engine,
so that it works where another loop already runs, and dead ranks are noticed between calls.
"""

import asyncio
import atexit
import itertools
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar, cast

from launch.client import EngineClient
from launch.continuation import Delta, continue_prompt, merge
from launch.failure import EngineDeadError
from launch.outputs import RequestOutput, completion_output, prompt_logprobs
from launch.params import check_params, check_token_ids, completion_params
from moe_ep.config import EngineConfig
from moe_ep.engine.request import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

# A text, token ids, or either in vLLM's form of a dict.
Prompt = str | Sequence[int] | Mapping[str, Any]

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """An engine on ``ep_size`` ranks, started here and gone after ``shutdown``, the end of a
    ``with``, or the end of the program, however it ends.

    flags: the fields of ``EngineConfig``. ray_address: a cluster to join; else a local one is
    started, which ends with the thread that makes the LLM. Raises ConfigError with all problems at
    once.
    """

    def __init__(self, model: str, *, ray_address: str | None = None, **flags: Any) -> None:
        config = EngineConfig(model=str(model), **flags)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ids = itertools.count()
        self._client = EngineClient(config, ray_address=ray_address)
        self._loop = _loop_in_thread()
        atexit.register(self.shutdown)  # after Ray's own, so that it runs before it
        try:
            self._run(self._client.load())
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Stop the ranks and everything that was started; may be called twice."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        atexit.unregister(self.shutdown)
        asyncio.run_coroutine_threadsafe(self._client.shutdown(), loop).result()
        loop.call_soon_threadsafe(loop.stop)

    def get_tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """None when the checkpoint has none."""
        return self._client.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Continue prompts, all at once; results in the order of the prompts.

        prompts: texts, lists of token ids, or dicts with ``prompt`` or ``prompt_token_ids``.
        sampling_params: for all, or one per prompt. Raises ValueError before anything starts when
        any prompt or parameter is wrong, EngineDeadError when the engine dies.
        """
        texts_and_ids = [self._read_prompt(prompt) for prompt in _as_list(prompts)]
        params = self._read_params(sampling_params, len(texts_and_ids))
        for (_, ids), each in zip(texts_and_ids, params, strict=True):
            check_token_ids(ids, self._client.model.vocab_size)
            self._client.check_admission(len(ids), each)
        return self._run(self._generate(texts_and_ids, params, use_tqdm))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the tokenizer's chat template."""
        tokenizer = self._need_tokenizer("chat")
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        prompts = [
            tokenizer.apply_chat_template(
                cast("list[dict[str, str]]", conversation),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                return_dict=False,
                **(chat_template_kwargs or {}),
            )
            for conversation in ([messages] if is_one else messages)
        ]
        return self.generate(cast("list[Prompt]", prompts), sampling_params, use_tqdm)

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            known = [name for name in ("prompt_token_ids", "prompt") if name in prompt]
            if len(known) != 1 or len(prompt) != 1:
                raise ValueError(
                    f"prompt: a dict with {sorted(prompt)} given; one with either 'prompt' or"
                    f" 'prompt_token_ids' is needed"
                )
            prompt = prompt[known[0]]
        if isinstance(prompt, str):
            return prompt, self._need_tokenizer("a text prompt").encode(prompt)
        return None, list(cast("Sequence[int]", prompt))

    def _read_params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * count
        if len(params) != count:
            raise ValueError(f"sampling_params: {len(params)} given for {count} prompts")
        for each in params:
            if each.stop:
                self._need_tokenizer("stop")
        return [check_params(each, self._client.model.vocab_size) for each in params]

    async def _generate(
        self,
        prompts: list[tuple[str | None, list[int]]],
        params: list[SamplingParams],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        from tqdm import tqdm

        with tqdm(total=len(prompts), desc="prompts", disable=not use_tqdm) as bar:

            async def request(text: str | None, ids: list[int], each: SamplingParams) -> Any:
                output = await self._request(text, ids, each)
                bar.update()
                return output

            pairs = zip(prompts, params, strict=True)
            return await _all(request(text, ids, each) for (text, ids), each in pairs)

    async def _request(
        self, text: str | None, ids: list[int], params: SamplingParams
    ) -> RequestOutput:
        request_id = str(next(self._ids))
        deltas = await _all(
            self._complete(ids, completion_params(params, index), f"{request_id}-{index}")
            for index in range(params.n)
        )
        has_logprobs = params.logprobs is not None
        return RequestOutput(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=ids,
            prompt_logprobs=prompt_logprobs(deltas[0].prompt_logprobs, self._token_text),
            num_cached_tokens=deltas[0].num_cached_tokens,
            outputs=[
                completion_output(index, delta, has_logprobs, self._token_text)
                for index, delta in enumerate(deltas)
            ],
        )

    async def _complete(self, ids: list[int], params: SamplingParams, request_id: str) -> Delta:
        stream = continue_prompt(self._client, self._client.tokenizer, ids, params, request_id)
        async with aclosing(stream) as deltas:
            return merge([delta async for delta in deltas])

    def _token_text(self, token_id: int) -> str | None:
        tokenizer = self._client.tokenizer
        return None if tokenizer is None else cast(str, tokenizer.decode([token_id]))

    def _need_tokenizer(self, what: str) -> "PreTrainedTokenizerBase":
        if self._client.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and this checkpoint has none")
        return self._client.tokenizer

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work`` on the loop; a Ctrl-C here cancels it there."""
        if self._loop is None:
            work.close()
            raise EngineDeadError("the engine was shut down")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a list of ints is one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first error ends the rest and is raised as it is."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _loop_in_thread() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        loop.run_forever()
        loop.close()

    threading.Thread(target=run, name="engine client", daemon=True).start()
    return loop
