"""The stand-in for DeepEP on two ranks: it refuses what must be refused.

Traps of the library that no adapter can fall into by accident are held here; the others in
``tests/dispatch/test_deep_ep_traps.py``.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.compare import assert_bits_equal
from tests.emulators.deep_ep import (
    Buffer,
    Config,
    DeviceTrapError,
    ElasticBuffer,
    EventHandle,
    EventOverlap,
    topk_idx_t,
)
from tests.ranks import RankInfo, RankPool

BF16, F32 = torch.bfloat16, torch.float32
HIDDEN, NUM_EXPERTS, NUM_TOKENS, MAX_TOKENS = 2048, 4, 4, 8
DONE = ["done", "done"]


def _routing() -> tuple[torch.Tensor, torch.Tensor]:
    topk_idx = torch.tensor([[0, 2], [1, -1], [3, 0], [2, 1]], dtype=topk_idx_t)
    return topk_idx, torch.full(topk_idx.shape, 0.5)


def _rows() -> torch.Tensor:
    return torch.arange(NUM_TOKENS, dtype=F32).unsqueeze(1).repeat(1, HIDDEN).to(BF16)


def _low_latency(info: RankInfo, num_qps: int = 2) -> Buffer:
    size = Buffer.get_low_latency_rdma_size_hint(2 * MAX_TOKENS, HIDDEN, 2, NUM_EXPERTS)
    return Buffer(
        info.group,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=num_qps,
        explicitly_destroy=True,
    )


def _normal(info: RankInfo) -> Buffer:
    size = Buffer.get_dispatch_config(2).get_nvl_buffer_size_hint(2 * HIDDEN, 2)
    return Buffer(info.group, size, explicitly_destroy=True)


def _elastic(info: RankInfo, monkeypatch: pytest.MonkeyPatch) -> ElasticBuffer:
    monkeypatch.setenv("EP_DISABLE_GIN", "1")
    return ElasticBuffer(info.group, num_max_tokens_per_rank=8, hidden=HIDDEN, num_topk=2)


def _send(buffer: Buffer, max_tokens: int = MAX_TOKENS, **flags: Any) -> tuple[Any, ...]:
    flags = {"use_fp8": False, "return_recv_hook": True} | flags
    return buffer.low_latency_dispatch(_rows(), _routing()[0], max_tokens, NUM_EXPERTS, **flags)


def _expand(buffer: ElasticBuffer, **flags: Any) -> tuple[Any, ...]:
    topk_idx, weights = _routing()
    flags = {"num_experts": NUM_EXPERTS, "do_expand": True, "num_sms": 20, **flags}
    return buffer.dispatch(_rows(), flags.pop("topk_idx", topk_idx), weights, **flags)


def _traps(call: Callable[[], object], text: str) -> None:
    with pytest.raises(DeviceTrapError, match=text):
        call()


def _events(info: RankInfo) -> str:
    buffer, topk_idx = _normal(info), _routing()[0]
    with pytest.raises(TypeError, match="V1 takes an EventOverlap, got EventHandle"):
        buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS, previous_event=EventHandle())
    for flags in ({}, {"previous_event": Buffer.capture()}, {"async_finish": True}):
        with pytest.raises(RuntimeError, match="has_value"):
            buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS, allocate_on_comm_stream=True, **flags)
    *counts, event = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
    assert counts[2].tolist() == [2, 2, 2, 1]
    with pytest.raises(AssertionError):
        event.current_stream_wait()  # the call was synchronous
    *counts, event = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS, async_finish=True)
    assert counts[2].tolist() != [2, 2, 2, 1]
    with event:
        pass
    assert counts[2].tolist() == [2, 2, 2, 1]
    with pytest.MonkeyPatch.context() as patch:
        elastic = _elastic(info, patch)
    assert isinstance(Buffer.capture(), EventOverlap)
    assert isinstance(ElasticBuffer.capture(), EventHandle)
    with pytest.raises(TypeError, match="V2 takes an EventHandle, got EventOverlap"):
        _expand(elastic, previous_event=EventOverlap(), allocate_on_comm_stream=True)
    with pytest.raises(RuntimeError, match="needs allocate_on_comm_stream"):
        _expand(elastic, previous_event=EventHandle())
    return "done"


def test_trap_02_event_types_and_waits(rank_pool: RankPool):
    assert rank_pool.run(_events, 2) == DONE


def _local_ids(info: RankInfo) -> str:
    buffer, (topk_idx, weights) = _normal(info), _routing()
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
    x, ids, received_weights, counts, handle, _ = buffer.dispatch(
        _rows(),
        num_tokens_per_rank=per_rank,
        is_token_in_rank=is_in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=weights,
        expert_alignment=8,
    )
    # The row's value names its token; every token came from both ranks.
    for row, local, weight in zip(x[:, 0].tolist(), ids, received_weights, strict=True):
        own = topk_idx[int(row)] - 2 * info.rank
        expected = own.where((own >= 0) & (own < 2), -1)
        assert local.tolist() == expected.tolist()
        assert weight.tolist() == [0.5 if expert >= 0 else 0.0 for expert in expected.tolist()]
    assert counts == [8, 8]
    other_sms = Config(10, 10, 256, 6, 128)
    with pytest.raises(RuntimeError, match="num_sms of its dispatch"):
        buffer.combine(x, handle, config=other_sms)
    out, _, _ = buffer.combine(x, handle)
    num_copies = torch.tensor([2.0, 1.0, 2.0, 2.0])
    assert_bits_equal(out, _rows() * num_copies.to(BF16).unsqueeze(1))
    return "done"


def test_trap_01_03_normal_mode_has_local_ids_and_a_plain_sum(rank_pool: RankPool):
    assert rank_pool.run(_local_ids, 2) == DONE


def _hooks(info: RankInfo) -> str:
    buffer = _low_latency(info)
    with pytest.raises(RuntimeError, match="async and return_recv_hook"):
        _send(buffer, async_finish=True)
    x, count, handle, event, hook = _send(buffer)
    assert bool(x.isnan().all())
    with pytest.raises(AssertionError):
        event.current_stream_wait()
    _traps(lambda: _send(buffer), "before the hook of call 1")
    _traps(lambda: buffer.clean_low_latency_buffer(8, HIDDEN, NUM_EXPERTS), "before the hook")
    _traps(buffer.destroy, "before the hook")
    hook()
    _traps(hook, "called once, in time")
    assert count.tolist() == ([4, 4] if info.rank == 0 else [4, 2])
    assert [int(row.isnan().all(dim=1).logical_not().sum()) for row in x] == count.tolist()
    topk_idx, weights = _routing()
    out, _, hook = buffer.low_latency_combine(x, topk_idx, weights, handle, return_recv_hook=True)
    hook()
    expected = _rows() * torch.tensor([1.0, 0.5, 1.0, 1.0]).to(BF16).unsqueeze(1)
    assert_bits_equal(out, expected)
    _send(buffer)[-1]()  # the third call takes the place of the first
    assert bool(x.isnan().all())
    assert_bits_equal(out, expected)
    _send(buffer)[-1]()
    assert bool(out.isnan().all())
    return "done"


def test_trap_11_hooks_and_two_results_alive(rank_pool: RankPool):
    assert rank_pool.run(_hooks, 2) == DONE


def _sizes(info: RankInfo) -> str:
    few_qps = _low_latency(info, num_qps=1)
    _traps(lambda: _send(few_qps), "QPs >= local experts")
    buffer = _low_latency(info)
    with pytest.raises(AssertionError):
        _send(buffer, 512)
    wrong = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="wait stats"):
        _send(buffer, dispatch_wait_recv_cost_stats=wrong)
    with pytest.raises(RuntimeError, match=r"dtype torch\.float32"):
        buffer.low_latency_dispatch(_rows().float(), _routing()[0], MAX_TOKENS, NUM_EXPERTS)
    many = torch.arange(12).repeat(NUM_TOKENS, 1)
    _traps(lambda: buffer.low_latency_dispatch(_rows(), many, MAX_TOKENS, 4), "over 11")
    _send(buffer)[-1]()
    _traps(lambda: _send(buffer, 2 * MAX_TOKENS), "without a clean")
    buffer.clean_low_latency_buffer(2 * MAX_TOKENS, HIDDEN, NUM_EXPERTS)
    _send(buffer, 2 * MAX_TOKENS)[-1]()
    return "done"


def test_trap_10_12_13_low_latency_sizes(rank_pool: RankPool):
    assert rank_pool.run(_sizes, 2) == DONE


def _mismatch(info: RankInfo) -> str:
    buffer = _low_latency(info)
    _, _, _, _, hook = _send(buffer, MAX_TOKENS * (1 + info.rank))
    _traps(hook, "rank . calls low_latency_dispatch with")
    return "done"


def test_trap_10_sizes_that_differ_between_ranks_are_found(rank_pool: RankPool):
    assert rank_pool.run(_mismatch, 2) == DONE


def _duplicates(info: RankInfo) -> str:
    twice = torch.tensor([[1, 1]] * NUM_TOKENS)
    with pytest.MonkeyPatch.context() as patch:
        elastic = _elastic(info, patch)
    _traps(lambda: _expand(elastic, topk_idx=twice), "occurs twice")
    _traps(lambda: _expand(elastic, topk_idx=twice + torch.tensor([0, 9])), "out of range")
    return "done"


def test_trap_14_a_repeated_expert_traps(rank_pool: RankPool):
    assert rank_pool.run(_duplicates, 2) == DONE


def _no_sync(info: RankInfo) -> str:
    with pytest.MonkeyPatch.context() as patch:
        elastic = _elastic(info, patch)
    flags = {"do_cpu_sync": False, "async_with_compute_stream": True, "expert_alignment": 8}
    x, _, weights, handle, event = _expand(elastic, **flags)
    assert handle.num_recv_tokens_per_expert_list == []
    assert len(x) == 48  # 2 ranks x 8 tokens x 2 choices, and the padding of 2 groups
    _traps(lambda: elastic.combine(x, handle), "before the wait")
    event.current_stream_wait()
    ends = handle.psum_num_recv_tokens_per_expert.tolist()
    assert ends == ([4, 12] if info.rank == 0 else [4, 10])
    assert bool(weights[:4].eq(0.5).all())
    assert bool(weights[4:8].isnan().all())
    with pytest.raises(RuntimeError, match="x: shape"):
        elastic.combine(x[: ends[-1]], handle)
    out, _, _ = elastic.combine(x, handle)
    num_copies = torch.tensor([2.0, 1.0, 2.0, 2.0])
    assert_bits_equal(out, _rows() * num_copies.to(BF16).unsqueeze(1))
    return "done"


def test_trap_01_08_09_expanded_rows_without_a_wait(rank_pool: RankPool):
    assert rank_pool.run(_no_sync, 2) == DONE


def _arrival(info: RankInfo) -> list[list[float]]:
    buffer = _low_latency(info)
    orders = []
    for _ in range(8):
        x, count, _, _, hook = _send(buffer)
        hook()
        orders.append(x[0, : count[0], 0].tolist())
    return orders


def test_rows_arrive_in_changing_order(rank_pool: RankPool):
    for orders in rank_pool.run(_arrival, 2):
        assert len({tuple(sorted(order)) for order in orders}) == 1
        assert len({tuple(order) for order in orders}) > 1
