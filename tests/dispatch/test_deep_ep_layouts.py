"""The layouts of the DeepEP adapters over the stand-in: one test for each trap in them.

The number is the trap's; taking away the guard that a test names makes it fail.
"""

from typing import Any

import pytest
import torch

from moe_ep.dispatch import ContiguousLayout, Dispatcher, Mode
from tests.compare import assert_bits_equal
from tests.dispatch.cases import BF16, arguments
from tests.dispatch.deep_ep_cases import BACKENDS, HIDDEN, case, on_stand_in
from tests.ranks import RankInfo, RankPool


def _routed(counts: list[int]) -> dict[str, torch.Tensor]:
    """Tokens for the first slots, as many as asked for; K = 1."""
    slots = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).unsqueeze(1)
    x = torch.ones(len(slots), HIDDEN, dtype=BF16)
    return {"x": x, "topk_slots": slots, "topk_weights": torch.ones(slots.shape)}


def _layouts(info: RankInfo, backend: str, counts: list[int]) -> list[Any]:
    shape = {"num_topk": 1, "num_slots_per_rank": len(counts), "row_alignment": 128}
    one = case("", (sum(counts), 0), **shape)
    given = _routed(counts if info.rank == 0 else [0] * len(counts))

    def work(dispatcher: Dispatcher) -> list[Any]:
        found = []
        for mode in Mode:
            dispatched = dispatcher.dispatch(**given, mode=mode).wait()
            layout, scales = dispatched.layout, dispatched.scales
            assert scales is not None
            psum = layout.psum.tolist() if isinstance(layout, ContiguousLayout) else None
            strides, shape = scales.stride(), tuple(dispatched.rows.shape)
            found.append((psum, layout.counts.tolist(), shape, strides))
            y = torch.zeros(shape, dtype=BF16)
            dispatcher.combine(y=y, dispatched=dispatched).wait()
        return found

    return on_stand_in(info, backend, one.spec, work)


@pytest.mark.parametrize(
    ("counts", "psum", "num_rows"),
    [([100, 122, 114], [100, 250, 370], 384), ([0, 1, 128, 129], [0, 1, 256, 385], 512)],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_trap_04_05_psum_is_the_end_of_each_group(
    rank_pool: RankPool, backend, counts, psum, num_rows
):
    normal, low_latency = rank_pool.run(_layouts, 2, backend, counts)[0]
    assert normal[:2] == (psum, counts)
    assert normal[2][0] == num_rows
    assert low_latency[1] == counts


def test_trap_06_08_scales_lie_in_columns(rank_pool: RankPool):
    normal, low_latency = rank_pool.run(_layouts, 2, "deepep", [3, 0, 70])[0]
    assert low_latency[2] == (3, 256, HIDDEN)  # 73 tokens of capacity: 128 in whole blocks
    assert low_latency[3] == (256 * (HIDDEN // 128), 1, 256)
    assert normal[3] == (1, 256)


def test_trap_06_09_expanded_rows_are_bounded_without_a_wait(rank_pool: RankPool):
    normal, low_latency = rank_pool.run(_layouts, 2, "deepep_v2", [3, 0, 70])[0]
    assert normal[2] == (256, HIDDEN)
    assert normal[3] == (1, 256)
    # 2 ranks x 73 tokens x 1 choice, and the padding of 3 slots: 527, aligned
    assert low_latency[2] == (640, HIDDEN)
    assert low_latency[3] == (1, 640)


def _trim(info: RankInfo) -> str:
    one = case("uniform", (4, 4))

    def work(dispatcher: Dispatcher) -> str:
        given = arguments(one, info.rank, Mode.LOW_LATENCY)
        dispatched = dispatcher.dispatch(**given).wait()
        end = int(dispatched.layout.psum[-1])
        assert bool(dispatched.row_weights[end:].isnan().all())
        with pytest.raises(ValueError, match="that of rows"):
            dispatcher.combine(y=torch.zeros(end, HIDDEN, dtype=BF16), dispatched=dispatched)
        y = torch.zeros(dispatched.rows.shape, dtype=BF16)
        y[end:] = float("nan")
        out = dispatcher.combine(y=y, dispatched=dispatched).wait()
        assert_bits_equal(out, torch.zeros_like(out))
        return "done"

    return on_stand_in(info, "deepep_v2", one.spec, work)


def test_trap_08_09_a_full_size_output_goes_back_and_its_tail_is_not_read(rank_pool: RankPool):
    assert rank_pool.run(_trim, 2) == ["done", "done"]
