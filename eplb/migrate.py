"""Moving experts between ranks: what must go where, and carrying it, without stopping the steps.

The unit is one layer: all experts that are new on some rank are staged beside the slots in use, and
nothing in use is touched here. So a slot may be source and target at once, and whoever switches
later may as well not switch.

The hard part is that two ranks must never wait for each other's message in vain. Every rank derives
the same rounds from the same placements and takes part in all of them in order; a rank that cannot
read or keep an expert still sends and receives the bytes, remembers why, and says so at the end.
Only a broken connection ends a transfer early, and then on both sides.

Messages go through host memory and a group of CPU tensors: on a GPU nothing of a step is held up by
them, neither its stream nor the kernels of its exchanges, which wait for all their SMs.

Shape letters: R ranks, S slots per rank, P = R * S.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from eplb.placement import Placement

_ALIGNMENT = 16  # of each tensor within a message; the largest element size is below it


class Move(NamedTuple):
    """Copy what slot ``source`` holds to slot ``target``; physical slots of one layer."""

    source: int
    target: int


class SlotAccess(Protocol):
    """Reads and stages experts of this rank; slots counted from 0 on the rank. Neither method may
    wait for a step or change what a step reads: both are called beside running steps."""

    def export(self, layer: int, slot: int) -> list[torch.Tensor]:
        """What the slot holds: tensors of the same shapes and types for every layer and slot."""

    def stage(self, layer: int, tensors: list[torch.Tensor]) -> object:
        """Make an exported expert ready to be installed quickly. The tensors may be kept."""


class StagingError(RuntimeError):
    """This rank could not read or stage an expert; its connections are as good as before."""


def keep_slots(old: Placement, new: Placement) -> Placement:
    """``new`` with each rank's slots reordered, so that an expert that stays keeps its slot.

    Which of a rank's slots holds an expert makes no difference to its load.
    """
    # 1. By rank, [L, R, S]: which new experts were there, which old ones stay.
    split = (old.num_ranks, old.num_slots_per_rank)
    was = old.physical_to_logical.unflatten(1, split)
    will = new.physical_to_logical.unflatten(1, split)
    same = will.unsqueeze(-1) == was.unsqueeze(-2)  # [L, R, S new, S old]
    # 2. As many are new on a rank as leave it, so both masks run through the ranks in step.
    kept = was.clone()
    kept[~same.any(-2)] = will[~same.any(-1)]
    return Placement(kept.flatten(1), new.num_experts, new.num_ranks)


def changed_layers(old: Placement, new: Placement) -> list[int]:
    changed = (old.physical_to_logical != new.physical_to_logical).any(1)
    return changed.nonzero().flatten().tolist()


def plan_moves(old: list[int], new: list[int], nodes: Sequence[int]) -> list[Move]:
    """The moves that turn a layer's row ``[P]`` of one placement into another's; the same on every
    rank.

    nodes: the node of each rank. The source of an expert is a replica on the same rank, else on the
    same node, else any; among equals the one whose rank has least to send so far.
    """
    slots_per_rank = len(old) // len(nodes)
    holders: dict[int, list[int]] = {}
    for slot, expert in enumerate(old):
        holders.setdefault(expert, []).append(slot)
    num_sent = [0] * len(nodes)
    moves = []
    for target, (before, expert) in enumerate(zip(old, new, strict=True)):
        if before == expert:
            continue
        home = target // slots_per_rank

        def cost(slot: int, home: int = home) -> tuple[bool, bool, int, int]:
            rank = slot // slots_per_rank
            return rank != home, nodes[rank] != nodes[home], num_sent[rank], slot

        source = min(holders[expert], key=cost)
        num_sent[source // slots_per_rank] += source // slots_per_rank != home
        moves.append(Move(source, target))
    return moves


def split_rounds(
    moves: Iterable[Move], *, slots_per_rank: int, max_per_rank: int
) -> list[list[Move]]:
    """Rounds in which no rank sends and receives more than ``max_per_rank`` experts together."""
    rounds: list[list[Move]] = []
    used: list[dict[int, int]] = []
    for move in moves:
        ranks = {slot // slots_per_rank for slot in move}
        free = (i for i, at in enumerate(used) if all(at.get(r, 0) < max_per_rank for r in ranks))
        index = next(free, len(rounds))
        if index == len(rounds):
            rounds.append([])
            used.append({})
        rounds[index].append(move)
        for rank in ranks:
            used[index][rank] = used[index].get(rank, 0) + 1
    return rounds


class SlotLayout:
    """How an exported expert lies in one message of ``num_bytes``."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._starts, end = [], 0
        for tensor in tensors:
            self._starts.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = end

    def empty(self) -> torch.Tensor:
        """A message, uint8 ``[num_bytes]``: gloo knows neither FP8 nor strides."""
        return torch.empty(self.num_bytes, dtype=torch.uint8)

    def pack(self, tensors: list[torch.Tensor], message: torch.Tensor) -> None:
        """Copy the tensors into the message; ValueError when they are not of this layout."""
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if shapes != self._shapes:
            raise ValueError(
                f"exported tensors {shapes} are not like the first ones, {self._shapes}"
            )
        for part, tensor in zip(self.unpack(message), tensors, strict=True):
            part.copy_(tensor)

    def unpack(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Views of the message."""
        return [
            message[start : start + dtype.itemsize * shape.numel()].view(dtype).view(shape)
            for start, (shape, dtype) in zip(self._starts, self._shapes, strict=True)
        ]


class Carrier:
    """This rank's end of all transfers; one at a time, the same ones in the same order everywhere.

    group: CPU tensors over all ranks, used by nothing else meanwhile; its time limit bounds every
    wait. Not thread-safe.
    """

    def __init__(
        self, *, access: SlotAccess, layout: SlotLayout, group: dist.ProcessGroup, rank: int
    ) -> None:
        self.bytes_received = 0
        self._access = access
        self._layout = layout
        self._group = group
        self._rank = rank

    def carry(
        self,
        layer: int,
        rounds: list[list[Move]],
        slots_per_rank: int,
        wait_turn: Callable[[], None],
    ) -> dict[int, object]:
        """Stage what this rank receives: what ``SlotAccess.stage`` made, by slot of this rank.

        wait_turn: called before every round; returns when the round may start. Collective. Raises
        StagingError after the last round, RuntimeError when a connection broke.
        """
        staged: dict[int, object] = {}
        problems: list[Exception] = []
        for moves in rounds:
            wait_turn()
            received = self._exchange(layer, moves, slots_per_rank, problems)
            for slot, message in received.items():
                try:
                    staged[slot] = self._access.stage(layer, self._layout.unpack(message))
                except Exception as error:
                    problems.append(error)
        if problems:
            raise StagingError(f"rank {self._rank}, layer {layer}: {problems[0]}") from problems[0]
        return staged

    def _exchange(
        self, layer: int, moves: list[Move], slots_per_rank: int, problems: list[Exception]
    ) -> dict[int, torch.Tensor]:
        """One round: the messages for this rank, by slot."""
        works: list[dist.Work | None] = []
        received = {}
        for tag, move in enumerate(moves):
            (source, slot), (target, new_slot) = (divmod(s, slots_per_rank) for s in move)
            if self._rank not in (source, target):
                continue
            message = self._layout.empty()
            if source == self._rank:
                self._fill(message, layer, slot, problems)
            if target == self._rank:
                received[new_slot] = message
            if source != target:
                works.append(self._start(message, source, target, tag))
                self.bytes_received += message.nbytes * (target == self._rank)
        for work in works:
            assert work is not None, f"rank {self._rank} is not in the group"
            work.wait()
        return received

    def _start(self, message: torch.Tensor, source: int, target: int, tag: int) -> dist.Work | None:
        if source == self._rank:
            return dist.isend(message, group=self._group, group_dst=target, tag=tag)
        return dist.irecv(message, group=self._group, group_src=source, tag=tag)

    def _fill(
        self, message: torch.Tensor, layer: int, slot: int, problems: list[Exception]
    ) -> None:
        """Whatever goes wrong, the message will be sent: somebody waits for it."""
        try:
            self._layout.pack(self._access.export(layer, slot), message)
        except Exception as error:
            problems.append(error)
