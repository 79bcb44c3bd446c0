"""Calls from the event loop to the rank actors, each with a time limit.

Knows the actors' methods and nothing of requests.
"""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

from launch.failure import EngineDeadError, LastWords, root_cause
from launch.rank_actor import RankStart
from launch.ray_cluster import RankGroup
from moe_ep.config import LOAD_TIMEOUT_S, EngineConfig

if TYPE_CHECKING:
    from moe_ep.engine.assemble import EngineInfo
    from moe_ep.engine.engine import RankStatus

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 5.0  # limit for asking every rank where it stood
_STOP_S = 10.0  # limit for the ranks to end their loops before they are killed
_SECOND_FAILURES_S = 1.0  # how long failures that follow from the first may take to show


class RankCalls:
    """The ranks of ``group`` as awaitable calls. limit_s: limit of a call that names no other."""

    def __init__(self, group: RankGroup, limit_s: float) -> None:
        self._group = group
        self._limit_s = limit_s
        self.num_ranks = len(group.rows)

    async def call(self, rank: int, method: str, *args: Any, limit_s: float | None = None) -> Any:
        """The method's result; raises what it raised, a ``RayActorError`` when the process is
        gone, ``TimeoutError`` when there was no answer in time."""
        limit_s = self._limit_s if limit_s is None else limit_s
        reference = getattr(self._group.actors[rank], method).remote(*args)
        answer = asyncio.wrap_future(reference.future())
        try:
            # Not wait_for: a TimeoutError of its own could not be told from one of the method's.
            await asyncio.wait({answer}, timeout=limit_s)
            if answer.done():
                return answer.result()
        finally:
            answer.cancel()
        raise TimeoutError(f"no answer to {method} within {limit_s:g} s")

    def send(self, rank: int, method: str, *args: Any) -> None:
        """Call without waiting; a rank that cannot be reached is noticed by its poll."""
        getattr(self._group.actors[rank], method).remote(*args)

    async def start(self, config: EngineConfig, engine: str) -> "list[EngineInfo]":
        """Rendezvous, load and start all ranks; ``EngineDeadError`` naming those that failed."""
        store = None
        if self.num_ranks > 1:
            store = await self.call(0, "bind_store", self._limit_s)
        starts = [
            RankStart(
                config=config,
                rank=row.rank,
                num_ranks=self.num_ranks,
                num_threads=row.num_threads,
                store=store,
                interface=row.placed.interface,
                engine=engine,
            )
            for row in self._group.rows
        ]
        calls = [self.call(s.rank, "start", s, limit_s=LOAD_TIMEOUT_S) for s in starts]
        return await _all_or_failures(calls)

    async def status(self, rank: int) -> "RankStatus":
        return await self.call(rank, "status")

    async def last_words(self, known: "dict[int, RankStatus]") -> list[LastWords]:
        """What every rank says of itself now, or else said last (``known``)."""
        limit_s = min(_LAST_WORDS_S, self._limit_s)
        ranks = range(self.num_ranks)
        calls = (self.call(rank, "status", limit_s=limit_s) for rank in ranks)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [
            LastWords(known.get(rank), answer)
            if isinstance(answer, BaseException)
            else LastWords(answer, None)
            for rank, answer in zip(ranks, answers, strict=True)
        ]

    async def stop(self) -> None:
        """Let all ranks end their loops; those that do not are named in the log."""
        limit_s = min(_STOP_S, self._limit_s)
        ranks = range(self.num_ranks)
        calls = (self.call(rank, "stop", limit_s, limit_s=2 * limit_s) for rank in ranks)
        ended = await asyncio.gather(*calls, return_exceptions=True)
        late = [rank for rank in ranks if ended[rank] is not True]
        if late:
            logger.warning("ranks %s did not stop within %g s and are killed", late, limit_s)


async def _all_or_failures(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """Results by rank. At the first failure wait a moment for those it caused; name them all."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if any(task.exception() for task in done):
            await asyncio.wait(tasks, timeout=_SECOND_FAILURES_S)
    finally:
        for task in tasks:
            task.cancel()
    errors = [task.exception() if task.done() else None for task in tasks]
    reasons = [f"  rank {rank}: {root_cause(e)}" for rank, e in enumerate(errors) if e]
    if reasons:
        raise EngineDeadError("\n".join(["the engine could not start:", *reasons]))
    return [task.result() for task in tasks]
