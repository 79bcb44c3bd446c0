"""When to re-place experts, and how all ranks stay of one mind about it while steps run.

    collecting --N steps--> computing --all done--> moving layer by layer --> collecting
                                |                        |
                                +-- a rank fails: off    +-- a rank fails: the rest is given up

Two threads on every rank. The loop calls ``advance`` before each step and never waits; the helper
(``eplb.helper``) does all that waits.

What may differ between ranks is only how far the helper is with its job, and whether the job went
wrong. Both are put to the vote of every step (``is_done``, ``has_failed``), and a loop acts when
*all* are done: so all ranks start a job, switch a layer or give up before the same step. A round of
a transfer that one rank may start, all may, since turns come with agreed steps and are kept.

A layer is switched by all ranks before the same step, or by none. A failure leaves the layer and
those after it as they were; layers before it stay switched, on all ranks.

Shape letters: L MoE layers, E experts, S slots per rank.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from eplb.dispatch import MakeTable
from eplb.helper import Decision, Helper
from eplb.migrate import SlotAccess
from eplb.placement import Placement, Rebalance
from eplb.status import EplbStatus, Phase

logger = logging.getLogger(__name__)


class Slots(SlotAccess, Protocol):
    """All that the manager needs of this rank's engine."""

    def tokens(self) -> torch.Tensor:
        """int64 ``[L, S]`` on the CPU: tokens that each slot has processed since the start."""

    def install(
        self,
        layer: int,
        staged: dict[int, object],
        *,
        experts: torch.Tensor,
        slot_table: torch.Tensor,
    ) -> None:
        """Between steps: put staged experts into their slots, which then hold ``experts [S]``, and
        route by ``slot_table [E, W]``."""


@dataclass(frozen=True)
class Settings:
    """The same on all ranks.

    num_iterations: steps of which loads are collected. min_utilization: balancedness above which
    nothing is moved. bytes_per_step: most that a rank sends and receives per step, but for one
    expert. alarm_after_s: how long a job may stand still.
    """

    num_iterations: int
    min_utilization: float
    bytes_per_step: int
    alarm_after_s: float


class Manager:
    """One rank's end. ``advance``, ``rest`` and ``close`` are for the loop, ``status`` for any
    thread.

    placement: in force at the start. group, nodes, rebalance, make_table: see ``Helper``.
    """

    def __init__(
        self,
        *,
        placement: Placement,
        rank: int,
        nodes: Sequence[int],
        group: dist.ProcessGroup,
        slots: Slots,
        rebalance: Rebalance,
        make_table: MakeTable,
        settings: Settings,
    ) -> None:
        self._helper = Helper(
            rank=rank,
            nodes=nodes,
            group=group,
            access=slots,
            rebalance=rebalance,
            make_table=make_table,
            min_utilization=settings.min_utilization,
            bytes_per_step=settings.bytes_per_step,
        )
        self._slots = slots
        self._settings = settings
        self._placement = placement  # in force, but for layers that a re-placement switched since
        self._decision: Decision | None = None  # being carried out
        self._to_measure: Decision | None = None  # carried out; the next window shows its effect
        self._ended_s: float | None = None
        self._last_step_s: float | None = None
        self._status = EplbStatus()
        self._collect()

    @property
    def is_done(self) -> bool:
        """This rank's vote: its job has ended, well or not. False without a job."""
        return self._helper.is_done

    @property
    def has_failed(self) -> bool:
        """This rank's vote: its job has ended with an error."""
        return self._helper.error is not None

    def advance(self, *, all_done: bool, any_failed: bool) -> None:
        """Before every step, on all ranks with the same arguments: all and any of the votes."""
        start_s = time.perf_counter()
        self._helper.give_turns()
        if all_done:
            self._act(any_failed)
        if self._status.phase is Phase.COLLECTING:
            self._count_step(start_s)
        stall_s = time.perf_counter() - start_s
        if stall_s > self._status.longest_stall_s:
            self._note(longest_stall_s=stall_s)

    def rest(self) -> None:
        """All ranks agreed to sleep: the job may go on at full speed meanwhile."""
        self._helper.give_turns(self._placement.num_slots)
        self._last_step_s = None

    def status(self) -> EplbStatus:
        status = self._status
        age_s = None if self._ended_s is None else time.monotonic() - self._ended_s
        return replace(status, age_s=age_s, alarm=self._alarm(status))

    def close(self) -> None:
        """All ranks leave their loops, here or with an error: the job runs to its end first."""
        self._helper.close(self._placement.num_slots, self._settings.alarm_after_s)

    def _collect(self) -> None:
        self._window_start = self._slots.tokens()
        self._steps_s: list[float] = []
        self._num_steps = 0
        self._last_step_s = None
        self._note(phase=Phase.COLLECTING, layers_pending=0)

    def _count_step(self, now_s: float) -> None:
        if self._last_step_s is not None:
            self._steps_s.append(now_s - self._last_step_s)
        self._last_step_s = now_s
        if self._num_steps == self._settings.num_iterations:
            counts = self._slots.tokens() - self._window_start
            self._helper.start_computing(self._placement, counts, self._steps_s, self._to_measure)
            self._note(phase=Phase.COMPUTING)
        self._num_steps += 1  # the one that is about to run

    def _act(self, any_failed: bool) -> None:
        """All helpers are done, and all ranks know it."""
        if any_failed:
            self._give_up()
        elif self._status.phase is Phase.COMPUTING:
            self._take_decision(self._helper.take())
        else:
            self._switch(self._helper.take())

    def _take_decision(self, decision: Decision) -> None:
        self._decision = decision
        self._to_measure = None
        pending = len(decision.layers)
        self._note(**decision.facts, layers_pending=pending, phase=Phase.MOVING)
        self._reroute(decision)
        if not pending:
            self._note(num_skipped=self._status.num_skipped + 1)
        self._carry_next(decision)

    def _reroute(self, decision: Decision) -> None:
        """Where no expert moves, tokens may be split differently over the replicas. That is each
        rank's own affair, whatever the others do."""
        for layer in set(range(len(decision.experts))).difference(decision.layers):
            self._install(decision, layer, {})

    def _install(self, decision: Decision, layer: int, staged: dict[int, object]) -> None:
        self._slots.install(
            layer,
            staged,
            experts=decision.experts[layer],
            slot_table=decision.slot_table[layer],
        )

    def _switch(self, staged: dict[int, object]) -> None:
        decision, pending = self._decision, self._status.layers_pending
        assert decision is not None, "moving without a decision"
        self._install(decision, decision.layers[-pending], staged)
        self._note(layers_pending=pending - 1, bytes_moved=self._helper.bytes_received)
        self._carry_next(decision)

    def _carry_next(self, decision: Decision) -> None:
        if pending := self._status.layers_pending:
            self._helper.start_carrying(decision, decision.layers[-pending])
        else:
            self._end(decision)

    def _end(self, decision: Decision) -> None:
        """The new placement is in force, but for the layers that are pending still."""
        num_switched = len(decision.layers) - self._status.layers_pending
        table = decision.new.physical_to_logical.clone()
        left = decision.layers[num_switched:]
        table[left] = decision.old.physical_to_logical[left]
        self._placement = Placement(table, decision.new.num_experts, decision.new.num_ranks)
        if num_switched:
            self._to_measure = decision
            self._ended_s = time.monotonic()
            self._note(num_rebalances=self._status.num_rebalances + 1)
            logger.info("experts re-placed in %d MoE layers", num_switched)
        self._collect()

    def _give_up(self) -> None:
        """A failed transfer is tried again after the next window. What fails while computing is
        the way between the helpers or the algorithm, and would fail again."""
        told = str(self._helper.error or "another rank failed")
        logger.error("re-placing experts, %s: %s", self._status.phase, told)
        self._note(last_error=told, num_failures=self._status.num_failures + 1)
        if self._status.phase is Phase.COMPUTING:
            self._note(phase=Phase.OFF)
        else:
            assert self._decision is not None, "moving without a decision"
            self._end(self._decision)
        self._helper.drop()

    def _alarm(self, status: EplbStatus) -> str | None:
        if status.phase is Phase.OFF:
            return f"experts are not re-placed any more: {status.last_error}"
        idle_s = self._helper.idle_s
        if idle_s < self._settings.alarm_after_s:
            return None
        return f"{status.phase} has stood still for {idle_s:.0f} s"

    def _note(self, **changes: Any) -> None:
        """One assignment, so that other threads never see half of a change."""
        self._status = replace(self._status, **changes)
