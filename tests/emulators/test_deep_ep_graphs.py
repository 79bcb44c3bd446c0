"""The stand-in for DeepEP in captured graphs: what is the host's stays as it was in a replay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.compare import assert_bits_equal
from tests.emulators.cuda_graph import CaptureError, EmulatedGraphMaker
from tests.emulators.deep_ep import Buffer, DeviceTrapError, ElasticBuffer, topk_idx_t
from tests.ranks import RankInfo, RankPool

HIDDEN, NUM_EXPERTS, MAX_TOKENS = 2048, 4, 8
DONE = ["done", "done"]


class Exchange:
    """Four tokens of each of two ranks, to experts that double them."""

    def __init__(self, info: RankInfo) -> None:
        size = Buffer.get_low_latency_rdma_size_hint(MAX_TOKENS, HIDDEN, 2, NUM_EXPERTS)
        self.low_latency = Buffer(
            info.group,
            num_rdma_bytes=size,
            low_latency_mode=True,
            num_qps_per_rank=2,
            explicitly_destroy=True,
        )
        nvl = Buffer.get_dispatch_config(2).get_nvl_buffer_size_hint(2 * HIDDEN, 2)
        self.normal = Buffer(info.group, nvl, explicitly_destroy=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EP_DISABLE_GIN", "1")
            self.elastic = ElasticBuffer(
                info.group, num_max_tokens_per_rank=MAX_TOKENS, hidden=HIDDEN, num_topk=2
            )
        self.x = torch.ones(4, HIDDEN, dtype=torch.bfloat16)
        self.topk_idx = torch.tensor([[0, 2], [1, -1], [3, 0], [2, 1]], dtype=topk_idx_t)
        self.weights = torch.full((4, 2), 0.5)

    def send(self) -> tuple[Any, ...]:
        return self.low_latency.low_latency_dispatch(
            self.x, self.topk_idx, MAX_TOKENS, NUM_EXPERTS, use_fp8=False, return_recv_hook=True
        )

    def dispatch(self) -> tuple[torch.Tensor, tuple]:
        rows, _, handle, _, hook = self.send()
        hook()
        return rows, handle

    def pair(self) -> torch.Tensor:
        rows, handle = self.dispatch()
        out, _, hook = self.low_latency.low_latency_combine(
            rows * 2, self.topk_idx, self.weights, handle, return_recv_hook=True
        )
        hook()
        return out

    def expand(self, *, do_cpu_sync: bool = False) -> tuple[Any, ...]:
        return self.elastic.dispatch(
            self.x,
            self.topk_idx,
            self.weights,
            num_experts=NUM_EXPERTS,
            do_expand=True,
            do_cpu_sync=do_cpu_sync,
            num_sms=20,
            async_with_compute_stream=True,
        )

    def expanded_pair(self) -> torch.Tensor:
        rows, _, weights, handle, event = self.expand()
        event.current_stream_wait()
        y = (rows * 2 * weights[:, None]).bfloat16()
        out, _, event = self.elastic.combine(y, handle, async_with_compute_stream=True)
        event.current_stream_wait()
        return out

    def normal_dispatch(self) -> None:
        per_rank, _, per_expert, is_in_rank, _ = self.normal.get_dispatch_layout(
            self.topk_idx, NUM_EXPERTS
        )
        self.normal.dispatch(
            self.x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=self.topk_idx,
            topk_weights=self.weights,
        )

    def set(self, value: float, first_expert: int) -> None:
        self.x.fill_(value)
        self.topk_idx[0, 0] = first_expert


def _replays(info: RankInfo) -> str:
    exchange = Exchange(info)
    for run in (exchange.pair, exchange.expanded_pair):
        run()
        graph, out = EmulatedGraphMaker().capture(run)
        for value, expert in ((3.0, 1), (5.0, -1), (7.0, 3)):
            exchange.set(value + info.rank, expert)
            graph.replay()
            got, own = out.clone(), value + info.rank
            assert got[:, 0].tolist() == [own * n for n in (1 + (expert >= 0), 1, 2, 2)]
            assert_bits_equal(got, run())  # eager ones in between
    return "done"


def test_replays_travel_with_the_new_tokens(rank_pool: RankPool) -> None:
    assert rank_pool.run(_replays, 2) == DONE


def _odd_calls(info: RankInfo) -> str:
    """Trap 11: two buffers alternate by a count that a replay does not see."""
    exchange = Exchange(info)
    exchange.pair()
    graph, _ = EmulatedGraphMaker().capture(exchange.dispatch)
    exchange.dispatch()
    graph.replay()
    with pytest.raises(DeviceTrapError, match="in a row use one buffer"):
        graph.replay()

    exchange = Exchange(info)
    graph, _ = EmulatedGraphMaker().capture(exchange.pair)
    graph.replay()
    exchange.dispatch()
    with pytest.raises(DeviceTrapError, match="in a row use one buffer"):
        graph.replay()
    return "done"


def test_odd_low_latency_calls_are_found(rank_pool: RankPool) -> None:
    assert rank_pool.run(_odd_calls, 2) == DONE


def _refused(info: RankInfo) -> str:
    exchange, maker = Exchange(info), EmulatedGraphMaker()

    def fails(function: Callable[[], object], text: str) -> None:
        with pytest.raises((CaptureError, RuntimeError), match=text):
            maker.capture(function)

    fails(exchange.expand, "never used is compiled")
    exchange.expanded_pair()
    fails(lambda: exchange.expand(do_cpu_sync=True), "the host waits for the counts")
    fails(exchange.expand, "not joined before the capture ends")
    fails(exchange.normal_dispatch, "the host waits for the counts")
    *_, before = exchange.send()
    fails(before, "the hook and its call are in one capture")
    exchange = Exchange(info)
    fails(exchange.send, "not joined before the capture ends")
    sizes = (MAX_TOKENS, HIDDEN, NUM_EXPERTS)
    exchange = Exchange(info)
    fails(lambda: exchange.low_latency.clean_low_latency_buffer(*sizes), "cannot be captured")
    return "done"


def test_what_cannot_be_captured_is_refused(rank_pool: RankPool) -> None:
    assert rank_pool.run(_refused, 2) == DONE
