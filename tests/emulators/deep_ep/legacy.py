"""The V1 ``Buffer``: construction, helpers and normal mode between the ranks of one node.

Shape letters: T tokens of this rank, K choices, R ranks, E experts, N rows received, H hidden.
"""

import os
import random
import types
from typing import Any

import torch
import torch.distributed as dist

from tests.emulators.cuda_graph import refuse_capture
from tests.emulators.deep_ep.checks import (
    check_routing,
    check_tensor,
    check_torch_deterministic,
    device_assert,
    host_assert,
)
from tests.emulators.deep_ep.config import (
    BUFFER_ALIGNMENT,
    COMBINE_CHUNKS,
    DISPATCH_CHUNKS,
    NUM_MAX_NVL_PEERS,
    Config,
    align,
    low_latency_size_hint,
    topk_idx_t,
)
from tests.emulators.deep_ep.event import EventHandle, EventOverlap, check_v1_event, launch
from tests.emulators.deep_ep.exchange import Channel, agree
from tests.emulators.deep_ep.low_latency import LowLatency
from tests.emulators.deep_ep.normal_rows import (
    ReceivedRows,
    check_rows,
    dispatch_layout,
    sent_rows,
)
from tests.emulators.unwritten import unwritten

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
NORMAL_RANKS = (2, 4, 8)


class Buffer(LowLatency):
    num_sms: int = 20

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        if group is None:
            raise ValueError("Either 'group' or 'comm' must be provided.")
        self.rank, self.group_size, self.group = group.rank(), group.size(), group
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self._check_construction(num_qps_per_rank)
        sizes = (num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank)
        agree(group, "the construction of Buffer", sizes)
        if low_latency_mode:
            assert num_qps_per_rank > 0
            self.nvshmem_qp_depth = int(os.environ.get("NVSHMEM_QP_DEPTH", "1024"))
        self._channel = Channel(group)
        self._random = random.Random(self.rank)
        # In the library the compiled object; None once destroyed.
        self.runtime: types.SimpleNamespace | None = types.SimpleNamespace()
        self._start_low_latency(num_qps_per_rank)

    def destroy(self) -> None:
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        host_assert(self.runtime is not None, "not destroyed")
        self._check_no_hook_is_open("destroy")
        self._channel.barrier("destroy", {})
        self.runtime = None

    @staticmethod
    def is_sm90_compiled() -> bool:
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return low_latency_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in DISPATCH_CHUNKS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, *DISPATCH_CHUNKS[num_ranks])

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        assert num_ranks in COMBINE_CHUNKS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, *COMBINE_CHUNKS[num_ranks])

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        check_v1_event(
            previous_event,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )
        check_tensor("topk_idx", topk_idx, [topk_idx_t], (None, None))
        host_assert(num_experts > 0, "num_experts > 0")
        results = (
            unwritten((self.group_size,), I32),
            unwritten((num_experts,), I32),
            unwritten((len(topk_idx), self.group_size), torch.bool),
        )

        def publish() -> None:
            check_routing(topk_idx, num_experts)
            counted = dispatch_layout(topk_idx, num_experts, self.group_size)
            for result, value in zip(results, counted, strict=True):
                result.copy_(value)

        event = EventOverlap(launch(publish, is_async=async_finish))
        return results[0], None, results[1], results[2], event

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: tuple | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        refuse_capture("V1 normal dispatch: the host waits for the counts")
        check_torch_deterministic()
        config = self.get_dispatch_config(self.group_size) if config is None else config
        self._check_normal(config)
        check_v1_event(
            previous_event,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )
        if handle is not None or num_worst_tokens or topk_idx is None or topk_weights is None:
            raise NotImplementedError("cached, worst-case and plain dispatch are not emulated")
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        rows, scales = x if isinstance(x, tuple) else (x, None)
        num_experts = len(num_tokens_per_expert)
        token_bytes = check_rows(rows, scales, topk_idx, topk_weights)
        needed = config.queue_bytes(token_bytes, self.group_size)
        host_assert(needed <= self.num_nvl_bytes, "num_nvl_bytes is too small")
        counted = dispatch_layout(topk_idx, num_experts, self.group_size)
        given = (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)
        for want, have in zip(counted, given, strict=True):
            host_assert(torch.equal(want, have), "the layout is that of topk_idx, and complete")

        inputs = {"x": rows, "topk_idx": topk_idx, "topk_weights": topk_weights}
        if scales is not None:
            inputs["scales"] = scales
        parts = [
            sent_rows(inputs, is_token_in_rank[:, r], self._random) for r in range(self.group_size)
        ]
        common = {
            "sizes": (rows.shape[1], rows.dtype, topk_idx.shape[1], num_experts),
            "alignment": expert_alignment,
            "num_sms": config.num_sms,
        }
        self._is_clean = False
        # The host waits for the counts, so all ranks have to be here.
        sources = self._channel.collect(self._channel.post("dispatch", common, parts))
        received = ReceivedRows(sources, num_experts // self.group_size, self.rank)
        handle = self._handle(received, is_token_in_rank, config)
        event = EventOverlap(launch(received.publish, is_async=async_finish))
        out_x = received.out["x"]
        counts = [align(n, expert_alignment) for n in received.expert_counts.tolist()]
        return (
            out_x if scales is None else (out_x, received.out["scales"]),
            received.out["topk_idx"],
            received.out["topk_weights"],
            counts,
            handle,
            event,
        )

    def combine(
        self,
        x: torch.Tensor,
        handle: tuple,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        check_torch_deterministic()
        config = self.get_combine_config(self.group_size) if config is None else config
        self._check_normal(config)
        check_v1_event(
            previous_event,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )
        if topk_weights is not None or bias is not None:
            raise NotImplementedError("reduced weights and bias are not emulated")
        rank_prefix, _, channel_prefix, src_idx, is_token_in_rank, _ = handle
        check_tensor("x", x, [BF16], (len(src_idx), None))
        host_assert(x.shape[1] * 2 % 16 == 0, "row bytes are a multiple of 16")
        host_assert(
            channel_prefix.shape[1] == config.num_channels,
            "combine has the num_sms of its dispatch",
        )
        host_assert(
            config.queue_bytes(2 * x.shape[1] + 4, self.group_size) <= self.num_nvl_bytes,
            "num_nvl_bytes is too small",
        )
        ends = rank_prefix[:, self.rank].tolist()
        starts = [0, *ends[:-1]]
        parts = [
            {"x": x[start:end], "src_idx": src_idx[start:end]}
            for start, end in zip(starts, ends, strict=True)
        ]
        self._is_clean = False
        ticket = self._channel.post("combine", {"hidden": x.shape[1]}, parts)
        combined = unwritten((len(is_token_in_rank), x.shape[1]), BF16)

        def publish() -> None:
            total = torch.zeros(combined.shape)
            for source, part in enumerate(self._channel.collect(ticket)):
                returned = part["src_idx"].long()
                expected = is_token_in_rank[:, source].nonzero().flatten()
                device_assert(torch.equal(returned.sort().values, expected), "all rows came back")
                total[returned] += part["x"].float()  # in rank order
            combined.copy_(total)

        return combined, None, EventOverlap(launch(publish, is_async=async_finish))

    def _check_construction(self, num_qps_per_rank: int) -> None:
        num_ranks, peers = self.group_size, NUM_MAX_NVL_PEERS
        nvl, rdma, is_low_latency = self.num_nvl_bytes, self.num_rdma_bytes, self.low_latency_mode
        host_assert(num_ranks < peers or num_ranks % peers == 0, "number of ranks")
        host_assert(nvl % BUFFER_ALIGNMENT == 0 and rdma % BUFFER_ALIGNMENT == 0, "% 128")
        host_assert(nvl <= 2**31 - 1 or rdma == 0, "NVL bytes")
        host_assert(is_low_latency or rdma <= 2**31 - 1, "RDMA bytes")
        host_assert(rdma == 0 or num_ranks > peers or is_low_latency, "RDMA needs more ranks")
        if num_ranks > peers:
            raise NotImplementedError("more than one node is not emulated")

    def _check_normal(self, config: Config) -> None:
        host_assert(self.runtime is not None, "destroyed")
        self._check_no_hook_is_open("a normal-mode call")
        host_assert(config.num_sms % 2 == 0, "config.num_sms % 2 == 0")
        host_assert(self.group_size in NORMAL_RANKS, f"Unsupported ranks: {self.group_size}")

    def _handle(
        self, received: ReceivedRows, is_token_in_rank: torch.Tensor, config: Config
    ) -> tuple:
        num_ranks = self.group_size
        rank_prefix = torch.zeros(num_ranks, num_ranks, dtype=I32)
        rank_prefix[:, self.rank] = torch.tensor(received.source_counts).cumsum(0)
        channels = torch.zeros(num_ranks, config.num_channels, dtype=I32)
        send_head = torch.where(is_token_in_rank, 0, -1).to(I32)
        src_idx = received.src_idx
        return (rank_prefix, channels, channels.clone(), src_idx, is_token_in_rank, send_head)
