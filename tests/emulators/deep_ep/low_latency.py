"""The V1 low-latency calls: send at the call, receive in the hook, two buffers that alternate.

Shape letters: T tokens of this rank, K choices, R ranks, E experts, S experts of this rank, n most
tokens of a rank, M = R * n rows for each expert, H hidden.
"""

import random
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.emulators.deep_ep.checks import (
    FP8,
    check_routing,
    check_tensor,
    check_torch_deterministic,
    device_assert,
    host_assert,
    poison,
    put,
    take,
    unwritten,
)
from tests.emulators.deep_ep.config import low_latency_bytes, topk_idx_t
from tests.emulators.deep_ep.event import EventOverlap, launch
from tests.emulators.deep_ep.exchange import Channel, Part, Ticket

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
MAX_TOPK = 11
FP8_MAX = 448.0


def quantize_in_kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 ``[N, H]`` to e4m3 and float32 scales ``[N, H / 128]``, multiplying as the kernel does:
    the last bit may differ from a division by the scale."""
    blocks = x.float().unflatten(1, (-1, 128))
    amax = blocks.abs().amax(dim=2).clamp_min(1e-4)
    rows = (blocks * (FP8_MAX / amax).unsqueeze(2)).to(FP8).flatten(1)
    return rows, amax * torch.tensor(1 / FP8_MAX)


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
        self._num_calls = 0
        self._zero_copy: torch.Tensor | None = None

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        host_assert(self.low_latency_mode, "low_latency_mode")
        self._check_no_hook_is_open("clean_low_latency_buffer")
        sizes = (num_max_dispatch_tokens_per_rank, hidden, num_experts)
        host_assert(low_latency_bytes(*sizes) <= self.num_rdma_bytes, "num_rdma_bytes")
        self._channel.barrier("clean", {"sizes": sizes})
        self._is_clean, self._sizes = True, None

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
        if cumulative_local_expert_recv_stats is not None or round_scale or use_ue8m0:
            raise NotImplementedError("statistics and rounded scales are not emulated")
        if dispatch_wait_recv_cost_stats is not None:
            check_tensor("wait stats", dispatch_wait_recv_cost_stats, [torch.int64], (None,))
            host_assert(len(dispatch_wait_recv_cost_stats) == self.group_size, "[R], not [R, R]")
        check_tensor("x", x, [BF16], (len(topk_idx), None))
        check_tensor("topk_idx", topk_idx, [topk_idx_t], (None, None))
        host_assert(len(x) <= num_max_dispatch_tokens_per_rank, "more tokens than n")
        device_assert(topk_idx.shape[1] <= MAX_TOPK, f"top-k {topk_idx.shape[1]} is over 11")
        check_routing(topk_idx, num_experts)
        num_local = num_experts // self.group_size
        data = dict(zip(("x", "scales"), quantize_in_kernel(x), strict=True)) if use_fp8 else {}
        common = {"sizes": sizes, "use_fp8": use_fp8}
        parts = [
            self._expert_rows(data or {"x": x}, topk_idx, r * num_local, num_local)
            for r in range(self.group_size)
        ]
        out = _DispatchOut(num_local, self.group_size, sizes, use_fp8)
        ticket = self._send("low_latency_dispatch", common, parts, out.poisoned)

        def receive() -> None:
            out.fill(self._channel.collect(ticket), self._random)

        event, hook = self._finish(receive, async_finish, return_recv_hook)
        recv_x = (out.x, out.scales) if use_fp8 else out.x
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
        parts = [
            _returned_rows(x, src_info, layout_range, source) for source in range(self.group_size)
        ]
        ticket = self._send("low_latency_combine", {"sizes": sizes}, parts, [combined])
        # The kernel reads the routing again when it receives.
        routing = topk_idx.clone(), topk_weights.clone()

        def receive() -> None:
            _reduce(combined, *routing, self._channel.collect(ticket), num_local)

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

    def _send(
        self, call: str, common: dict[str, Any], parts: list[Part], results: list[torch.Tensor]
    ) -> Ticket:
        """Issue a call; the results of the call before the previous one are gone with it."""
        for tensor in self._alive[self._num_calls % 2]:
            poison(tensor)
        self._alive[self._num_calls % 2] = results
        self._num_calls += 1
        return self._channel.post(call, common, parts)

    def _finish(
        self, receive: Callable[[], None], async_finish: bool, return_recv_hook: bool
    ) -> tuple[EventOverlap, Callable[[], None] | None]:
        if not return_recv_hook:
            return EventOverlap(launch(receive, is_async=async_finish)), None
        name = f"call {self._num_calls}"
        self._open_hook = name

        def hook() -> None:
            device_assert(self._open_hook == name, f"the hook of {name} is called once, in time")
            self._open_hook = None
            receive()

        return EventOverlap(None), hook


class _DispatchOut:
    def __init__(
        self, num_local: int, num_ranks: int, sizes: tuple[int, int, int], use_fp8: bool
    ) -> None:
        num_max_tokens, hidden, _ = sizes
        num_rows = num_ranks * num_max_tokens
        self.x = unwritten((num_local, num_rows, hidden), FP8 if use_fp8 else BF16)
        scales = unwritten((num_local, hidden // 128, num_rows), F32)
        self.scales = scales.transpose(1, 2) if use_fp8 else None
        self.count = unwritten((num_local,), I32)
        self.src_info = unwritten((num_local, num_rows), I32)
        self.layout_range = unwritten((num_local, num_ranks), torch.int64)
        self.poisoned = [t for t in (self.x, self.scales, self.count) if t is not None]

    def fill(self, sources: list[Part], order: random.Random) -> None:
        for expert in range(len(self.count)):
            start = 0
            for source in order.sample(range(len(sources)), len(sources)):
                part = sources[source]
                chosen = (part["expert"] == expert).nonzero().flatten()
                rows = slice(start, start + len(chosen))
                put(self.x[expert], rows, take(part["x"], chosen))
                if self.scales is not None:
                    self.scales[expert, rows] = part["scales"][chosen]
                self.src_info[expert, rows] = part["token"][chosen].to(I32)
                self.layout_range[expert, source] = start << 32 | len(chosen)
                start = rows.stop
            self.count[expert] = start


def _returned_rows(
    x: torch.Tensor, src_info: torch.Tensor, layout_range: torch.Tensor, source: int
) -> Part:
    """The outputs for tokens of one source rank."""
    pieces = []
    for expert, packed in enumerate(layout_range[:, source].tolist()):
        start, count = packed >> 32, packed & 0xFFFFFFFF
        rows = slice(start, start + count)
        experts = torch.full((count,), expert)
        pieces.append((x[expert, rows], src_info[expert, rows].long(), experts))
    rows_of, tokens, experts_of = zip(*pieces, strict=True)
    return {"x": torch.cat(rows_of), "token": torch.cat(tokens), "expert": torch.cat(experts_of)}


def _reduce(
    combined: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    sources: list[Part],
    num_local: int,
) -> None:
    """Sum of weight times output over the choices, in float32 in order of k; -1 is skipped."""
    place: dict[tuple[int, int], torch.Tensor] = {}
    for source, part in enumerate(sources):
        experts = (part["expert"] + source * num_local).tolist()
        for row, key in enumerate(zip(part["token"].tolist(), experts, strict=True)):
            place[key] = part["x"][row]
    for token, experts in enumerate(topk_idx.tolist()):
        total = torch.zeros(combined.shape[1])
        for k, expert in enumerate(experts):
            if expert >= 0:
                device_assert((token, expert) in place, "an output that is waited for never comes")
                total += topk_weights[token, k] * place[token, expert].float()
        combined[token] = total.to(BF16)
