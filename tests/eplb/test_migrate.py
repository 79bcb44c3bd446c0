"""Plans of moves against their definition, and transfers between real ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.migrate import (
    Carrier,
    Move,
    SlotLayout,
    StagingError,
    changed_layers,
    keep_slots,
    plan_moves,
    split_rounds,
)
from eplb.placement import Placement
from tests.eplb.placements import random_placement
from tests.ranks import RankInfo

NODES = (0, 0, 1, 1)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_moves_lead_from_one_placement_to_the_other(first: int, second: int):
    old, target = random_placement(first), random_placement(second)
    new = keep_slots(old, target)
    by_rank = (2, 4, 4)
    assert torch.equal(
        new.physical_to_logical.view(by_rank).sort(-1).values,
        target.physical_to_logical.view(by_rank).sort(-1).values,
    ), "the same experts on every rank"
    assert changed_layers(old, old) == []
    for layer in range(2):
        before = old.physical_to_logical[layer].tolist()
        after = new.physical_to_logical[layer].tolist()
        moves = plan_moves(before, after, NODES)
        assert (layer in changed_layers(old, new)) == bool(moves)
        moved = list(before)
        for source, at in moves:
            assert source // 4 != at // 4, "what stays on its rank keeps its slot"
            moved[at] = before[source]
            near = {NODES[s // 4] for s, expert in enumerate(before) if expert == before[source]}
            assert NODES[source // 4] == NODES[at // 4] or NODES[at // 4] not in near
        assert moved == after
        check_rounds(moves)


def check_rounds(moves: list[Move]) -> None:
    for limit in (1, 2, 99):
        rounds = split_rounds(moves, slots_per_rank=4, max_per_rank=limit)
        assert sorted(move for part in rounds for move in part) == sorted(moves)
        for part in rounds:
            for rank in range(4):
                assert sum(rank in (m.source // 4, m.target // 4) for m in part) <= limit


def test_sources_by_hand():
    # Two slots on each of four ranks, two ranks on each node.
    old = [0, 1, 2, 3, 4, 0, 5, 6]
    # Expert 0 to rank 3: rank 2 has it on the same node. To rank 1: rank 0. Expert 1: only rank 0.
    new = [0, 1, 0, 3, 4, 1, 0, 6]
    assert plan_moves(old, new, NODES) == [Move(0, 2), Move(1, 5), Move(5, 6)]
    # Wanted on rank 3 twice by different experts: among equals, the rank that has sent less.
    old = [0, 1, 0, 1, 2, 3, 4, 5]
    new = [0, 1, 0, 1, 2, 0, 4, 1]
    assert plan_moves(old, new, NODES) == [Move(0, 5), Move(3, 7)]
    # On the rank itself: no message.
    assert plan_moves([0, 1, 2, 3], [1, 0, 2, 3], (0, 0)) == [Move(1, 0), Move(0, 1)]


def test_messages_keep_bits_and_strides():
    tensors = [
        torch.arange(15, dtype=torch.uint8).view(3, 5).view(torch.float8_e4m3fn),
        torch.randn(4, 6, dtype=torch.bfloat16).t(),
        torch.tensor([[torch.nan, -0.0]]),
    ]
    layout = SlotLayout(tensors)
    layout.pack(tensors, message := layout.empty().fill_(0xFF))
    for found, given_ in zip(layout.unpack(message), tensors, strict=True):
        assert found.dtype == given_.dtype
        assert torch.equal(
            found.contiguous().view(torch.uint8), given_.contiguous().view(torch.uint8)
        )
    with pytest.raises(ValueError, match="not like the first ones"):
        layout.pack(tensors[:2], message)


class FakeSlots:
    """Slot s of rank r holds the number of its expert, in two tensors."""

    def __init__(self, row: list[int], rank: int, fails_at: tuple[str, int] | None = None) -> None:
        self.held = row[4 * rank : 4 * rank + 4]
        self.fails_at = fails_at

    def export(self, layer: int, slot: int) -> list[torch.Tensor]:
        if self.fails_at == ("export", layer):
            raise MemoryError("no room to export")
        return [torch.full((3,), float(self.held[slot])), torch.tensor([layer], dtype=torch.int32)]

    def stage(self, layer: int, tensors: list[torch.Tensor]) -> object:
        if self.fails_at == ("stage", layer):
            raise MemoryError("no room to stage")
        return int(tensors[0][0].nan_to_num())  # a rank that failed sends whatever is in memory


def carry_worker(info: RankInfo, old: Placement, new: Placement, fails: dict) -> list:
    rows = old.physical_to_logical.tolist(), new.physical_to_logical.tolist()
    outcomes = []
    slots = FakeSlots(rows[0][0], info.rank, fails.get(info.rank))
    layout = SlotLayout([torch.empty(3), torch.empty(1, dtype=torch.int32)])
    carrier = Carrier(access=slots, layout=layout, group=info.group, rank=info.rank)
    for layer, (before, after) in enumerate(zip(*rows, strict=True)):
        slots.held = before[4 * info.rank : 4 * info.rank + 4]
        rounds = split_rounds(plan_moves(before, after, NODES), slots_per_rank=4, max_per_rank=2)
        try:
            staged = carrier.carry(layer, rounds, 4, lambda: None)
        except StagingError as error:
            outcomes.append(str(error))
            continue
        held = slots.held
        assert held == before[4 * info.rank : 4 * info.rank + 4], "slots in use are not touched"
        outcomes.append([staged.get(slot, held[slot]) for slot in range(4)])
    return outcomes


def test_ranks_receive_what_the_plan_says(rank_pool):
    old, new = random_placement(1), random_placement(2)
    found = rank_pool.run(carry_worker, 4, old, new, {})
    for layer in range(2):
        held = [expert for rank in range(4) for expert in found[rank][layer]]
        assert held == new.physical_to_logical[layer].tolist()


@pytest.mark.parametrize("where", ["export", "stage"])
def test_a_rank_that_fails_keeps_nobody_waiting(rank_pool, where: str):
    """The layer fails on that rank alone, and the next one is carried as if nothing had been."""
    old, new = random_placement(1), random_placement(2)
    found = rank_pool.run(carry_worker, 4, old, new, {2: (where, 0)}, timeout_s=20)
    assert found[2][0] == f"rank 2, layer 0: no room to {where}"
    assert all(isinstance(found[rank][0], list) for rank in (0, 1, 3)), "the others go on"
    held = [expert for rank in range(4) for expert in found[rank][1]]
    assert held == new.physical_to_logical[1].tolist()
