"""``--ep-dispatch-algorithm balanced``: tokens follow the shares, and the text is the same."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import moe_ep.engine.eplb as glue
from eplb.files import write_loads
from eplb.placement import Placement
from eplb.rebalance import rebalance
from eplb.shares import balanced_shares
from eplb.status import EplbStatus
from moe_ep.config import EngineConfig
from moe_ep.engine.engine import Engine
from moe_ep.engine.request import EngineRequest
from tests.engine.driver import RankResult, engine_worker, greedy
from tests.engine.test_parity import check_exact, config_for, reference, run
from tests.eplb.test_dispatch import ways_of_slots
from tests.ranks import RankInfo
from tests.tiny import tiny_checkpoint

EP_SIZE, NUM_SLOTS, NUM_EXPERTS = 4, 24, 16
SEED = 88  # of loads whose best split is uneven: 0.81 to 0.19, and 0.62 to 0.38


def uneven_loads() -> torch.Tensor:
    """Of the two layers of the tiny model; hot experts get replicas, to be split unevenly."""
    return torch.rand(2, NUM_EXPERTS, generator=torch.Generator().manual_seed(SEED)).double() ** 3


def slot_counts(results: list[RankResult]) -> torch.Tensor:
    """``[L, P]``"""
    return torch.cat([torch.tensor(result.slot_tokens) for result in results], dim=1)


def surprise(counts: torch.Tensor, shares: torch.Tensor, placement: Placement) -> torch.Tensor:
    """``[L, P]``: how many standard deviations a slot's tokens are off, if drawn by the shares."""
    table = placement.physical_to_logical
    of_expert = torch.zeros(len(counts), NUM_EXPERTS, dtype=torch.int64)
    of_expert.scatter_add_(1, table, counts)
    totals = of_expert.gather(1, table)
    spread = (totals * shares * (1 - shares)).clamp(min=0).sqrt()
    return (counts - totals * shares).abs() / (spread + 1)


@pytest.mark.parametrize(
    "flags", [{}, {"enable_two_batch_overlap": True, "tbo_token_threshold": 8}]
)
def test_tokens_follow_the_shares_and_the_text_does_not_change(
    rank_pool, tmp_path: Path, flags: dict
):
    write_loads(path := tmp_path / "loads.pt", uneven_loads().unsqueeze(0), num_dense=1)
    config = config_for(
        tiny_checkpoint("v3"), ep_size=EP_SIZE, ep_num_redundant_experts=NUM_SLOTS - NUM_EXPERTS,
        init_expert_location=str(path), ep_dispatch_algorithm="balanced", **flags,
    )  # fmt: skip
    results = run(rank_pool, config)
    check_exact(results, reference("v3"))
    placement = rebalance(uneven_loads(), num_slots=NUM_SLOTS, num_ranks=EP_SIZE)
    shares = balanced_shares(placement, uneven_loads())
    counts = slot_counts(results)
    assert float(surprise(counts, shares, placement).max()) < 3
    even = placement.replica_counts.gather(1, placement.physical_to_logical).double().reciprocal()
    assert float(surprise(counts, even, placement).max()) > 3, "the shares make no difference here"


def staying_worker(
    info: RankInfo, config: EngineConfig, requests: list[list[EngineRequest]]
) -> tuple[list[torch.Tensor], EplbStatus | None]:
    """The rank's slot tables ``[L, E, W]`` at the start and at the end, no expert having moved."""
    engines, tables = [], []
    create = Engine.create

    def kept(config: EngineConfig, world, num_threads: int) -> Engine:
        engines.append(create(config, world, num_threads))
        tables.append(current())
        return engines[0]

    def current() -> torch.Tensor:
        layers = engines[0]._parts.decoder.moe_layers
        return torch.stack([layer.router.slot_table for layer in layers])

    with (
        patch.object(glue, "next_placement", lambda loads, placement, cost: placement),
        patch.object(Engine, "create", kept),
    ):
        result = engine_worker(info, config, requests)
    return [*tables, current()], result.eplb


def test_shares_are_renewed_where_no_expert_moves(rank_pool):
    config = config_for(
        tiny_checkpoint("v3"), ep_size=2, ep_num_redundant_experts=8, enable_eplb=True,
        eplb_rebalance_num_iterations=4, ep_dispatch_algorithm="balanced",
    )  # fmt: skip
    requests = [
        [EngineRequest(f"{rank} {i}", (5, 7 + i, 11 + rank), greedy(24, ignore_eos=True))
         for i in range(4)]
        for rank in range(2)
    ]  # fmt: skip
    found = rank_pool.run(staying_worker, 2, config, requests, timeout_s=60)
    before, after = ([ways_of_slots(tables[i], 24) for tables, _ in found] for i in (0, 1))
    assert torch.equal(*before)
    assert torch.equal(*after), "one split on all ranks"
    assert (before[0] != after[0]).any(1).all(), "in every layer"
    for _, eplb in found:
        assert eplb is not None
        assert eplb.num_skipped >= 2
        assert eplb.num_rebalances == eplb.bytes_moved == 0
