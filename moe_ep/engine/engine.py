"""One rank's engine: takes requests in, agrees with its peers on each step, runs it, streams out.

All ranks run the same loop in lock step. The loop has one owner thread; ``submit``, ``abort``,
``poll``, ``status`` and ``stop`` may be called from others.
"""

import logging
import queue
import threading
from dataclasses import dataclass

import torch

from eplb.loads import LoadRecorder, SlotRecords
from eplb.status import EplbStatus
from moe_ep.config import EngineConfig
from moe_ep.engine.assemble import Assembly, EngineInfo, assemble
from moe_ep.engine.batch import ScheduledBatch
from moe_ep.engine.host import prepare_process
from moe_ep.engine.request import EngineRequest, FinishReason, StepOutput
from moe_ep.engine.step_shape import StepKind, StepShape, Vote, derive
from moe_ep.engine.world import World
from moe_ep.progress import Progress, Stage
from moe_ep.recorder import StepRecord

logger = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """The engine's loop failed; the message names the rank and where it stood."""


@dataclass(frozen=True)
class RankStatus:
    """Where a rank stands, without asking the device: may be asked at any time, also of a stuck or
    failed engine. eplb: None when experts stay where they are."""

    rank: int
    progress: Progress
    num_running: int
    num_waiting: int
    kv_tokens: int
    kv_blocks_used: int
    kv_blocks_total: int
    error: str | None
    eplb: EplbStatus | None = None


class Engine:
    """The engine of one rank; make it with ``create``."""

    def __init__(self, parts: Assembly, world: World) -> None:
        self.info: EngineInfo = parts.info
        self._parts = parts
        self._world = world
        self._scheduler = parts.scheduler
        self._progress = parts.progress
        self._inbox: queue.SimpleQueue[EngineRequest | str] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[list[StepOutput]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._error: str | None = None

    @classmethod
    def create(cls, config: EngineConfig, world: World, num_threads: int) -> "Engine":
        """Load this rank's share of the model. Collective; ``num_threads`` CPU threads compute."""
        prepare_process(num_threads)
        return cls(assemble(config, world), world)

    def submit(self, requests: list[EngineRequest]) -> None:
        """Queue requests; they must have passed ``admission_error``."""
        for request in requests:
            self._inbox.put(request)
        self._parts.sync.wake()

    def abort(self, request_ids: list[str]) -> None:
        """End requests early; each gives one last output, unknown ids give none."""
        for request_id in request_ids:
            self._inbox.put(request_id)
        self._parts.sync.wake()

    def poll(self, timeout_s: float) -> list[StepOutput]:
        """Outputs since the last call; waits for some, returns [] after ``timeout_s``. What was
        made before a failure comes first, then ``EngineError``."""
        try:
            outputs = self._outbox.get(timeout=timeout_s)
        except queue.Empty:
            outputs = []
        while not self._outbox.empty():
            outputs = outputs + self._outbox.get()
        if not outputs:
            self._raise_if_failed()
        return outputs

    def take_records(self) -> list[StepRecord]:
        """The steps recorded since the last call, on rank 0's clock. One caller only."""
        return self._parts.sampling.take()

    def record_loads(self, is_on: bool) -> None:
        """Start anew, or stop, to record which experts every step's tokens go to.

        Raises RuntimeError without ``expert_distribution_recorder_mode``, as ``load_records``.
        """
        recorder = self._load_recorder()
        recorder.start() if is_on else recorder.stop()

    def load_records(self) -> SlotRecords:
        """What was recorded of this rank's slots so far."""
        return self._load_recorder().records()

    def status(self) -> RankStatus:
        scheduler = self._scheduler
        pool = self._parts.pool
        return RankStatus(
            rank=self._world.rank,
            progress=self._progress.snapshot(),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + self._inbox.qsize(),
            kv_tokens=scheduler.kv_tokens,
            kv_blocks_used=pool.num_blocks - pool.num_free,
            kv_blocks_total=pool.num_blocks,
            error=self._error,
            eplb=self._parts.balancer.status(),
        )

    def slot_tokens(self) -> list[list[int]]:
        """Per MoE layer, tokens that each of this rank's slots has processed so far. Waits for the
        device."""
        return [layer.slot_tokens.tolist() for layer in self._parts.decoder.moe_layers]

    def stop(self) -> None:
        """Ask all ranks to end their loops after the current step."""
        self._stopping.set()
        self._parts.sync.wake()

    def run(self) -> None:
        """Run steps until any rank asks to stop; raises ``EngineError`` on failure."""
        try:
            while self.step():
                pass
        except Exception as error:
            where = self._progress.describe()
            self._error = f"rank {self._world.rank} failed at {where}: {error}"
            logger.exception(self._error)
            self._outbox.put([])  # a poller that waits learns of the failure at once
            raise EngineError(self._error) from error
        finally:
            self._parts.balancer.close()
            self._parts.dispatcher.destroy()

    @torch.inference_mode()
    def step(self) -> bool:
        """One agreed step, or one sleep when all ranks are idle. False once they stop."""
        self._parts.sampling.begin()
        self._progress.enter(Stage.SCHEDULING)
        self._drain_inbox()
        batch = self._scheduler.schedule()
        shape = self._agree(batch)
        if shape.kind is StepKind.STOP:
            return False
        if shape.kind is StepKind.IDLE:
            self._scheduler.check_integrity()
            self._parts.balancer.before_sleep(self._progress.step)
            self._progress.enter(Stage.ASLEEP)
            self._parts.sync.sleep(self._has_news)
            return True
        self._progress.enter(Stage.BALANCING)
        self._parts.balancer.before_step(self._progress.step, shape)
        sampled = self._parts.runner.run(batch, shape)
        self._progress.enter(Stage.OUTPUTS)
        self._emit(self._scheduler.update(batch, sampled))
        self._parts.sampling.end()
        self._progress.step += 1
        return True

    def _agree(self, batch: ScheduledBatch) -> StepShape:
        self._progress.num_tokens = batch.num_tokens
        parts = self._parts
        vote = Vote(
            step=self._progress.step,
            num_decode_tokens=batch.num_decode_tokens,
            num_prefill_tokens=batch.num_prefill_tokens,
            num_largest_part=parts.runner.largest_part(batch) if parts.step_rules.overlap else 0,
            wants_stop=self._stopping.is_set(),
            eplb_done=parts.balancer.is_done,
            eplb_failed=parts.balancer.has_failed,
        )
        self._progress.enter(Stage.STEP_SHAPE)
        votes = [Vote.decode(vector) for vector in parts.sync.agree(vote.encode())]
        return derive(votes, parts.step_rules)

    def _has_news(self) -> bool:
        return self._stopping.is_set() or not self._inbox.empty()

    def _drain_inbox(self) -> None:
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, EngineRequest):
                self._admit(item)
            elif (output := self._scheduler.abort(item)) is not None:
                self._emit([output])

    def _admit(self, request: EngineRequest) -> None:
        """The front end has asked the same rules before; one request it let through by mistake
        must not end the others."""
        try:
            self._scheduler.add(request)
        except ValueError as error:
            logger.error("request %s aborted: %s", request.request_id, error)
            self._emit([StepOutput(request.request_id, (), finish_reason=FinishReason.ABORT)])

    def _emit(self, outputs: list[StepOutput]) -> None:
        if outputs:
            self._outbox.put(outputs)

    def _load_recorder(self) -> LoadRecorder:
        if self._parts.balancer.recorder is None:
            raise RuntimeError("the engine was started without expert_distribution_recorder_mode")
        return self._parts.balancer.recorder

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise EngineError(self._error)
