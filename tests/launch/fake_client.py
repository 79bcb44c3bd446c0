"""An engine client without an engine: deterministic tokens, and faults on demand."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from launch.client import ServedModel
from launch.failure import EngineDeadError
from moe_ep.config import EngineConfig
from moe_ep.engine.request import FinishReason, SamplingParams, StepOutput

VOCAB_SIZE = 256
MAX_MODEL_LEN = 64


class FakeClient:
    """Continues a prompt with the ids that follow its last one.

    dies_after: tokens of a request after which the engine is dead. hangs_after: tokens after which
    nothing more comes. fails_after: tokens after which a fault of ours shows.
    """

    def __init__(
        self,
        *,
        tokenizer=None,
        dies_after: int | None = None,
        hangs_after: int | None = None,
        fails_after: int | None = None,
    ) -> None:
        self.config = EngineConfig(model="fake", ep_size=2, max_num_seqs=2)
        self.info = ServedModel(VOCAB_SIZE, MAX_MODEL_LEN)
        self.tokenizer = tokenizer
        self.error: EngineDeadError | None = None
        self.num_open = 0
        self._dies_after = dies_after
        self._hangs_after = hangs_after
        self._fails_after = fails_after

    async def load(self) -> None:
        pass

    async def shutdown(self) -> None:
        pass

    async def status(self) -> list:
        if self.error is not None:
            raise self.error
        return []

    def check_admission(self, prompt_len: int, params: SamplingParams) -> None:
        if prompt_len >= MAX_MODEL_LEN:
            raise ValueError(f"prompt: {prompt_len} tokens given; fewer than {MAX_MODEL_LEN} fit")

    async def generate(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[StepOutput, None]:
        self.num_open += 1
        try:
            count = params.max_tokens or MAX_MODEL_LEN - len(prompt_token_ids)
            for i in range(count):
                await self._misbehave(i)
                token = (prompt_token_ids[-1] + 1 + i) % VOCAB_SIZE
                is_last = i == count - 1
                reason = FinishReason.LENGTH if is_last else None
                yield StepOutput(request_id, (token,), finish_reason=reason)
        finally:
            self.num_open -= 1

    async def _misbehave(self, num_tokens: int) -> None:
        if num_tokens == self._dies_after:
            self.error = EngineDeadError("rank 1 died")
            raise self.error
        if num_tokens == self._hangs_after:
            await asyncio.Event().wait()
        if num_tokens == self._fails_after:
            raise KeyError("a fault of ours")
        await asyncio.sleep(0)
