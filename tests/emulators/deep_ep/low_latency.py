"""The V1 low-latency calls: send at the call, receive in the hook, two buffers that alternate.

Shape letters: T tokens of this rank, K choices, R ranks, E experts, S experts of this rank, n most
tokens of a rank, M = R * n rows for each expert, H hidden.
"""

import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.emulators.cuda_graph import capturing, fork, join, refuse_capture
from tests.emulators.cuda_graph import launch as launch_kernel
from tests.emulators.deep_ep.checks import (
    check_routing,
    check_tensor,
    check_torch_deterministic,
    device_assert,
    host_assert,
    take,
)
from tests.emulators.deep_ep.config import low_latency_bytes, topk_idx_t
from tests.emulators.deep_ep.event import EventOverlap, launch
from tests.emulators.deep_ep.exchange import Channel, Part, Ticket
from tests.emulators.deep_ep.low_latency_rows import (
    DispatchOut,
    as_ue8m0,
    quantize_in_kernel,
    reduce,
    returned_rows,
)
from tests.emulators.unwritten import poison, unwritten

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
MAX_TOPK = 11


@dataclass
class _Call:
    """What the host settled of one call, and what its send kernel left for its receive kernel."""

    name: str
    common: dict[str, Any]
    results: list[torch.Tensor]
    buffer: int
    ticket: Ticket | None = None

    @property
    def sent(self) -> Ticket:
        assert self.ticket is not None
        return self.ticket


class LowLatency:
    """The low-latency half of ``Buffer``."""

    rank: int
    group_size: int
    group: dist.ProcessGroup
    low_latency_mode: bool
    num_rdma_bytes: int
    nvshmem_qp_depth: int
    runtime: types.SimpleNamespace | None
    _channel: Channel
    _random: random.Random

    def _start_low_latency(self, num_qps_per_rank: int) -> None:
        self._num_qps = num_qps_per_rank
        self._is_clean = True  # construction zeroes the memory
        self._sizes: tuple[int, int, int] | None = None
        self._open_hook: str | None = None
        self._alive: list[list[torch.Tensor]] = [[], []]  # results of the last two calls
        self._num_calls = 0  # on the host; a replay does not count
        self._last_buffer: int | None = None  # on the device
        self._zero_copy: torch.Tensor | None = None

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        host_assert(self.low_latency_mode, "low_latency_mode")
        self._check_no_hook_is_open("clean_low_latency_buffer")
        sizes = (num_max_dispatch_tokens_per_rank, hidden, num_experts)
        host_assert(low_latency_bytes(*sizes) <= self.num_rdma_bytes, "num_rdma_bytes")
        refuse_capture("clean_low_latency_buffer")
        self._channel.barrier("clean", {"sizes": sizes})
        self._is_clean, self._sizes, self._last_buffer = True, None, None

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, ...]:
        check_torch_deterministic()
        sizes = (num_max_dispatch_tokens_per_rank, x.shape[-1], num_experts)
        self._check_call(sizes, async_finish, return_recv_hook)
        if cumulative_local_expert_recv_stats is not None or round_scale != use_ue8m0:
            raise NotImplementedError("statistics and rounded float32 scales are not emulated")
        if dispatch_wait_recv_cost_stats is not None:
            check_tensor("wait stats", dispatch_wait_recv_cost_stats, [torch.int64], (None,))
            host_assert(len(dispatch_wait_recv_cost_stats) == self.group_size, "[R], not [R, R]")
        check_tensor("x", x, [BF16], (len(topk_idx), None))
        check_tensor("topk_idx", topk_idx, [topk_idx_t], (None, None))
        host_assert(len(x) <= num_max_dispatch_tokens_per_rank, "more tokens than n")
        device_assert(topk_idx.shape[1] <= MAX_TOPK, f"top-k {topk_idx.shape[1]} is over 11")
        num_local = num_experts // self.group_size
        common = {"sizes": sizes, "use_fp8": use_fp8, "use_ue8m0": use_ue8m0}
        out = DispatchOut(num_local, self.group_size, sizes, use_fp8=use_fp8, use_ue8m0=use_ue8m0)
        call = self._new_call("low_latency_dispatch", common, out.poisoned)

        def send() -> None:
            check_routing(topk_idx, num_experts)
            data = {"x": x}
            if use_fp8:
                rows, scales = quantize_in_kernel(x, round_scale=round_scale)
                data = {"x": rows, "scales": as_ue8m0(scales) if use_ue8m0 else scales}
            firsts = range(0, num_experts, num_local)
            self._send(call, [self._expert_rows(data, topk_idx, e, num_local) for e in firsts])

        def receive() -> None:
            out.fill(self._channel.collect(call.sent), self._random)

        launch_kernel(send)
        event, hook = self._finish(receive, async_finish, return_recv_hook)
        recv_x = out.x if out.scales is None else (out.x, out.scales)
        handle = (out.src_info, out.layout_range, *sizes)
        return recv_x, out.count, handle, event, hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        check_torch_deterministic()
        src_info, layout_range, num_max_tokens, hidden, num_experts = handle
        sizes = (num_max_tokens, hidden, num_experts)
        self._check_call(sizes, async_finish, return_recv_hook)
        if use_logfmt or combine_wait_recv_cost_stats is not None:
            raise NotImplementedError("logfmt and statistics are not emulated")
        num_local, num_rows = src_info.shape
        check_tensor("x", x, [BF16], (num_local, num_rows, hidden))
        check_tensor("topk_idx", topk_idx, [topk_idx_t], (None, None))
        check_tensor("topk_weights", topk_weights, [F32], tuple(topk_idx.shape))
        host_assert(len(topk_idx) <= num_max_tokens, "more tokens than n")
        combined = unwritten((len(topk_idx), hidden), BF16) if out is None else poison(out)
        check_tensor("out", combined, [BF16], (len(topk_idx), hidden))
        if zero_copy:
            device_assert(self._zero_copy is not None, "no combine buffer was asked for")
            assert self._zero_copy is not None
            x, self._zero_copy = self._zero_copy, None
        call = self._new_call("low_latency_combine", {"sizes": sizes}, [combined])

        def send() -> None:
            sources = range(self.group_size)
            self._send(call, [returned_rows(x, src_info, layout_range, r) for r in sources])

        def receive() -> None:
            # The kernel reads the routing again when it receives.
            received = self._channel.collect(call.sent)
            reduce(combined, topk_idx, topk_weights, received, num_local)

        launch_kernel(send)
        event, hook = self._finish(receive, async_finish, return_recv_hook)
        return combined, event, hook

    def get_next_low_latency_combine_buffer(self, handle: object) -> torch.Tensor:
        assert isinstance(handle, tuple)
        src_info, _, _, hidden, _ = handle
        storage = unwritten((*src_info.shape, hidden + 2 * hidden // 128), BF16)
        self._zero_copy = storage[:, :, :hidden]
        return self._zero_copy

    def _check_no_hook_is_open(self, call: str) -> None:
        device_assert(
            self._open_hook is None,
            f"{call} before the hook of {self._open_hook} was called: its data never arrive",
        )

    def _check_call(
        self, sizes: tuple[int, int, int], async_finish: bool, return_recv_hook: bool
    ) -> None:
        num_max_tokens, hidden, num_experts = sizes
        host_assert(self.runtime is not None, "destroyed")
        host_assert(self.low_latency_mode, "low_latency_mode")
        host_assert(not (async_finish and return_recv_hook), "async and return_recv_hook")
        assert self.nvshmem_qp_depth >= (num_max_tokens + 1) * 2
        host_assert(hidden in HIDDEN_SIZES, f"Unsupported hidden: {hidden}")
        host_assert(num_experts % self.group_size == 0 and num_experts >= 2, "num_experts")
        host_assert(self.group_size * num_max_tokens % 4 == 0, "TMA requires R * n % 4 == 0")
        host_assert(low_latency_bytes(*sizes) <= self.num_rdma_bytes, "num_rdma_bytes")
        device_assert(self._num_qps >= num_experts // self.group_size, "QPs >= local experts")
        self._check_no_hook_is_open("a low-latency call")
        device_assert(self._is_clean, "low-latency after normal mode without a clean")
        device_assert(self._sizes in (None, sizes), f"{sizes} after {self._sizes} without a clean")
        self._sizes = sizes

    def _expert_rows(
        self, data: Part, topk_idx: torch.Tensor, first_expert: int, num_local: int
    ) -> Part:
        """One row per (token, expert) for one rank, in the order in which places were drawn."""
        local = topk_idx - first_expert
        tokens, choices = ((local >= 0) & (local < num_local)).nonzero(as_tuple=True)
        order = list(range(len(tokens)))
        self._random.shuffle(order)
        tokens, choices = tokens[order], choices[order]
        rows = {name: take(tensor, tokens) for name, tensor in data.items()}
        return {**rows, "expert": local[tokens, choices], "token": tokens}

    def _new_call(self, name: str, common: dict[str, Any], results: list[torch.Tensor]) -> "_Call":
        """The host's part, in which it is settled which of the two buffers the kernels use."""
        self._num_calls += 1
        return _Call(name, common, results, self._num_calls % 2)

    def _send(self, call: "_Call", parts: list[Part]) -> None:
        """The send kernel; the results of the call before the previous one are gone with it."""
        device_assert(self._is_clean, "low-latency after normal mode without a clean")
        self._check_no_hook_is_open(call.name)
        device_assert(
            call.buffer != self._last_buffer,
            "two low-latency calls in a row use one buffer, whose counters the first left behind",
        )
        self._last_buffer = call.buffer
        for tensor in self._alive[call.buffer]:
            poison(tensor)
        self._alive[call.buffer] = call.results
        call.ticket = self._channel.post(call.name, call.common, parts)

    def _finish(
        self, receive: Callable[[], None], async_finish: bool, return_recv_hook: bool
    ) -> tuple[EventOverlap, Callable[[], None] | None]:
        if not return_recv_hook:
            return EventOverlap(launch(receive, is_async=async_finish)), None
        name = f"call {self._num_calls}"
        self._open_hook = name
        graph = capturing()

        def hook() -> None:
            device_assert(self._open_hook == name, f"the hook of {name} is called once, in time")
            host_assert(graph is capturing(), "the hook and its call are in one capture")
            self._open_hook = None
            join(receive)
            launch_kernel(receive)

        fork(receive, f"the hook of {name}")

        return EventOverlap(None), hook
