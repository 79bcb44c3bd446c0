"""Decode steps replayed from CUDA graphs on one GPU, against the same engine without graphs."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar
from unittest.mock import patch

import torch

from moe_ep.engine import graphs
from moe_ep.engine.graphs import CudaGraphMaker, Graph
from tests.engine.driver import RankResult, run_engine, world_alone
from tests.engine.test_parity import FP8, check_rows, config_for, prompt_requests, reference
from tests.tiny import tiny_checkpoint

R = TypeVar("R")
CASE = "v3-steady"


class CountingMaker(CudaGraphMaker):
    """Keeps how often each of its graphs was replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_replays: list[int] = []

    def capture(self, function: Callable[[], R]) -> tuple[Graph, R]:
        graph, result = super().capture(function)
        index = len(self.num_replays)
        self.num_replays.append(0)
        return CountedGraph(graph, lambda: self._count(index)), result

    def _count(self, index: int) -> None:
        self.num_replays[index] += 1


@dataclasses.dataclass(frozen=True)
class CountedGraph:
    graph: Graph
    count: Callable[[], None]

    def replay(self) -> None:
        self.count()
        self.graph.replay()


def test_texts_are_those_of_steps_without_graphs(one_gpu: torch.device) -> None:
    """One rank on Triton's kernels."""
    checkpoint = tiny_checkpoint(CASE, dtype="bfloat16", fp8=True)
    config = config_for(
        checkpoint,
        moe_runner_backend="triton",
        attention_backend="triton",
        max_num_seqs=8,
        cuda_graph_bs=(2, 4, 8),
    )
    maker = CountingMaker()

    def run(**flags: object) -> RankResult:
        changed = dataclasses.replace(config, **flags)
        with patch.object(graphs, "graph_maker", lambda device: maker):
            return run_engine(changed, world_alone(), prompt_requests())

    captured = run()
    assert len(maker.num_replays) == 3
    assert sum(maker.num_replays) > 3, maker.num_replays
    eager = run(enforce_eager=True, cuda_graph_bs=None)
    for request_id, request in captured.requests.items():
        assert request.token_ids == eager.requests[request_id].token_ids
    check_rows([captured], reference(CASE, fp8=True, dtype="bfloat16"), FP8)
