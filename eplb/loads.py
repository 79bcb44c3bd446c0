"""How many tokens each expert got: from counts of slots to loads of experts, ranks and windows.

A rank only knows what its own slots have processed, as counts that grow from the start of the
engine (real tokens only; padding goes to no slot). Everything here works on differences of those,
so nothing is ever reset on the device, and several observers can count from different starts.

Shape letters: W windows, L MoE layers, E logical experts, R ranks, S slots per rank, P = R * S.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eplb.placement import Placement


def logical_loads(slot_tokens: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Tokens of each expert, int64 ``[L, E]``, from the tokens of all slots ``[L, P]``."""
    return _by_expert(slot_tokens, placement.physical_to_logical, placement.num_experts)


def rank_loads(slot_tokens: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Tokens of each rank, ``[L, R]``, from the tokens of all slots ``[L, P]``."""
    return slot_tokens.unflatten(1, (num_ranks, -1)).sum(-1)


def expected_slot_loads(loads: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Tokens of each slot, float64 ``[L, P]``, if an expert's replicas share its load ``[L, E]``
    evenly."""
    shares = loads.double() / placement.replica_counts
    return shares.gather(1, placement.physical_to_logical)


def expected_rank_loads(loads: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Tokens of each rank, float64 ``[L, R]``, if an expert's replicas share its load ``[L, E]``
    evenly."""
    return rank_loads(expected_slot_loads(loads, placement), placement.num_ranks)


def balancedness(ranks: torch.Tensor) -> torch.Tensor:
    """Mean over maximum of the rank loads ``[L, R]``, float64 ``[L]``; 1 where there is no load.

    It is the share of the slowest rank's time in which an average rank computes.
    """
    most = ranks.amax(1).double()
    return torch.where(most > 0, ranks.double().mean(1) / most.clamp(min=1e-300), 1.0)


def work_of_slowest(ranks: torch.Tensor) -> float:
    """Tokens that the slowest rank of each layer processes, over all layers of ``[L, R]``: what
    all ranks wait for."""
    return float(ranks.amax(1).double().sum())


@dataclass(frozen=True)
class SlotRecords:
    """What one rank recorded: plain data, to be merged with what its peers did.

    steps: rising step numbers. counts: int32 ``[W, L, S]``, tokens of each of the rank's slots in
    that step. experts: int32 ``[W, L, S]``, the expert that the slot held then.
    """

    rank: int
    steps: list[int]
    counts: torch.Tensor
    experts: torch.Tensor


class LoadRecorder:
    """Keeps the last ``num_steps`` steps of this rank while it records.

    ``start`` and ``stop`` are for any thread, and take effect at the next step; ``record`` is for
    the loop. Ranks may start and stop at different steps: ``merge_records`` takes those that all
    have.
    """

    def __init__(self, rank: int, num_steps: int) -> None:
        if num_steps < 1:
            raise ValueError(f"num_steps: {num_steps} given, must be at least 1")
        self.is_recording = False
        self._rank = rank
        self._kept: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque(maxlen=num_steps)
        self._last: torch.Tensor | None = None
        self._step = 0  # that runs, or will, after the last call of ``record``

    def start(self) -> None:
        """Forget what was recorded and record from the next step on."""
        self._kept.clear()
        self.is_recording = True

    def stop(self) -> None:
        self.is_recording = False

    def record(self, step: int, slot_tokens: torch.Tensor, experts: torch.Tensor) -> None:
        """Call before every ``step`` while ``wants_counts``; twice for one step does no harm.

        slot_tokens: int64 ``[L, S]`` on the CPU, counts since the start of the engine. experts:
        int64 ``[L, S]``, what the slots held in the step before this one.
        """
        if self._last is not None and step > self._step:
            counts = (slot_tokens - self._last).int()
            self._kept.append((self._step, counts, experts.int()))
        self._last = slot_tokens if self.is_recording else None
        self._step = step

    @property
    def wants_counts(self) -> bool:
        """Whether ``record`` has something to do before the next step."""
        return self.is_recording or self._last is not None

    def records(self) -> SlotRecords:
        kept = list(self._kept)
        if not kept:
            return SlotRecords(self._rank, [], torch.empty(0), torch.empty(0))
        steps, counts, experts = zip(*kept, strict=True)
        return SlotRecords(self._rank, list(steps), torch.stack(counts), torch.stack(experts))


def common_steps(records: Sequence[SlotRecords]) -> set[int]:
    """The steps that every rank recorded. Raises ValueError when there is none."""
    common = set.intersection(*(set(record.steps) for record in records))
    if not common:
        spans = [f"rank {r.rank}: {_span(r.steps)}" for r in records]
        raise ValueError(f"no step was recorded by all ranks ({'; '.join(spans)})")
    return common


def merge_records(records: Sequence[SlotRecords], num_experts: int) -> torch.Tensor:
    """Loads of all ranks, int64 ``[W, L, E]``, of their ``common_steps``."""
    common, counts, experts = common_steps(records), [], []
    for record in records:
        rows = [row for row, step in enumerate(record.steps) if step in common]
        counts.append(record.counts[rows])
        experts.append(record.experts[rows])
    return _by_expert(torch.cat(counts, dim=-1), torch.cat(experts, dim=-1), num_experts)


def last_placement(records: Sequence[SlotRecords], num_experts: int) -> Placement:
    """Where experts were in the last of the ranks' ``common_steps``."""
    last = max(common_steps(records))
    held = [record.experts[record.steps.index(last)] for record in records]  # [L, S] of each rank
    return Placement(torch.cat(held, dim=1).long(), num_experts, len(records))


def _span(steps: list[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if steps else "none"


def _by_expert(counts: torch.Tensor, experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Sum the last dimension by the expert that each entry belongs to."""
    loads = torch.zeros(*counts.shape[:-1], num_experts, dtype=torch.int64)
    return loads.scatter_add_(-1, experts.long(), counts.long())
