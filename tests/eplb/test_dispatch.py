"""Tables that routers read: who gets how many tokens, and that they are the same on all ranks."""

import pytest
import torch

from eplb.dispatch import NUM_WAYS, balanced_table, split_table, static_table
from eplb.loads import balancedness, rank_loads
from eplb.placement import Placement
from eplb.rebalance import rebalance
from eplb.shares import balanced_shares, even_shares
from tests.eplb.placements import random_placement


def ways_of_slots(table: torch.Tensor, num_slots: int) -> torch.Tensor:
    """``[L, P]``: how many of its expert's ways lead to each slot."""
    flat = table.flatten(1)
    counts = torch.zeros(len(table), num_slots, dtype=torch.int64)
    return counts.scatter_add_(1, flat, torch.ones_like(flat))


def test_static_is_the_slot_table():
    placement = random_placement(0)
    table = static_table(placement, 2, torch.rand(2, 10))
    assert torch.equal(table, placement.slot_table(2).unsqueeze(-1))


def test_by_hand():
    """Expert 0 on two ranks, 3 to 1: of any four tokens in a row the second rank gets one."""
    placement = Placement(torch.tensor([[0, 1, 0, 2]]), 3, 2)
    shares = torch.tensor([[0.75, 1.0, 0.25, 1.0]])
    for rank in range(2):
        table = split_table(placement, rank, shares)
        assert table.shape == (1, 3, NUM_WAYS)
        assert (table[0, 1] == 1).all()
        assert (table[0, 2] == 3).all()
        fours = torch.cat([table[0, 0], table[0, 0]]).unfold(0, 4, 1)
        assert ((fours == 2).sum(1) == 1).all()
        assert ((fours == 0).sum(1) == 3).all()


@pytest.mark.parametrize("seed", range(4))
def test_every_rank_splits_by_the_shares_and_to_the_experts_own_slots(seed: int):
    placement = random_placement(seed, num_layers=3, num_ranks=5, num_experts=11)
    loads = torch.rand(3, 11, generator=torch.Generator().manual_seed(seed)) ** 4
    shares = balanced_shares(placement, loads)
    tables = [balanced_table(placement, rank, loads) for rank in range(5)]
    experts = placement.physical_to_logical.unsqueeze(1).expand(-1, 11, -1).gather(2, tables[0])
    assert torch.equal(experts, torch.arange(11)[:, None].expand(3, -1, NUM_WAYS))
    split = ways_of_slots(tables[0], placement.num_slots)
    assert ((split - shares * NUM_WAYS).abs() < 1).all()
    for table in tables[1:]:
        assert torch.equal(ways_of_slots(table, placement.num_slots), split)
    assert not torch.equal(tables[0], tables[1])  # few tokens a rank do not all start alike


def test_without_loads_replicas_share_evenly():
    placement = random_placement(1)
    split = ways_of_slots(balanced_table(placement, 0, None), placement.num_slots)
    assert ((split - even_shares(placement) * NUM_WAYS).abs() < 1).all()


def test_real_tokens_end_up_as_even_as_the_shares_promise():
    """Zipf's loads on 16 ranks that bring 96 tokens each: counted, not computed."""
    generator = torch.Generator().manual_seed(0)
    popularity = torch.arange(1, 65).double().pow(-1.0)[torch.randperm(64, generator=generator)]
    loads = popularity.unsqueeze(0)
    placement = rebalance(loads, num_slots=80, num_ranks=16)
    shuffled = random_placement(3, num_layers=1, num_ranks=16, num_experts=64, slots_per_rank=5)
    for where in (placement, shuffled):
        counts = {name: torch.zeros(1, 80, dtype=torch.int64) for name in ("static", "balanced")}
        for rank in range(16):
            chosen = torch.multinomial(popularity, 96 * 6, replacement=True, generator=generator)
            way = torch.arange(96).repeat_interleave(6) % NUM_WAYS
            for name, make in (("static", static_table), ("balanced", balanced_table)):
                table = make(where, rank, loads)[0]
                slots = table[chosen, way % table.shape[1]].unsqueeze(0)
                counts[name].scatter_add_(1, slots, torch.ones_like(slots))
        static, balanced = (float(balancedness(rank_loads(c, 16))) for c in counts.values())
        assert balanced > static + 0.02
        shares = balanced_shares(where, loads)
        exact = loads.gather(1, where.physical_to_logical) * shares
        assert abs(balanced - float(balancedness(rank_loads(exact, 16)))) < 0.1
