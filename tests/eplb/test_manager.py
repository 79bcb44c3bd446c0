"""Managers of real ranks around a pretended engine whose tokens are counted as routed.

Before every step all ranks compare notes: no rank may ever route an expert to a slot that holds
another one.
"""

import threading
import time
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from eplb.manager import Manager, Settings
from eplb.migrate import plan_moves, split_rounds
from eplb.placement import Placement
from eplb.status import EplbStatus, Phase
from tests.eplb.placements import random_placement, reshuffled
from tests.ranks import RankInfo

NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS = 2, 10, 4
NODES = (0, 0, 1, 1)
POPULARITY = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 50], [60, 1, 1, 1, 1, 1, 1, 1, 1, 40]])


@dataclass
class FakeEngine:
    """Slots hold expert numbers. stage_s: how slow staging is. fails_at: the staging, counted from
    1, that raises."""

    held: torch.Tensor
    routes: torch.Tensor
    stage_s: float = 0.0
    fails_at: int | None = None
    counts: torch.Tensor = field(
        default_factory=lambda: torch.zeros(NUM_LAYERS, NUM_SLOTS, dtype=torch.int64)
    )
    num_staged: int = 0

    def export(self, layer: int, slot: int) -> list[torch.Tensor]:
        return [torch.tensor([layer, int(self.held[layer, slot])])]

    def stage(self, layer: int, tensors: list[torch.Tensor]) -> object:
        time.sleep(self.stage_s)
        self.num_staged += 1
        if self.num_staged == self.fails_at:
            raise MemoryError("no room")
        assert int(tensors[0][0]) == layer
        return int(tensors[0][1])

    def tokens(self) -> torch.Tensor:
        return self.counts.clone()

    def install(self, layer: int, staged: dict[int, object], *, experts, slot_table) -> None:
        for slot, expert in staged.items():
            self.held[layer, slot] = expert
        assert torch.equal(self.held[layer], experts)
        self.routes[layer] = slot_table


def rebalance(loads: torch.Tensor, placement: Placement) -> Placement:
    """Another one every time."""
    return reshuffled(placement)


def refuse(loads: torch.Tensor, placement: Placement) -> Placement:
    raise ArithmeticError("no placement found")


def gathered(info: RankInfo, own: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(own) for _ in range(info.num_ranks)]
    dist.all_gather(parts, own.contiguous(), group=info.group)
    return parts


def run_step(info: RankInfo, engine: FakeEngine) -> torch.Tensor:
    """All ranks route as many tokens as the experts are popular; the slots in force ``[L, P]``."""
    table = torch.cat(gathered(info, engine.held), dim=1)
    experts = torch.arange(NUM_EXPERTS).expand(NUM_LAYERS, -1)
    arrived = torch.zeros_like(table)
    for routes in gathered(info, engine.routes):
        assert torch.equal(table.gather(1, routes), experts), "routed to another expert's slot"
        arrived.scatter_add_(1, routes, POPULARITY)
    first = info.rank * NUM_SLOTS
    engine.counts += arrived[:, first : first + NUM_SLOTS]
    return table


@dataclass(frozen=True)
class Outcome:
    """tables: the placement before each step. status: after each step. threads: at the end."""

    tables: list[torch.Tensor]
    statuses: list[EplbStatus]
    num_threads: int


def manager_worker(
    info: RankInfo,
    num_steps: int,
    settings: Settings,
    algorithm,
    options: dict[int, dict],
    rest_after: int | None = None,
) -> Outcome:
    placement = random_placement(0)
    first = info.rank * NUM_SLOTS
    engine = FakeEngine(
        held=placement.physical_to_logical[:, first : first + NUM_SLOTS].clone(),
        routes=placement.slot_table(info.rank),
        **options.get(info.rank, {}),
    )
    manager = Manager(
        placement=placement,
        rank=info.rank,
        nodes=NODES,
        group=dist.new_group(backend="gloo"),
        slots=engine,
        rebalance=algorithm,
        make_table=lambda placement, rank, loads: placement.slot_table(rank),
        settings=settings,
    )
    tables, statuses = [], []
    for step in range(num_steps):
        vote = torch.tensor([manager.is_done, manager.has_failed])
        votes = torch.stack(gathered(info, vote))
        manager.advance(all_done=bool(votes[:, 0].all()), any_failed=bool(votes[:, 1].any()))
        tables.append(run_step(info, engine))
        statuses.append(manager.status())
        if step == rest_after:
            manager.rest()
            time.sleep(0.5)
        time.sleep(0.002)
    manager.close()
    names = [thread.name for thread in threading.enumerate()]
    return Outcome(tables, statuses, sum(name.startswith("eplb") for name in names))


def settings_with(**changes) -> Settings:
    given = {
        "num_iterations": 5,
        "min_utilization": 1.0,
        "bytes_per_step": 16,
        "alarm_after_s": 10.0,
    }
    return Settings(**given | changes)


def test_experts_move_while_tokens_flow_and_everyone_agrees(rank_pool):
    found = rank_pool.run(
        manager_worker, 4, 120, settings_with(), rebalance, {1: {"stage_s": 0.004}}
    )
    for outcome in found:
        assert all(map(torch.equal, outcome.tables, found[0].tables)), "one view of all slots"
        assert outcome.num_threads == 0, "the helper has ended"
    different = {str(table.tolist()) for table in found[0].tables}
    statuses = [outcome.statuses[-1] for outcome in found]
    assert len(different) > 4
    assert len({status.num_rebalances for status in statuses}) == 1
    assert statuses[0].num_rebalances >= 2
    assert sum(status.bytes_moved for status in statuses) % 16 == 0
    # Layers are switched one by one, each at once on all ranks.
    for before, after in zip(found[0].tables, found[0].tables[1:], strict=False):
        assert int((before != after).any(1).sum()) <= 1


def test_bytes_per_step_are_bounded(rank_pool):
    """A rank sends or receives one message per step, so a layer takes a step for each round."""
    outcome = rank_pool.run(manager_worker, 4, 60, settings_with(), rebalance, {})[0]
    started, most = 0, 0
    pending = [status.layers_pending for status in outcome.statuses]
    for step in range(1, 60):
        before, after = outcome.tables[step - 1], outcome.tables[step]
        for layer in (before != after).any(1).nonzero().flatten().tolist():
            moves = plan_moves(before[layer].tolist(), after[layer].tolist(), NODES)
            rounds = split_rounds(moves, slots_per_rank=NUM_SLOTS, max_per_rank=1)
            assert step - started >= len(rounds) - 1, "the first round needs no further step"
            most = max(most, len(rounds))
        if pending[step] != pending[step - 1]:
            started = step
    assert most >= 4


def test_the_facts_of_every_window_are_the_definition(rank_pool):
    outcome = rank_pool.run(manager_worker, 4, 120, settings_with(), rebalance, {})[0]
    statuses = outcome.statuses
    seen = 0
    for step in range(1, 120):
        if statuses[step].balancedness == statuses[step - 1].balancedness:
            continue
        placement = Placement(outcome.tables[step], NUM_EXPERTS, 4)  # in force all through it
        ranks = torch.zeros(NUM_LAYERS, 4, dtype=torch.float64)
        for rank in range(4):
            ranks.scatter_add_(1, placement.slot_table(rank) // NUM_SLOTS, POPULARITY.double())
        expected = ranks.mean(1) / ranks.amax(1)
        found = torch.tensor(statuses[step].balancedness, dtype=torch.float64)
        torch.testing.assert_close(found, expected)
        seen += 1
    assert seen >= 3
    first = next(status for status in statuses if status.balancedness)
    measured = next(status for status in statuses if status.balancedness_after)
    assert measured.balancedness_before == first.balancedness
    assert measured.balancedness_after == measured.balancedness
    assert measured.saved_measured == pytest.approx(first.saved_estimated), "the loads are the same"
    assert measured.step_s_after is not None


def test_balanced_enough_is_left_alone(rank_pool):
    found = rank_pool.run(manager_worker, 4, 30, settings_with(min_utilization=0.0), rebalance, {})
    status = found[3].statuses[-1]
    assert status.num_rebalances == 0
    assert status.num_skipped >= 3
    assert status.bytes_moved == 0
    assert status.alarm is None


def test_a_rank_that_cannot_stage_leaves_the_layer_as_it_was_everywhere(rank_pool):
    found = rank_pool.run(manager_worker, 4, 90, settings_with(), rebalance, {2: {"fails_at": 1}})
    for outcome in found:
        assert all(map(torch.equal, outcome.tables, found[0].tables))
    told = [next(s for s in outcome.statuses if s.num_failures) for outcome in found]
    assert "rank 2" in told[2].last_error
    assert "no room" in told[2].last_error
    assert told[0].last_error == "another rank failed"
    at = [outcome.statuses.index(s) for outcome, s in zip(found, told, strict=True)]
    assert len(set(at)) == 1, "given up before the same step"
    assert torch.equal(found[0].tables[at[0]], found[0].tables[0]), "the first layer was to move"
    assert found[0].statuses[-1].num_rebalances > told[0].num_rebalances, "the next one succeeds"
    assert all(outcome.statuses[-1].num_failures == 1 for outcome in found)


def test_without_an_algorithm_it_is_off_and_tells(rank_pool):
    found = rank_pool.run(manager_worker, 4, 20, settings_with(), refuse, {}, timeout_s=20)
    for rank, outcome in enumerate(found):
        status = outcome.statuses[-1]
        assert status.phase is Phase.OFF
        why = "no placement found" if rank == 0 else "another rank failed"
        assert status.alarm == f"experts are not re-placed any more: {why}"
        assert torch.equal(outcome.tables[0], outcome.tables[-1])


def test_standing_still_raises_the_alarm_and_moving_on_ends_it(rank_pool):
    """Rank 1 stages for longer than the limit."""
    slow = settings_with(alarm_after_s=0.2, num_iterations=2)
    options = {1: {"stage_s": 0.6}}
    found = rank_pool.run(manager_worker, 4, 250, slow, rebalance, options, timeout_s=60)
    alarms = [status.alarm for status in found[1].statuses]
    raised = [alarm is not None for alarm in alarms]
    assert any(raised)
    assert not all(raised[raised.index(True) :])
    assert all("moving has stood still" in alarm for alarm in alarms if alarm)


def test_the_job_goes_on_while_all_ranks_sleep(rank_pool):
    """All rounds of the layer are carried during the pause: it is switched right after it."""
    found = rank_pool.run(manager_worker, 4, 12, settings_with(), rebalance, {}, 7)
    for outcome in found:
        assert outcome.statuses[7].phase is Phase.MOVING
        assert outcome.statuses[8].layers_pending < outcome.statuses[7].layers_pending
