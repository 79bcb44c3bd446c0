"""Experts on the move under steps that are replayed from graphs, on the stand-ins of the libraries.

A replay reads the addresses that were captured: routing or weights that were put elsewhere than in
place would send tokens to the experts of the start.
"""

from unittest.mock import patch

import pytest
import torch

import moe_ep.engine.eplb as glue
from moe_ep.config import EngineConfig
from moe_ep.engine.request import EngineRequest
from tests.emulators.cuda_graph import EmulatedGraphMaker
from tests.emulators.device import emulated_kernels
from tests.emulators.install import emulated
from tests.engine.driver import RankResult, engine_worker
from tests.engine.graph_makers import emulated_graphs
from tests.engine.moving import shuffled
from tests.engine.test_graphs_parity import CASE, graph_config, requests_for
from tests.engine.test_parity import FP8, check_rows, reference
from tests.ranks import RankInfo


def moving_worker(
    info: RankInfo, config: EngineConfig, requests: list[list[EngineRequest]]
) -> tuple[RankResult, int]:
    """The rank's result, and how often its graphs were replayed."""
    maker = EmulatedGraphMaker()
    with (
        emulated("deep_ep"),
        emulated_kernels(),
        emulated_graphs(maker),
        patch.object(glue, "next_placement", shuffled),
    ):
        result = engine_worker(info, config, requests)
    return result, sum(graph.num_replays for graph in maker.graphs)


@pytest.mark.parametrize("algorithm", ["static", "balanced"])
def test_replays_follow_the_experts(rank_pool, algorithm: str):
    config = graph_config(
        2,
        moe_a2a_backend="deepep",
        cuda_graph_bs=(2,),
        max_num_seqs=2,
        enable_eplb=True,
        eplb_rebalance_num_iterations=1,
        ep_dispatch_algorithm=algorithm,
    )
    requests = [requests_for(2, num_new=6)[0][:4], []]
    found = rank_pool.run(moving_worker, 2, config, requests, timeout_s=120)
    for result, num_replays in found:
        assert num_replays >= 4
        assert result.eplb.num_rebalances >= 2
        assert result.eplb.num_failures == 0
    results = [result for result, _ in found[:1]]
    check_rows(results, reference(CASE, fp8=True, dtype="bfloat16")[:4], FP8)
    assert all(torch.isfinite(row).all() for row in results[0].requests["0"].logits)
