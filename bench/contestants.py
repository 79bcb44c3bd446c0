"""The two sides of ``bench.decode``: this engine and ``transformers``, behind the same calls."""

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from moe_ep.config import EngineConfig
from moe_ep.engine.engine import Engine
from moe_ep.engine.request import EngineRequest, SamplingParams
from moe_ep.engine.world import World

MAX_TOKENS = 512  # more than any run decodes
CALL_TIMEOUT_S = 300.0


class Contestant(Protocol):
    """Each call returns seconds. ``prefill`` forgets the prompts again; ``start`` keeps them for
    ``decode``, which makes one step of all of them; ``first_logprobs`` is ``[V]``."""

    def prefill(self, prompts: torch.Tensor) -> float: ...
    def start(self, prompts: torch.Tensor) -> None: ...
    def decode(self) -> float: ...
    def first_logprobs(self, prompt: torch.Tensor) -> torch.Tensor: ...


class Transformers:
    """``transformers``' own model and cache, as ``from_pretrained`` configures them."""

    def __init__(self, directory: Path, num_threads: int) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(num_threads)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
        self._last: Any = None

    def _forward(self, token_ids: torch.Tensor, cache: Any = None) -> float:
        start = time.perf_counter()
        self._last = self.model(token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - start

    def prefill(self, prompts: torch.Tensor) -> float:
        return self._forward(prompts)

    def start(self, prompts: torch.Tensor) -> None:
        self._forward(prompts)

    def decode(self) -> float:
        token_ids = self._last.logits[:, -1].argmax(-1, keepdim=True)
        return self._forward(token_ids, self._last.past_key_values)

    def first_logprobs(self, prompt: torch.Tensor) -> torch.Tensor:
        self._forward(prompt[None])
        return self._last.logits[0, -1].float().log_softmax(-1)


class Ours:
    """One rank's engine, with its scheduler and sampler, stepped from here."""

    def __init__(self, directory: Path, num_threads: int) -> None:
        # Every turn computes its prompts anew, as the peer does.
        config = EngineConfig(model=str(directory), num_kv_blocks=512, enable_prefix_caching=False)
        world = World(rank=0, num_ranks=1, store=None, timeout_s=60.0)
        self.engine = Engine.create(config, world, num_threads)
        self._tokens_per_step = config.max_num_batched_tokens
        self._running: list[str] = []

    def _submit(self, prompts: torch.Tensor, max_tokens: int, **params: Any) -> list[str]:
        self._stop()
        sampling = SamplingParams(
            temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True, **params
        )
        names = [f"request {i}" for i in range(len(prompts))]
        rows = zip(names, prompts.tolist(), strict=True)
        self.engine.submit([EngineRequest(name, tuple(row), sampling) for name, row in rows])
        return names

    def _stop(self) -> None:
        self.engine.abort(self._running)
        self._running = []

    def _prefill(self, prompts: torch.Tensor) -> float:
        return sum(self.decode() for _ in range(0, prompts.numel(), self._tokens_per_step))

    def prefill(self, prompts: torch.Tensor) -> float:
        self._submit(prompts, 1)
        return self._prefill(prompts)

    def start(self, prompts: torch.Tensor) -> None:
        self._running = self._submit(prompts, MAX_TOKENS)
        self._prefill(prompts)

    def decode(self) -> float:
        start = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - start

    def first_logprobs(self, prompt: torch.Tensor) -> torch.Tensor:
        self.engine.poll(0.0)
        vocab_size = self.engine.info.vocab_size
        self._submit(prompt[None], 1, logprobs=vocab_size)
        self.decode()
        (output,) = self.engine.poll(0.0)
        entry = output.logprobs[0]
        logprobs = torch.empty(vocab_size)
        logprobs[list(entry.top_ids)] = torch.tensor(entry.top_logprobs)
        return logprobs


class Remote:
    """A contestant in a process of its own: its threads and its allocator meet nobody else's."""

    def __init__(self, kind: Callable[..., Contestant], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, args), daemon=True)
        self._process.start()
        theirs.close()

    def _call(self, name: str, *args: torch.Tensor) -> Any:
        self._connection.send((name, args))
        if not self._connection.poll(CALL_TIMEOUT_S):
            raise TimeoutError(f"{name} took more than {CALL_TIMEOUT_S} s")
        return self._connection.recv()

    def prefill(self, prompts: torch.Tensor) -> float:
        return self._call("prefill", prompts)

    def start(self, prompts: torch.Tensor) -> None:
        self._call("start", prompts)

    def decode(self) -> float:
        return self._call("decode")

    def first_logprobs(self, prompt: torch.Tensor) -> torch.Tensor:
        return self._call("first_logprobs", prompt)


def _serve(connection: Connection, kind: Callable[..., Contestant], args: tuple[Any, ...]) -> None:
    """Answer calls until the other end closes."""
    with torch.inference_mode():
        contestant = kind(*args)
        while True:
            try:
                name, given = connection.recv()
            except EOFError:
                return
            connection.send(getattr(contestant, name)(*given))
