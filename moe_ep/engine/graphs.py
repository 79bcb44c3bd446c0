"""Decode steps captured as CUDA graphs, one for each padded size, and replayed on fixed inputs.

A graph repeats the kernels of one forward pass with the addresses and sizes that they had. What it
cannot hold is kept out by construction. Only steps without prefill have a bucket, and only sizes
that were captured at the start have a graph; every other step runs as ever, with the same padding.
Backends say themselves whether their kernels can be captured, and one that cannot stops all ranks
from capturing (``capture_problem``). A graph holds one whole forward pass, so whole pairs of
dispatch and combine: an even number of exchanges, as passes between replays do. Which exchanges a
step makes, and in which order, does not depend on whether it is replayed.

Captured once the cache exists, since its addresses are in the graphs. So their memory, one pool in
which all graphs lie on top of each other, the largest made first, comes out of the share of the
device that ``gpu_memory_utilization`` leaves, as what a step needs beside weights and cache does.

Shape letters: T tokens of a micro-batch, padding included.
"""

import dataclasses
import logging
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from attention import attention_capture_problem
from attention.base import BLOCK_SIZE, AttentionBackend, AttentionBatch
from attention.latent_cache import LatentCache
from moe_ep import dispatch, experts
from moe_ep.config import Choice, EngineConfig
from moe_ep.dispatch.base import Dispatcher, Mode
from moe_ep.engine.step_input import MicroBatch, attention_batch, token_rows
from moe_ep.engine.step_shape import StepKind, StepRules, StepShape
from moe_ep.engine.world import World
from moe_ep.model.decoder import Decoder, StepInput

logger = logging.getLogger(__name__)

R = TypeVar("R")

# The forward pass of a step: its one or two micro-batches to their last hidden states.
Forward = Callable[[Sequence[StepInput]], list[torch.Tensor]]


class Graph(Protocol):
    def replay(self) -> None:
        """Run what was captured again, in the order of the current stream."""


class GraphMaker(Protocol):
    def capture(self, function: Callable[[], R]) -> tuple[Graph, R]:
        """Call the function once and keep what it launches, instead of running it.

        Every replay of any graph of this maker may overwrite the tensors that came back.
        """


class CudaGraphMaker:
    """torch's graphs, in one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], R]) -> tuple[Graph, R]:
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process, NCCL's watchdog for one, may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        return graph, result


def graph_maker(device: torch.device) -> GraphMaker | None:
    """None where there are no graphs."""
    return CudaGraphMaker() if device.type == "cuda" else None


def capture_problem(config: EngineConfig, device: torch.device) -> str | None:
    """None when decode steps can be captured on this rank, else the first reason why not.

    config: with its backends named.
    """
    if config.enforce_eager:
        return "asked for"
    if graph_maker(device) is None:
        return f"no graphs on a {device.type} device"
    exchange, runner = config.moe_a2a_backend, config.moe_runner_backend
    answers = (
        (exchange, dispatch.BACKENDS[exchange]().capture_problem(graph_mode(config))),
        (runner, experts.BACKENDS[runner]().capture_problem()),
        (config.attention_backend, attention_capture_problem(config.attention_backend)),
    )
    return next((f"{name}: {reason}" for name, reason in answers if reason), None)


def graph_mode(config: EngineConfig) -> Mode:
    """The exchange mode of steps that have a bucket."""
    return Mode.NORMAL if config.deepep_mode == "normal" else Mode.LOW_LATENCY


def resolve_graphs(config: EngineConfig, world: World) -> tuple[EngineConfig, list[Choice]]:
    """``cuda_graph_bs`` settled, and ``enforce_eager`` set where any rank cannot capture: then
    none does. Collective; the same on all ranks."""
    problems = world.gather(capture_problem(config, world.device))
    problem = next((problem for problem in problems if problem is not None), None)
    choices = []
    if problem is not None and not config.enforce_eager:
        choices.append(Choice("enforce_eager", True, problem))
    if config.cuda_graph_bs is None:
        sizes = default_sizes(config.max_num_seqs) if problem is None else ()
        reason = "up to max_num_seqs" if sizes else "no step is captured, so none is padded"
        choices.append(Choice("cuda_graph_bs", sizes, reason))
    settled: dict[str, Any] = {choice.field: choice.value for choice in choices}
    return dataclasses.replace(config, **settled), choices


def step_sizes(rules: StepRules) -> set[tuple[int, ...]]:
    """Padded tokens of the micro-batches of every step that has a bucket."""
    shapes = [
        StepShape(StepKind.RUN, padded_tokens=bucket, overlap=overlap)
        for bucket in rules.buckets
        for overlap in (False, True)
        if not overlap or (rules.overlap is not None and bucket >= rules.overlap.decode)
    ]
    return {tuple(size for size in micro_batch_sizes(shape) if size) for shape in shapes}


def micro_batch_sizes(shape: StepShape) -> tuple[int | None, ...]:
    """Padded tokens of each micro-batch of the step; None where it is not padded."""
    return (shape.micro_batch_rows,) * (2 if shape.overlap else 1)


def default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Rising, up to ``max_num_seqs``: dense where a step is short and padding weighs most."""
    spaced = (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, max_num_seqs, 32))
    return (*(size for size in spaced if size < max_num_seqs), max_num_seqs)


class FixedInput:
    """One micro-batch at addresses that stay; all padding at first."""

    def __init__(
        self,
        num_tokens: int,
        *,
        index: int,
        mode: Mode,
        attention: AttentionBackend,
        cache: LatentCache,
        max_blocks: int,
    ) -> None:
        """num_tokens: T. index: which micro-batch of the step. max_blocks: most of a request."""
        device = cache.tensor.device
        self._index, self._mode = index, mode
        self._rows = torch.zeros(3, num_tokens, dtype=torch.int64, device=device)
        self._rows[2].fill_(-1)
        self._num_tokens = torch.zeros(1, dtype=torch.int32, device=device)
        self._plan = attention.static_plan(
            num_requests=num_tokens,
            max_blocks=min(max_blocks, cache.num_blocks),
            num_blocks=cache.num_blocks,
        )

    def fill(self, batch: MicroBatch) -> None:
        """Take over a micro-batch of decodes, at most T of them."""
        num_rows = self._rows.shape[1]
        attention = attention_batch(batch, num_rows)
        self._rows.copy_(token_rows(batch, attention))
        self._num_tokens.fill_(batch.num_tokens)
        self._plan.update(attention)

    def fill_for_trial(self, vocab_size: int) -> None:
        """T different tokens, each of which attends to all of cache block 0 and is stored nowhere:
        a full step, so that kernels that are tuned when they first run are tuned on work."""
        num_rows = self._rows.shape[1]
        self._rows[0].copy_(torch.arange(num_rows) % vocab_size)
        self._num_tokens.fill_(num_rows)
        self._plan.update(
            AttentionBatch(
                num_decodes=num_rows,
                query_lens=[1] * num_rows,
                context_lens=[BLOCK_SIZE - 1] * num_rows,
                block_tables=[array("i", [0])] * num_rows,
                num_padded_tokens=num_rows,
            )
        )

    def step_input(self) -> StepInput:
        """For one forward pass; called where it is captured."""
        token_ids, positions, slots = self._rows
        return StepInput(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            num_tokens=self._num_tokens,
            attention_plan=self._plan.plan(),
            mode=self._mode,
            micro_batch=self._index,
        )


@dataclass(frozen=True)
class CapturedStep:
    """A forward pass, its inputs and where it leaves its results."""

    inputs: list[FixedInput]
    graph: Graph
    hidden: list[torch.Tensor]

    def fill(self, batches: Sequence[MicroBatch]) -> None:
        for fixed, batch in zip(self.inputs, batches, strict=True):
            fixed.fill(batch)

    def replay(self) -> list[torch.Tensor]:
        """Last hidden states of each micro-batch ``[T, H]``; the next replay overwrites them."""
        self.graph.replay()
        return self.hidden


class StepGraphs:
    """The captured steps of one rank, by the padded sizes of their micro-batches."""

    def __init__(
        self,
        *,
        maker: GraphMaker,
        mode: Mode,
        attention: AttentionBackend,
        dispatcher: Dispatcher,
        cache: LatentCache,
        max_blocks: int,
    ) -> None:
        """mode: of all steps to capture. max_blocks: cache blocks that a request may have."""
        self.mode = mode
        self._maker = maker
        self._attention = attention
        self._dispatcher = dispatcher
        self._cache = cache
        self._max_blocks = max_blocks
        self._steps: dict[tuple[int | None, ...], CapturedStep] = {}

    def capture(
        self, sizes: Iterable[tuple[int, ...]], *, forward: Forward, decoder: Decoder
    ) -> None:
        """Capture a step for each entry: the padded tokens of its micro-batches. Collective.

        Before any request: each step is tried once, in which libraries compile and tune their
        kernels, on cache block 0. Nothing of that remains: the block is free, counters are reset.
        """
        self._cache.tensor[:, 0].zero_()
        for entry in sorted(sizes, key=sum, reverse=True):
            self._steps[entry] = self._capture(entry, forward, len(decoder.embedding))
        for layer in decoder.moe_layers:
            layer.slot_tokens.zero_()

    def find(self, shape: StepShape) -> CapturedStep | None:
        """The captured step of this shape, if there is one; the same on all ranks."""
        return self._steps.get(micro_batch_sizes(shape)) if shape.mode is self.mode else None

    def _capture(self, sizes: tuple[int, ...], forward: Forward, vocab_size: int) -> CapturedStep:
        inputs = [
            FixedInput(
                size,
                index=index,
                mode=self.mode,
                attention=self._attention,
                cache=self._cache,
                max_blocks=self._max_blocks,
            )
            for index, size in enumerate(sizes)
        ]

        def run() -> list[torch.Tensor]:
            return forward([fixed.step_input() for fixed in inputs])

        for fixed in inputs:
            fixed.fill_for_trial(vocab_size)
        self._dispatcher.prepare(self.mode)
        run()
        graph, hidden = self._maker.capture(run)
        logger.debug("captured a decode step of %s tokens", "+".join(map(str, sizes)))
        return CapturedStep(inputs, graph, hidden)
