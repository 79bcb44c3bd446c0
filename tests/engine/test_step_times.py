"""Work, transfer and skew of steps that are made up by hand; times in ns."""

import numpy as np
import pytest

from moe_ep.engine.step_times import Kind, RankTimes, StepJoin, step_times
from moe_ep.progress import Stage
from moe_ep.recorder import STAGES, StepRecord

Piece = tuple[int, Stage] | tuple[int, Stage, int] | tuple[int, Stage, int, int]


def record(*pieces: Piece, end: int, step: int = 0) -> StepRecord:
    """pieces: when each begins, its stage, layer (-1 by default) and micro-batch (0)."""
    full = [(*piece, *(-1, 0)[len(piece) - 2 :]) for piece in pieces]
    starts, stages, layers, micro_batches = zip(*full, strict=True)
    return StepRecord(
        step=step,
        num_tokens=1,
        bounds_ns=np.array([*starts, end], dtype=np.int64),
        stages=np.array([STAGES.index(stage) for stage in stages], dtype=np.int8),
        layers=np.array(layers, dtype=np.int16),
        micro_batches=np.array(micro_batches, dtype=np.int8),
    )


def nanoseconds(times: RankTimes, stage: Stage) -> list[int]:
    """Work, skew and transfer of a stage in all layers."""
    return (times.table().sum(axis=0)[STAGES.index(stage)] * 1e9).round().astype(int).tolist()


def layer_of_rank(shift: int, *, counts: bool) -> StepRecord:
    """One layer whose exchange begins ``shift`` later than usual and ends at 500."""
    handed_over = [(200 + shift, Stage.DISPATCH_COUNTS, 0)] if counts else []
    return record(
        (0, Stage.GATE, 0),
        (100 + shift, Stage.DISPATCH_SEND, 0),
        *handed_over,
        (300 + shift, Stage.DISPATCH_WAIT, 0),
        (500, Stage.EXPERTS, 0),
        end=600,
    )


def test_a_wait_is_skew_until_the_last_peer_has_sent_and_transfer_from_then_on():
    early, late = step_times([layer_of_rank(0, counts=False), layer_of_rank(150, counts=False)])
    assert nanoseconds(early, Stage.DISPATCH_WAIT) == [0, 150, 50]
    assert nanoseconds(late, Stage.DISPATCH_WAIT) == [0, 0, 50]
    assert nanoseconds(early, Stage.DISPATCH_SEND) == [200, 0, 0]
    assert early.exposed_share == pytest.approx(200 / 600)


def test_counts_wait_for_a_peer_that_has_not_begun_to_send():
    early, late = step_times([layer_of_rank(0, counts=True), layer_of_rank(150, counts=True)])
    # The peer begins to send at 250, and has handed over when its own counts are there, at 450.
    assert nanoseconds(early, Stage.DISPATCH_COUNTS) == [0, 50, 50]
    assert nanoseconds(early, Stage.DISPATCH_WAIT) == [0, 150, 50]
    assert nanoseconds(late, Stage.DISPATCH_COUNTS) == [0, 0, 100]


def test_a_peer_that_sends_after_the_wait_has_ended_takes_no_more_than_the_wait():
    waiting = record((0, Stage.STEP_SHAPE), (10, Stage.OUTPUTS), end=20)
    late = record((0, Stage.SCHEDULING), (15, Stage.STEP_SHAPE), end=20)
    first, second = step_times([waiting, late])
    assert nanoseconds(first, Stage.STEP_SHAPE) == [0, 10, 0]
    assert nanoseconds(second, Stage.STEP_SHAPE) == [0, 0, 5]


def test_exchanges_are_matched_by_layer_and_micro_batch_in_whatever_order_they_are_met():
    """Both ranks wait for both micro-batches' combines, in opposite orders."""
    sends = [(0, Stage.COMBINE_SEND, 3, 0), (10, Stage.COMBINE_SEND, 3, 1)]
    one = record(*sends, (20, Stage.COMBINE_WAIT, 3, 0), (90, Stage.COMBINE_WAIT, 3, 1), end=100)
    other = record(
        (30, Stage.COMBINE_SEND, 3, 1),
        (40, Stage.COMBINE_SEND, 3, 0),
        (70, Stage.COMBINE_WAIT, 3, 1),
        (80, Stage.COMBINE_WAIT, 3, 0),
        end=100,
    )
    first, second = step_times([one, other])
    assert first.skew_ns.tolist() == [0, 0, 50, 0]  # the peer's micro-batch 0 is sent at 70
    assert second.skew_ns.tolist() == [0, 0, 0, 0]


def test_the_table_holds_every_nanosecond_and_keeps_layers_apart():
    times = step_times([layer_of_rank(0, counts=True), layer_of_rank(99, counts=True)])[0]
    table = times.table(num_layers=3)
    assert table.shape == (4, len(STAGES), len(Kind))
    assert table.sum() == pytest.approx(600e-9)
    assert table[0].sum() == pytest.approx(600e-9)
    assert not table[1:].any()
    outside = step_times([record((0, Stage.HEAD), end=7)])[0].table()
    assert outside[-1, STAGES.index(Stage.HEAD), Kind.WORK] == pytest.approx(7e-9)


def test_a_rank_alone_waits_for_nobody():
    (times,) = step_times([layer_of_rank(0, counts=False)])
    assert not times.skew_ns.any()


def test_records_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match=r"one step are needed, those of \[0, 1\]"):
        step_times([record((0, Stage.HEAD), end=1, step=s) for s in (0, 1)])
    waits = record((0, Stage.COMBINE_WAIT, 0), end=1)
    with pytest.raises(ValueError, match="shows each combine wait"):
        step_times([waits, record((0, Stage.HEAD), end=1)])


def test_records_are_joined_by_step_and_those_that_never_come_are_forgotten():
    join = StepJoin(2)
    assert list(join.add(0, [record((0, Stage.HEAD), end=1, step=s) for s in range(40)])) == []
    late = [record((0, Stage.HEAD), end=2, step=s) for s in (0, 38, 39)]
    steps = list(join.add(1, late))
    assert [[times.record.total_ns for times in step] for step in steps] == [[1, 2], [1, 2]]
    unfit = record((0, Stage.COMBINE_WAIT, 0), end=1, step=50)
    assert list(join.add(0, [unfit])) == []
    assert list(join.add(1, [record((0, Stage.HEAD), end=1, step=50)])) == []  # logged, not raised
