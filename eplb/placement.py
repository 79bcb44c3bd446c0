"""A placement: which logical expert each physical slot holds, per layer.

Plain data, checked once when made. Slot p lives on rank ``p // S``. An expert may have replicas on
several ranks, never two on one rank (they would share the same device and halve nothing).

Shape letters: L MoE layers, E logical experts, R ranks, S slots per rank, P = R * S slots.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True, eq=False)
class Placement:
    """physical_to_logical: int64 ``[L, P]``, every value in 0 to E - 1.

    Raises ValueError when an expert has no slot in some layer, when two replicas of an expert
    share a rank, or when sizes do not fit. The tensors must not be modified.
    """

    physical_to_logical: torch.Tensor
    num_experts: int
    num_ranks: int

    def __post_init__(self) -> None:
        _check_shape(self.physical_to_logical, self.num_experts, self.num_ranks)
        _check_every_expert_placed(self.replica_counts)
        _check_replicas_apart(self.physical_to_logical.unflatten(1, (self.num_ranks, -1)))

    @classmethod
    def trivial(
        cls, *, num_layers: int, num_experts: int, num_ranks: int, num_redundant: int = 0
    ) -> "Placement":
        """Experts in order over the ranks; redundant slots hold experts 0, 1, … once more.

        The same in all layers. Raises ValueError when the slots do not divide over the ranks.
        """
        num_slots = num_experts + num_redundant
        if num_slots % num_ranks:
            missing = -num_slots % num_ranks
            raise ValueError(
                f"num_redundant: {num_redundant} given; {num_experts} experts and {num_redundant} "
                f"redundant ones do not divide over {num_ranks} ranks, "
                f"{num_redundant + missing} would"
            )
        slots = torch.arange(num_slots) % num_experts
        return cls(slots.repeat(num_layers, 1), num_experts, num_ranks)

    @property
    def num_layers(self) -> int:
        return self.physical_to_logical.shape[0]

    @property
    def num_slots(self) -> int:
        return self.physical_to_logical.shape[1]

    @property
    def num_slots_per_rank(self) -> int:
        return self.num_slots // self.num_ranks

    @cached_property
    def replica_counts(self) -> torch.Tensor:
        """int64 ``[L, E]``: slots of each expert."""
        counts = torch.zeros(self.num_layers, self.num_experts, dtype=torch.int64)
        return counts.scatter_add_(
            1, self.physical_to_logical, torch.ones_like(self.physical_to_logical)
        )

    @cached_property
    def logical_to_physical(self) -> torch.Tensor:
        """int64 ``[L, E, max replicas]``: each expert's slots in rising order, then -1."""
        # 1. Sort slots by expert, stably: [L, P] runs of one expert each, slots rising in a run.
        by_expert, slots = self.physical_to_logical.sort(dim=1, stable=True)
        # 2. A slot's replica number is its distance from the start of its run.
        run_starts = self.replica_counts.cumsum(1) - self.replica_counts
        replica = torch.arange(self.num_slots) - run_starts.gather(1, by_expert)
        # 3. Scatter to [L, E * max replicas].
        width = int(self.replica_counts.max())
        table = torch.full((self.num_layers, self.num_experts * width), -1)
        return table.scatter_(1, by_expert * width + replica, slots).unflatten(1, (-1, width))

    def slot_table(self, rank: int) -> torch.Tensor:
        """int64 ``[L, E]``: the slot to which ``rank`` sends tokens of each expert.

        Its own replica if it holds one, else replica number ``rank % count``, so that the ranks
        share the replicas evenly.
        """
        chosen = (rank % self.replica_counts).unsqueeze(-1)  # [L, E, 1]
        table = self.logical_to_physical.gather(2, chosen).squeeze(-1)
        first = rank * self.num_slots_per_rank
        own_slots = torch.arange(first, first + self.num_slots_per_rank)
        own_experts = self.of_rank(rank)
        return table.scatter_(1, own_experts, own_slots.expand_as(own_experts))

    def of_rank(self, rank: int) -> torch.Tensor:
        """int64 ``[L, S]``: the logical expert in each of the rank's slots."""
        return self.physical_to_logical.unflatten(1, (self.num_ranks, -1))[:, rank]

    def local_experts(self, layer: int, rank: int) -> list[int]:
        """The logical expert in each of the rank's slots, in slot order."""
        return self.of_rank(rank)[layer].tolist()


def _check_shape(table: torch.Tensor, num_experts: int, num_ranks: int) -> None:
    if table.dtype != torch.int64 or table.dim() != 2 or not table.numel():
        raise ValueError(
            f"physical_to_logical: {table.dtype} {list(table.shape)} given, "
            "non-empty int64 [layers, slots] needed"
        )
    if num_ranks < 1 or table.shape[1] % num_ranks:
        raise ValueError(f"num_ranks: {num_ranks} given, must divide the {table.shape[1]} slots")
    low, high = int(table.min()), int(table.max())
    if low < 0 or high >= num_experts:
        raise ValueError(
            f"physical_to_logical: experts {low} to {high} given, 0 to {num_experts - 1} allowed"
        )


def _check_every_expert_placed(counts: torch.Tensor) -> None:
    missing = (counts == 0).nonzero()
    if len(missing):
        layer, expert = missing[0].tolist()
        raise ValueError(
            f"physical_to_logical: expert {expert} of layer {layer} has no slot "
            f"({len(missing)} such in all)"
        )


def _check_replicas_apart(by_rank: torch.Tensor) -> None:
    by_expert = by_rank.sort(dim=-1).values  # [L, R, S]
    twice = (by_expert[..., 1:] == by_expert[..., :-1]).nonzero()
    if len(twice):
        layer, rank, place = twice[0].tolist()
        raise ValueError(
            f"physical_to_logical: two replicas of expert {int(by_expert[layer, rank, place])} "
            f"on rank {rank} in layer {layer} ({len(twice)} such in all)"
        )


# Loads [L, E] and the placement in force -> the placement to have.
Rebalance = Callable[[torch.Tensor, Placement], Placement]
