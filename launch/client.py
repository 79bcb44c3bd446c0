"""The front end's side of the engine: one asyncio object that feeds all ranks and watches them.

Works on token ids; text is made by ``launch.text``. One poll is always open at every rank, so a
dead or failed rank is noticed within seconds even when no request is running.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from launch.balancer import Balancer
from launch.failure import EngineDeadError, describe_failure, root_cause
from launch.params import check_params
from launch.rank_actor import ENGINE, RankReport
from launch.rank_calls import RankCalls
from launch.ray_cluster import place_ranks
from launch.text import load_tokenizer
from launch.topology import TopologyRow, topology_table
from moe_ep.config import EngineConfig, validate
from moe_ep.engine.admission import AdmissionLimits, admission_error
from moe_ep.engine.prefix import Name, extend_names
from moe_ep.engine.request import EngineRequest, FinishReason, SamplingParams, StepOutput
from moe_ep.engine.step_times import RankTimes, StepJoin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from moe_ep.engine.assemble import EngineInfo
    from moe_ep.engine.engine import RankStatus

logger = logging.getLogger(__name__)

_POLL_S = 5.0  # an idle poll is renewed this often


class ServedModel(NamedTuple):
    """What a user of the engine must know about it."""

    vocab_size: int
    max_model_len: int


class _Open(NamedTuple):
    """A request on its way. queue: its outputs, or the error that ends it."""

    rank: int
    queue: "asyncio.Queue[StepOutput | EngineDeadError]"


class EngineClient:
    """An engine of ``ep_size`` ranks. Make it with ``start``; use it from one event loop.

    config: what runs, but for what each rank settles (see its info): backends, cache blocks.
    tokenizer: None when the checkpoint has none. infos: each rank's account of what it loaded, in
    rank order. error: why the engine is dead, None while it is well. on_step: told of every
    recorded step, with the times of all ranks.
    """

    def __init__(
        self, config: EngineConfig, *, ray_address: str | None = None, engine: str = ENGINE
    ) -> None:
        """Check the configuration and place the ranks; blocking. ``load`` must follow.

        A Ray cluster that this starts ends with the calling thread. Raises ``ConfigError`` with
        all problems, ``ClusterError`` when the ranks find no place.
        """
        self.model = validate(config)
        self.config, _ = config.resolve(self.model)
        self.tokenizer: PreTrainedTokenizerBase | None = load_tokenizer(self.config.tokenizer)
        self.infos: list[EngineInfo] = []
        self.error: EngineDeadError | None = None
        self.on_step: Callable[[list[RankTimes]], None] = lambda times: None
        self._steps = StepJoin(config.ep_size)
        self._given_config = config  # each rank resolves it and logs its choices
        self._engine = engine
        self._watchdog_s = config.watchdog_timeout_s
        self._seeds = random.Random(config.seed)
        self._balancer: Balancer  # made when the ranks have said what they hold
        self._open: dict[str, _Open] = {}
        self._last_status: dict[int, RankStatus] = {}
        self._moved_s: dict[int, float] = {}
        self._watches: list[asyncio.Task[None]] = []
        self._failure: asyncio.Task[None] | None = None
        self._is_shut = False
        num_slots = self.model.num_experts + config.ep_num_redundant_experts
        self._group = place_ranks(
            num_ranks=config.ep_size,
            num_slots_per_rank=num_slots // config.ep_size,
            address=ray_address,
            timeout_s=self._watchdog_s,
        )
        self._ranks = RankCalls(self._group, self._watchdog_s)

    @classmethod
    async def start(
        cls, config: EngineConfig, *, ray_address: str | None = None, engine: str = ENGINE
    ) -> "EngineClient":
        """Place the ranks, print where they are, load the model on all of them."""
        client = cls(config, ray_address=ray_address, engine=engine)
        await client.load()
        return client

    async def load(self) -> None:
        """Load the model on all ranks; on any failure everything is stopped."""
        try:
            self._print_topology()
            self.infos = await self._ranks.start(self._given_config, self._engine)
            self._balancer = Balancer(
                len(self.infos),
                block_size=self.limits.block_size,
                num_blocks=sum(info.limits.num_blocks for info in self.infos),
            )
        except BaseException:
            await self.shutdown()
            raise
        self._watches = [asyncio.create_task(self._watch(rank)) for rank in range(len(self.rows))]

    @property
    def rows(self) -> Sequence[TopologyRow]:
        """Where the ranks are, in rank order."""
        return self._group.rows

    @property
    def info(self) -> ServedModel:
        return ServedModel(self.model.vocab_size, self.limits.max_model_len)

    @property
    def limits(self) -> AdmissionLimits:
        """What one request may take: the smallest of all ranks."""
        limits = [info.limits for info in self.infos]
        return AdmissionLimits(
            max_model_len=min(each.max_model_len for each in limits),
            num_blocks=min(each.num_blocks for each in limits),
            block_size=limits[0].block_size,
        )

    @property
    def loads(self) -> tuple[int, ...]:
        """Tokens of open requests, per rank."""
        return self._balancer.loads

    def check_admission(self, prompt_len: int, params: SamplingParams) -> None:
        """Raise ValueError naming the field of a request that can never run."""
        reason = admission_error(prompt_len, params, self.limits)
        if reason is not None:
            raise ValueError(reason)

    def generate(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[StepOutput, None]:
        """Continue one prompt once; the last output has a ``finish_reason``.

        prompt_token_ids: must have passed ``check_token_ids``, once for all completions of it. What
        else is wrong is refused at once, with a ValueError that names the field. The request starts
        with the first ``anext``, and is aborted when the iterator is closed early. ``params.n``
        must be 1: several completions are several requests. A seed is drawn for a request without
        one. Raises EngineDeadError when the engine dies meanwhile.
        """
        self._raise_if_dead()
        params = check_params(params, self.model.vocab_size)
        if params.n != 1:
            raise ValueError(f"n: {params.n} given; one request makes one completion")
        self.check_admission(len(prompt_token_ids), params)
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(63))
        return self._stream(EngineRequest(request_id, tuple(prompt_token_ids), params))

    def abort(self, request_id: str) -> None:
        """End a request: its iterator gets a last ABORT. An unknown id may just have ended."""
        entry = self._forget(request_id)
        if entry is not None:
            self._ranks.send(entry.rank, "abort", [request_id])
            entry.queue.put_nowait(StepOutput(request_id, (), finish_reason=FinishReason.ABORT))

    async def status(self) -> "list[RankStatus]":
        """Where every rank stands, in rank order; EngineDeadError when the engine is dead."""
        return await self.ask_all("status")

    async def ask_all(self, method: str, *args: Any) -> list[Any]:
        """The method of every rank's actor, in rank order; a failure is one of the engine."""
        self._raise_if_dead()
        calls = (self._ask(rank, method, *args) for rank in range(len(self.rows)))
        return list(await asyncio.gather(*calls))

    async def shutdown(self) -> None:
        """End requests, ranks, and a Ray that was started here. May be called twice."""
        if self._is_shut:
            return
        self._is_shut = True
        try:
            tasks = [*self._watches, *([self._failure] if self._failure else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._end_requests(self.error or EngineDeadError("the engine was shut down"))
            if self.infos and self.error is None:
                await self._ranks.stop()
        finally:
            self._group.close()

    async def _stream(self, request: EngineRequest) -> AsyncGenerator[StepOutput, None]:
        self._raise_if_dead()
        request_id = request.request_id
        prompt = request.prompt_token_ids
        rank = self._balancer.assign(request_id, len(prompt), self._block_names(prompt))
        entry = self._open[request_id] = _Open(rank, asyncio.Queue())
        try:
            await self._ask(rank, "submit", [request])
            is_last = False
            while not is_last:
                # Bounded by the watch: it ends all requests when their rank dies or stands still.
                output = await entry.queue.get()
                if isinstance(output, EngineDeadError):
                    raise output
                is_last = output.finish_reason is not None
                yield output
        finally:
            if self._open.get(request_id) is entry:
                self.abort(request_id)

    def _block_names(self, token_ids: Sequence[int]) -> list[Name]:
        names: list[Name] = []
        if self.config.enable_prefix_caching:
            block_size = self.limits.block_size
            extend_names(names, token_ids, block_size, len(token_ids) // block_size)
        return names

    async def _watch(self, rank: int) -> None:
        """Bring in the rank's outputs until the engine dies."""
        wait_s = min(_POLL_S, self._watchdog_s / 3)
        limit_s = wait_s + self._watchdog_s
        while self.error is None:
            try:
                report = await self._ranks.call(rank, "poll", wait_s, limit_s=limit_s)
                self._take_report(rank, report)
            except Exception as error:
                await self._fail(rank, error)

    def _take_report(self, rank: int, report: RankReport) -> None:
        for output in report.outputs:
            entry = self._open.get(output.request_id)
            if entry is None:
                continue  # aborted meanwhile
            self._balancer.grow(output.request_id, len(output.token_ids))
            if output.finish_reason is not None:
                self._forget(output.request_id)
            entry.queue.put_nowait(output)
        for times in self._steps.add(rank, report.records):
            self.on_step(times)
        if report.status is not None:
            self._check_progress(rank, report.status)

    def _check_progress(self, rank: int, status: "RankStatus") -> None:
        """Raise when a rank with open requests stood still for the whole watchdog time."""
        now_s = asyncio.get_running_loop().time()
        last = self._last_status.get(rank)
        self._last_status[rank] = status
        is_busy = any(entry.rank == rank for entry in self._open.values())
        if last is None or not is_busy or status.progress != last.progress:
            self._moved_s[rank] = now_s
        elif now_s - self._moved_s[rank] > self._watchdog_s:
            raise TimeoutError(f"no progress for {self._watchdog_s:g} s with requests open")

    async def _ask(self, rank: int, method: str, *args: Any) -> Any:
        """Call a rank; when it fails, so has the engine."""
        try:
            return await self._ranks.call(rank, method, *args)
        except Exception as error:
            await self._fail(rank, error)
            self._raise_if_dead()

    async def _fail(self, rank: int, error: Exception) -> None:
        """Declare the engine dead, once; returns when ``error`` tells all."""
        if self._is_shut:
            return
        if self._failure is None:
            self._failure = asyncio.create_task(self._collapse(rank, error))
        await asyncio.shield(self._failure)

    async def _collapse(self, rank: int, error: Exception) -> None:
        """Ask every rank where it stood, tell all requests, stop all ranks."""
        self.error = EngineDeadError(f"rank {rank}: {root_cause(error)}")
        words = await self._ranks.last_words(self._last_status)
        self.error = EngineDeadError(describe_failure(rank, error, self.rows, words))
        logger.error("%s", self.error)
        self._end_requests(self.error)
        self._group.stop()

    def _end_requests(self, error: EngineDeadError) -> None:
        for request_id in list(self._open):
            entry = self._forget(request_id)
            if entry is not None:
                # Each its own: one exception raised in many tasks would collect all their frames.
                entry.queue.put_nowait(EngineDeadError(str(error)))

    def _forget(self, request_id: str) -> _Open | None:
        entry = self._open.pop(request_id, None)
        if entry is not None:
            self._balancer.finish(request_id)
        return entry

    def _raise_if_dead(self) -> None:
        if self.error is not None:
            raise EngineDeadError(str(self.error))
        if self._is_shut:
            raise EngineDeadError("the engine was shut down")

    def _print_topology(self) -> None:
        from rich.console import Console

        Console(stderr=True).print(topology_table(self.rows))
