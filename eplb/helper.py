"""The thread beside a rank's loop that does all that waits: gathering loads, computing a placement,
carrying experts between ranks.

One job at a time. Jobs are collective: every rank starts the same ones in the same order, and each
runs to its end on every rank, whatever goes wrong on one of them; so no helper waits in vain, and
the only thing to ask a helper is whether it is done. Knows nothing of steps but the turns that the
loop hands out: a transfer starts one round for each, which bounds the bytes per step.

Shape letters: L MoE layers, E experts, R ranks, S slots per rank, P = R * S.
"""

import logging
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from eplb.dispatch import MakeTable
from eplb.loads import (
    balancedness,
    expected_rank_loads,
    logical_loads,
    rank_loads,
    work_of_slowest,
)
from eplb.migrate import (
    Carrier,
    SlotAccess,
    SlotLayout,
    changed_layers,
    keep_slots,
    plan_moves,
    split_rounds,
)
from eplb.placement import Placement, Rebalance

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005


@dataclass(frozen=True)
class Decision:
    """What a computation found; equal on all ranks.

    slot_table: int64 ``[L, E, W]``, and experts: int64 ``[L, S]``, of this rank. layers: those in
    which experts move. step_s: median of the window that led to it. facts: what that window adds to
    ``EplbStatus``.
    """

    old: Placement
    new: Placement
    slot_table: torch.Tensor
    experts: torch.Tensor
    layers: list[int]
    step_s: float | None
    facts: dict[str, Any]


class Helper:
    """One rank's helper. All methods are for the loop, none waits but ``close``.

    group: CPU tensors over all ranks, used by nothing else; its time limit bounds every wait.
    nodes: the node of each rank. access, rebalance, make_table: called in the helper's thread. The
    other arguments: see ``Settings``; the same on all ranks.
    """

    def __init__(
        self,
        *,
        rank: int,
        nodes: Sequence[int],
        group: dist.ProcessGroup,
        access: SlotAccess,
        rebalance: Rebalance,
        make_table: MakeTable,
        min_utilization: float,
        bytes_per_step: int,
    ) -> None:
        layout = SlotLayout(access.export(0, 0))
        self._carrier = Carrier(access=access, layout=layout, group=group, rank=rank)
        self._max_per_round = max(1, bytes_per_step // layout.num_bytes)
        if rank == 0:
            size = layout.num_bytes
            logger.info("experts of %d bytes, %d of a rank per step", size, self._max_per_round)
        self._rank = rank
        self._nodes = tuple(nodes)
        self._group = group
        self._rebalance = rebalance
        self._make_table = make_table
        self._min_utilization = min_utilization
        self._thread = ThreadPoolExecutor(
            1, "eplb", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._job: Future[Any] | None = None
        self._turns = threading.Semaphore(0)
        self._moved_s = time.monotonic()

    @property
    def is_done(self) -> bool:
        """The job has ended, well or not; False without a job."""
        return self._job is not None and self._job.done()

    @property
    def error(self) -> BaseException | None:
        """Why the job that is done has failed."""
        return self._job.exception() if self._job is not None and self._job.done() else None

    @property
    def bytes_received(self) -> int:
        return self._carrier.bytes_received

    @property
    def idle_s(self) -> float:
        """How long the job has not got on; 0 without one at work."""
        is_at_work = self._job is not None and not self._job.done()
        return time.monotonic() - self._moved_s if is_at_work else 0.0

    def start_computing(
        self,
        placement: Placement,
        slot_tokens: torch.Tensor,
        steps_s: list[float],
        last: Decision | None,
    ) -> None:
        """The job's result is a ``Decision``.

        slot_tokens: int64 ``[L, S]``, of the window, this rank's. steps_s: its steps' times. last:
        the re-placement whose effect this window shows.
        """
        self._start(self._compute, placement, slot_tokens, steps_s, last)

    def start_carrying(self, decision: Decision, layer: int) -> None:
        """The job's result is what ``Carrier.carry`` returns."""
        self._start(self._carry, decision, layer)

    def give_turns(self, count: int = 1) -> None:
        """Let the transfer start so many rounds more, now or when it gets there."""
        self._turns.release(count)

    def take(self) -> Any:
        """The result of the job that is done well, after which there is none."""
        job, self._job = self._job, None
        assert job is not None, "no job"
        return job.result(timeout=0)

    def drop(self) -> None:
        """Forget the job that is done, here or on another rank with an error."""
        self._job = None

    def close(self, num_slots: int, timeout_s: float) -> None:
        """Wait for the job, which gets all the turns it can need."""
        self.give_turns(num_slots)
        jobs = [] if self._job is None else [self._job]
        self._thread.shutdown(wait=not wait(jobs, timeout=timeout_s).not_done)

    def _start(self, work: Callable[..., object], *args: object) -> None:
        assert self._job is None, "one job at a time"
        self._turns = threading.Semaphore(1)
        self._moved_s = time.monotonic()
        self._job = self._thread.submit(torch.inference_mode()(work), *args)

    def _compute(
        self,
        old: Placement,
        slot_tokens: torch.Tensor,
        steps_s: list[float],
        last: Decision | None,
    ) -> Decision:
        measured = self._gather(slot_tokens)
        loads = logical_loads(measured, old)
        target = self._agree_on_target(old, loads, measured)
        step_s = statistics.median(steps_s) if steps_s else None
        with _giving_way():
            new = keep_slots(old, target)
            return Decision(
                old=old,
                new=new,
                slot_table=self._make_table(new, self._rank, loads),
                experts=new.of_rank(self._rank),
                layers=changed_layers(old, new),
                step_s=step_s,
                facts=_facts(last, old, new, loads, measured, step_s),
            )

    def _gather(self, slot_tokens: torch.Tensor) -> torch.Tensor:
        """``[L, P]`` of all ranks from ``[L, S]`` of each."""
        parts = [torch.empty_like(slot_tokens) for _ in self._nodes]
        dist.all_gather(parts, slot_tokens, group=self._group)
        return torch.cat(parts, dim=1)

    def _agree_on_target(
        self, old: Placement, loads: torch.Tensor, measured: torch.Tensor
    ) -> Placement:
        """Rank 0 decides; when it cannot, it still sends what the others wait for."""
        target, problem = old, None
        if self._rank == 0:
            try:
                with _giving_way():
                    target = self._target(old, loads, measured)
            except Exception as error:
                problem = error
        table = target.physical_to_logical.clone()  # received in place
        dist.broadcast(table, group=self._group, group_src=0)
        if problem is not None:
            raise problem
        return Placement(table, old.num_experts, old.num_ranks)

    def _target(self, old: Placement, loads: torch.Tensor, measured: torch.Tensor) -> Placement:
        utilization = float(balancedness(rank_loads(measured, old.num_ranks)).mean())
        if not loads.any() or utilization > self._min_utilization:
            return old
        target = self._rebalance(loads, old)
        if target.physical_to_logical.shape != old.physical_to_logical.shape:
            raise ValueError(
                f"a placement of {list(target.physical_to_logical.shape)} was computed for one of"
                f" {list(old.physical_to_logical.shape)}"
            )
        return target

    def _carry(self, decision: Decision, layer: int) -> dict[int, object]:
        old, new = (p.physical_to_logical[layer].tolist() for p in (decision.old, decision.new))
        slots_per_rank = decision.old.num_slots_per_rank
        rounds = split_rounds(
            plan_moves(old, new, self._nodes),
            slots_per_rank=slots_per_rank,
            max_per_rank=self._max_per_round,
        )
        turns = self._turns

        def wait_turn() -> None:
            turns.acquire()
            self._moved_s = time.monotonic()

        return self._carrier.carry(layer, rounds, slots_per_rank, wait_turn)


@contextmanager
def _giving_way() -> Iterator[None]:
    """Python computes in this thread, and the loop's thread wants the interpreter after every
    operation of a step: let it have it in less than the usual 5 ms."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)


def _facts(
    last: Decision | None,
    old: Placement,
    new: Placement,
    loads: torch.Tensor,
    measured: torch.Tensor,
    step_s: float | None,
) -> dict[str, Any]:
    """last: the re-placement that this window follows and measures, if it does.

    What a placement saves is told by what two placements make of the same loads, both with replicas
    that share evenly; what ranks measured is told as it is.
    """
    if_kept, if_changed = (expected_rank_loads(loads, placement) for placement in (old, new))
    found = tuple(balancedness(rank_loads(measured, old.num_ranks)).tolist())
    facts: dict[str, Any] = {
        "balancedness": found,
        "balancedness_expected": tuple(balancedness(if_changed).tolist()),
        "saved_estimated": _saved(if_kept, if_changed),
    }
    if last is not None:
        facts |= {
            "balancedness_before": last.facts["balancedness"],
            "balancedness_after": found,
            "saved_measured": _saved(expected_rank_loads(loads, last.old), if_kept),
            "step_s_before": last.step_s,
            "step_s_after": step_s,
        }
    return facts


def _saved(before: torch.Tensor, after: torch.Tensor) -> float | None:
    """Share of the slowest ranks' tokens ``[L, R]`` that fall away."""
    most = work_of_slowest(before)
    return None if most == 0 else 1 - work_of_slowest(after) / most
