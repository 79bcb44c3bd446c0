"""Replays against cases worked by hand, and against a policy that cheats."""

import pytest
import torch

from eplb.cost import CostModel
from eplb.moves import count_moves
from eplb.placement import Placement
from eplb.rebalance import rebalance
from eplb.replay import BALANCED, GREEDY, NONE, ORACLE, OURS, Cluster, PolicyReplay, replay
from eplb.verdict import judge
from tests.eplb.placements import random_placement


def stays(loads: torch.Tensor, current: Placement) -> Placement:
    return current


def anew(loads: torch.Tensor, current: Placement) -> Placement:
    return rebalance(loads, num_slots=current.num_slots, num_ranks=current.num_ranks)


def by_name(policies: list[PolicyReplay]) -> dict[str, PolicyReplay]:
    return {policy.name: policy for policy in policies}


def test_by_hand():
    """Two ranks, four experts, no spare slot: 0 and 1 are hot, then 0 and 2."""
    early, late = [[6.0, 6.0, 1.0, 1.0]], [[6.0, 1.0, 6.0, 1.0]]
    windows = torch.tensor([early, early, late, late])
    found = by_name(replay(windows, Cluster(2, num_nodes=2), anew, CostModel(num_nodes=2)))
    # In order, [0 1 | 2 3] meets early loads with 12 and 2, late ones with 7 and 7.
    assert found[NONE].tokens.tolist() == [[[12, 2]], [[7, 7]], [[7, 7]]]
    assert found[NONE].moves.tolist() == [0, 0, 0]
    # What early loads teach puts 0 and 1 apart; whether 2 is with 0 is a tie. Then 0 and 2 part.
    for name in (GREEDY, OURS):
        assert found[name].tokens.sort(2).values[0].tolist() == [[7, 7]]
        assert found[name].tokens.sort(2).values[2].tolist() == [[7, 7]]
        together = found[name].tokens[1].max() == 12
        assert found[name].moves[0] == 2  # one each way, whichever they are
        assert found[name].moves[2] in (2, 4) if together else found[name].moves[2] in (0, 2, 4)
        assert torch.equal(found[name].moves, found[name].moves_between_nodes)
    # One expert per token: half of all tokens start on the other node, and each comes by itself.
    assert found[NONE].crossings.tolist() == [[3.5], [3.5], [3.5]]
    assert found[OURS].crossings_saved(found[NONE]) == 0
    assert found[ORACLE].balancedness.tolist() == [[1], [1], [1]]
    assert found[ORACLE].saved(found[NONE]) == 1 - 21 / 26


def test_a_window_is_never_judged_by_what_it_taught():
    windows = torch.rand(5, 3, 12, generator=torch.Generator().manual_seed(0)).double()
    taught = []

    def learns(loads: torch.Tensor, current: Placement) -> Placement:
        taught.append(loads)
        return anew(loads, current)

    policies = by_name(replay(windows, Cluster(4, 4), learns, CostModel()))
    assert torch.equal(torch.stack(taught), windows[:-1])
    changed = windows.clone()
    changed[-1] = changed[-1].flip(1)
    again = by_name(replay(changed, Cluster(4, 4), anew, CostModel()))
    for name in (NONE, GREEDY, OURS, BALANCED):
        assert torch.equal(policies[name].moves, again[name].moves)
        assert torch.equal(policies[name].tokens[:-1], again[name].tokens[:-1])
        assert not torch.equal(policies[name].tokens[-1], again[name].tokens[-1])


def test_all_tokens_are_somewhere_and_no_policy_beats_the_mean():
    windows = torch.rand(4, 2, 10, generator=torch.Generator().manual_seed(1)).double() ** 3
    for policy in replay(windows, Cluster(5, 5), anew, CostModel()):
        torch.testing.assert_close(policy.tokens.sum(2), windows[1:].sum(2))
        assert (policy.balancedness <= 1 + 1e-9).all()
        assert policy.num_slots == (10 if policy.name == NONE else 15)


def test_balanced_dispatch_is_never_heavier_where_loads_stay():
    window = torch.rand(1, 6, 12, generator=torch.Generator().manual_seed(2)).double() ** 4
    found = by_name(replay(window.repeat(3, 1, 1), Cluster(4, 4), anew, CostModel()))
    assert found[BALANCED].work <= found[OURS].work * (1 + 1e-6)
    assert found[OURS].work <= found[GREEDY].work * (1 + 1e-6)


def test_moves_are_those_that_placements_count():
    placements = [random_placement(seed, num_experts=13) for seed in range(3)]
    windows = torch.ones(4, 2, 13)
    given = iter(placements)
    found = by_name(
        replay(windows, Cluster(4, 3), lambda loads, current: next(given), CostModel())
    )[OURS]
    start = Placement.trivial(num_layers=2, num_experts=13, num_ranks=4, num_redundant=3)
    steps = zip([start, *placements], placements, strict=False)
    counted = [int(count_moves(before, after).between_ranks.sum()) for before, after in steps]
    assert found.moves.tolist() == counted


def test_experts_that_do_not_divide_need_their_redundant_slots_without_eplb():
    found = by_name(replay(torch.ones(2, 1, 6), Cluster(4, 2), stays, CostModel()))
    assert found[NONE].num_slots == 8


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="windows"):
        replay(torch.ones(1, 2, 8), Cluster(4), stays, CostModel())
    with pytest.raises(ValueError, match="num_redundant: 1 given"):
        replay(torch.ones(2, 2, 8), Cluster(4, 1), stays, CostModel())


@pytest.mark.parametrize(
    ("windows", "num_redundant", "helps", "reason"),
    [
        ([[8, 8, 1, 1]] * 3, 0, True, "44% fewer expert tokens: balancedness 1.00 instead of 0.56"),
        ([[5, 5, 5, 5]] * 3, 0, False, "balanced as they are"),
        ([[97, 1, 1, 1]] * 3, 0, False, "0 redundant experts leave no room"),
        ([[8, 8, 1, 1], [8, 1, 1, 8], [8, 8, 1, 1]], 0, False, "loads change too much"),
        ([[0, 0, 0, 0]] * 3, 0, False, "no tokens were recorded"),
    ],
)
def test_the_verdict(windows, num_redundant: int, helps: bool, reason: str):
    loads = torch.tensor(windows).double().unsqueeze(1)

    def best_pairs(before: torch.Tensor, current: Placement) -> Placement:
        """The heaviest and the lightest on one rank."""
        order = before[0].argsort(stable=True, descending=True)
        return Placement(order[[0, 3, 1, 2]].unsqueeze(0), 4, 2)

    verdict = judge(
        replay(loads, Cluster(2, num_redundant), best_pairs, CostModel()), num_redundant
    )
    assert (verdict.helps, reason in str(verdict)) == (helps, True), str(verdict)
    assert ("--enable-eplb" in verdict.flags) == helps
