"""One rank's part of the measurement: a real engine, fed with made-up requests, step by step.

Steps of all kinds that are compared take turns: with and without overlap, recorded and bare. So a
change of the machine's speed meets all of them.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from attention import BLOCK_SIZE
from bench.steps.roofline import Ceilings, Load, measure_ceilings
from moe_ep.config import EngineConfig
from moe_ep.engine.assemble import assemble
from moe_ep.engine.clocks import clock_offset_ns
from moe_ep.engine.engine import Engine
from moe_ep.engine.host import prepare_process
from moe_ep.engine.kv_blocks import blocks_needed
from moe_ep.engine.request import EngineRequest, SamplingParams
from moe_ep.engine.world import World
from moe_ep.progress import Stage
from moe_ep.recorder import Recorder, StepRecord, create_clock

OVERLAP_ON, OVERLAP_OFF = "overlap on", "overlap off"
DECODE, PREFILL = "decode", "prefill"
_RECORDER_RUNS = 20


@dataclass(frozen=True)
class Plan:
    """What to measure. batch: requests per rank. context: tokens of a request that are cached
    before a decode, or that a prefill computes."""

    config: EngineConfig
    phase: str
    batch: int
    context: int
    warm_up: int
    iterations: int
    num_threads: int

    @property
    def arms(self) -> tuple[str, ...]:
        """The engines that take turns."""
        on = self.config.enable_two_batch_overlap
        return (OVERLAP_ON, OVERLAP_OFF) if on else (OVERLAP_OFF,)

    @property
    def load(self) -> Load:
        """A rank's part of a step; a decode's context grows from step to step, this is the mean."""
        if self.phase == PREFILL:
            return Load(self.batch, 0, self.context)
        return Load(self.batch, self.context + self._num_steps // 2, 1)

    @property
    def _num_steps(self) -> int:
        return 2 * len(self.arms) * (self.warm_up + self.iterations)

    @property
    def request_len(self) -> int:
        """Most tokens that a request reaches."""
        return self.context + 1 + (self._num_steps if self.phase == DECODE else 0)

    def sized(self) -> EngineConfig:
        """The config with what was left open made just large enough for this plan."""
        config = self.config
        tokens = self.batch if self.phase == DECODE else self.batch * self.context
        seqs = config.max_num_seqs or self.batch
        return replace(
            config,
            enable_prefix_caching=False,  # a decode starts from what nobody has computed
            max_num_seqs=seqs,
            max_num_batched_tokens=config.max_num_batched_tokens or max(tokens, seqs),
            max_model_len=config.max_model_len or self.request_len,
            num_kv_blocks=config.num_kv_blocks
            or self.batch * blocks_needed(self.request_len, BLOCK_SIZE),
        )


@dataclass(frozen=True)
class Sample:
    """One step. step_s: the step by another clock than the recorder's. total_s: with what the
    recorder does before and after it. record: None when it was not recorded."""

    arm: str
    step_s: float
    total_s: float
    record: StepRecord | None


@dataclass(frozen=True)
class RankResult:
    """samples: all that count, in order; records on rank 0's clock. recorder_s: what the recorder
    itself takes for one step."""

    samples: list[Sample]
    ceilings: Ceilings
    recorder_s: float
    clock_offset_ns: int


class Rank:
    """One rank: its engines, one for each arm, share everything but the rules of a step's shape."""

    def __init__(self, plan: Plan, world: World) -> None:
        prepare_process(plan.num_threads)
        self.plan, self.world = plan, world
        self.parts = assemble(plan.config, world)
        rules = self.parts.step_rules
        unsplit = replace(self.parts, step_rules=replace(rules, overlap=None))
        parts = {OVERLAP_ON: self.parts, OVERLAP_OFF: unsplit}
        self.engines = {arm: Engine(parts[arm], world) for arm in plan.arms}
        self.recorder = Recorder(self.parts.progress, create_clock(world.device))
        self._num_requests = 0
        self._tokens = torch.Generator().manual_seed(world.rank)

    def measure(self, told: Callable[[int], None]) -> RankResult:
        """Collective. told: called with the number of each iteration that is done."""
        plan, group = self.plan, self.world.group
        choices = {choice.field: choice.value for choice in self.parts.info.choices}
        ceilings = measure_ceilings(self.world.device, str(choices.get("dtype", plan.config.dtype)))
        if plan.phase == DECODE:
            self._start_decodes()
        before = clock_offset_ns(group)
        samples = []
        for index in range(plan.warm_up + plan.iterations):
            turns = [(arm, is_recorded) for arm in plan.arms for is_recorded in (True, False)]
            for arm, is_recorded in turns if index % 2 else reversed(turns):
                sample = self.step(arm, is_recorded=is_recorded)
                if index >= plan.warm_up:
                    samples.append(sample)
            told(index)
        offset = (before + clock_offset_ns(group)) // 2
        return RankResult(
            samples=[_shifted(sample, offset) for sample in samples],
            ceilings=ceilings,
            recorder_s=self._recorder_s(samples),
            clock_offset_ns=offset,
        )

    def step(self, arm: str, *, is_recorded: bool) -> Sample:
        engine = self.engines[arm]
        if self.plan.phase == PREFILL:
            engine.submit(self._requests())
        start = time.perf_counter()
        if is_recorded:
            self.recorder.start()
        before = time.perf_counter()
        engine.step()
        after = time.perf_counter()
        record = self.recorder.finish() if is_recorded else None
        total = time.perf_counter() - start
        engine.poll(0.0)
        return Sample(arm, after - before, total, record)

    def close(self) -> None:
        """What an engine's loop does when it ends."""
        self.parts.balancer.close()
        self.parts.dispatcher.destroy()

    def _recorder_s(self, samples: list[Sample]) -> float:
        """Timed alone, with as many pieces as the longest record has."""
        num_pieces = max(len(s.record.stages) for s in samples if s.record is not None)
        seconds = []
        for _ in range(_RECORDER_RUNS):
            start = time.perf_counter()
            self.recorder.start()
            for _ in range(num_pieces):
                self.parts.progress.enter(Stage.OUTPUTS)
            self.recorder.finish()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def _start_decodes(self) -> None:
        """As if the prompts had been prefilled: their blocks are theirs with the first step, and
        what is in them does not change how long attention takes, unless it is NaN."""
        self.parts.runner.cache.tensor.zero_()
        for request in self._requests():
            self.parts.scheduler.add(request)
        for queued in self.parts.scheduler._waiting:
            queued.num_computed_tokens = queued.prompt_len - 1

    def _requests(self) -> list[EngineRequest]:
        plan, vocabulary = self.plan, self.parts.info.vocab_size
        num_new = 1 if plan.phase == PREFILL else plan.request_len - plan.context
        shape = (plan.batch, plan.context)
        prompts = torch.randint(vocabulary, shape, generator=self._tokens).tolist()
        first = self._num_requests
        self._num_requests += plan.batch
        return [
            EngineRequest(
                request_id=str(first + index),
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(max_tokens=num_new, ignore_eos=True, seed=first + index),
            )
            for index, prompt in enumerate(prompts)
        ]


def _shifted(sample: Sample, offset_ns: int) -> Sample:
    if sample.record is None:
        return sample
    return replace(sample, record=sample.record.shifted(offset_ns))


def default_threads(num_ranks_here: int) -> int:
    """CPU threads of a rank when nothing was said."""
    return max(1, (os.cpu_count() or 1) // num_ranks_here)
