"""The V2 ``ElasticBuffer`` on one NVLink node, expanded layout.

Shape letters: T tokens of this rank, K choices, R ranks, E experts, S of this rank, H hidden.
"""

import os
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.emulators.cuda_graph import launch as launch_kernel
from tests.emulators.cuda_graph import refuse_capture
from tests.emulators.deep_ep.checks import (
    check_routing,
    check_tensor,
    check_torch_deterministic,
    device_assert,
    host_assert,
    take,
)
from tests.emulators.deep_ep.config import (
    ELASTIC_ALIGNMENT,
    elastic_size,
    elastic_size_hint,
    topk_idx_t,
)
from tests.emulators.deep_ep.event import EventHandle, EventOverlap, check_v2_event, launch
from tests.emulators.deep_ep.exchange import Channel, Part, Ticket, agree
from tests.emulators.deep_ep.expansion import EPHandle, Expansion, returned_places, sum_in_bf16
from tests.emulators.unwritten import FP8, GARBAGE, unwritten

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
MAX_RANKS, MAX_EXPERTS, MAX_LOCAL_EXPERTS, MAX_TOPK = 1024, 2048, 256, 32
NUM_DEVICE_SMS = 132


class _Message:
    """What the send kernel of a call leaves for its receive kernel."""

    def __init__(self, channel: Channel | None, call: str, common: dict[str, Any]) -> None:
        assert channel is not None
        self._channel, self._call, self._common = channel, call, common
        self._ticket: Ticket | None = None

    def post(self, parts: list[Part]) -> None:
        self._ticket = self._channel.post(self._call, self._common, parts)

    def collect(self) -> list[Part]:
        assert self._ticket is not None
        return self._channel.collect(self._ticket)


class ElasticBuffer:
    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        if num_cpu_bytes or deterministic or not allow_multiple_reduction or group.size() > 8:
            raise NotImplementedError("not emulated")
        has_network = Path("/sys/class/infiniband").exists()
        host_assert(bool(os.environ.get("EP_DISABLE_GIN")) or has_network, "GIN is available")
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(
                group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
            )
        host_assert(num_bytes > 0 and num_bytes % ELASTIC_ALIGNMENT == 0, "num_bytes % 2 MiB")
        agree(group, "the construction of ElasticBuffer", (num_bytes, num_max_tokens_per_rank))
        self.group, self.rank_idx, self.num_ranks = group, group.rank(), group.size()
        self.num_bytes = num_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.explicitly_destroy = explicitly_destroy
        self.kernels: set[tuple[Any, ...]] = set()  # each is an nvcc run in the library
        self._channel: Channel | None = Channel(group)
        self._random = random.Random(self.rank_idx)

    def destroy(self) -> None:
        assert self.explicitly_destroy
        if self._channel is not None:
            self._channel.barrier("destroy", {})
            self._channel = None

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        return elastic_size_hint(
            num_ranks=group.size(),
            num_max_tokens=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            use_fp8_dispatch=use_fp8_dispatch,
            allow_multiple_reduction=allow_multiple_reduction,
        )

    @staticmethod
    def capture() -> EventHandle:
        return EventHandle()

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, ...]:
        check_torch_deterministic()
        if handle is not None or not do_expand or topk_idx is None or topk_weights is None:
            raise NotImplementedError("only the expanded layout, with weights, is emulated")
        if do_zero_padding or num_sms == 0 or cumulative_local_expert_recv_stats is not None:
            raise NotImplementedError("zeroed padding, estimated SMs and statistics")
        self._check_call(previous_event, allocate_on_comm_stream, num_sms)
        num_max_tokens = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        alignment, do_cpu_sync = expert_alignment or 1, do_cpu_sync in (None, True)
        assert num_experts is not None
        rows, sf = x if isinstance(x, tuple) else (x, None)
        self._check_rows(rows, sf, topk_idx, topk_weights, num_max_tokens, num_experts)
        packs = 0 if sf is None else sf.shape[1]
        kernel = (num_max_tokens, num_experts, topk_idx.shape[1], rows.shape[1], rows.dtype)
        self._use_kernel("dispatch", *kernel, packs, alignment, num_sms)

        inputs = {"x": rows, "topk_idx": topk_idx, "topk_weights": topk_weights}
        inputs |= {} if sf is None else {"sf": sf}
        num_local = num_experts // self.num_ranks
        message = _Message(self._channel, "v2 dispatch", {"kernel": kernel, "alignment": alignment})

        def send() -> None:
            check_routing(topk_idx, num_experts)
            message.post([self._part(inputs, r * num_local, num_local) for r in self._ranks])

        launch_kernel(send)
        if do_cpu_sync:
            refuse_capture("V2 dispatch with do_cpu_sync: the host waits for the counts")
        expansion = Expansion(
            num_ranks=self.num_ranks,
            order=self._random,
            num_max=num_max_tokens,
            num_local=num_local,
            num_topk=topk_idx.shape[1],
            alignment=alignment,
        )
        out = expansion.allocate(
            message.collect() if do_cpu_sync else None,
            rows,
            sf,
            is_column_major=use_tma_aligned_col_major_sf,
        )
        is_async = async_with_compute_stream
        event = launch(lambda: out.fill(expansion.sources or message.collect()), is_async=is_async)
        kept = topk_idx.clone() if do_handle_copy else topk_idx
        recv_x = out.x if out.sf is None else (out.x, out.sf)
        new_handle = out.handle(kept, num_experts, num_sms)
        return recv_x, None, out.weights, new_handle, EventOverlap(event)

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle = None,  # type: ignore[assignment]
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        check_torch_deterministic()
        if topk_weights is not None or bias is not None:
            raise NotImplementedError("reduced weights and bias are not emulated")
        self._check_call(previous_event, allocate_on_comm_stream, num_sms or handle.num_sms)
        hidden, num_topk = x.shape[1], handle.topk_idx.shape[1]
        # Stricter than the library, which reads past the end of a trimmed tensor.
        check_tensor("x", x, [BF16], (handle.num_expanded_tokens, None))
        host_assert(hidden % 256 == 0, "nvcc fails: hidden % 256")
        self._use_kernel("combine", handle.num_max_tokens_per_rank, hidden, num_topk)
        combined = unwritten((len(handle.topk_idx), hidden), BF16)
        num_local = handle.num_experts // self.num_ranks
        message = _Message(self._channel, "v2 combine", {"hidden": hidden})

        def send() -> None:
            num_tokens = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
            device_assert(num_tokens != GARBAGE, "combine before the wait for its dispatch")
            metadata = handle.recv_src_metadata[:num_tokens].long()
            sums = sum_in_bf16(x, metadata[:, 2:])
            sources = metadata[:, 0] // handle.num_max_tokens_per_rank
            tokens = metadata[:, 0] % handle.num_max_tokens_per_rank
            chosen = [sources == r for r in self._ranks]
            message.post([{"x": sums[is_to], "token": tokens[is_to]} for is_to in chosen])

        def publish() -> None:
            places, pool = returned_places(handle.topk_idx, message.collect(), num_local)
            combined.copy_(sum_in_bf16(pool, places))

        launch_kernel(send)
        return combined, None, EventOverlap(launch(publish, is_async=async_with_compute_stream))

    @property
    def _ranks(self) -> range:
        return range(self.num_ranks)

    def _use_kernel(self, *key: Any) -> None:
        if key not in self.kernels:
            refuse_capture("a kernel that was never used is compiled and loaded first")
        self.kernels.add(key)

    def _check_call(
        self, previous_event: object, allocate_on_comm_stream: bool, num_sms: int
    ) -> None:
        assert self._channel is not None, "destroyed"
        check_v2_event(previous_event, allocate_on_comm_stream=allocate_on_comm_stream)
        host_assert(0 < num_sms <= NUM_DEVICE_SMS, "num_sms")

    def _check_rows(
        self,
        rows: torch.Tensor,
        sf: torch.Tensor | None,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_max_tokens: int,
        num_experts: int,
    ) -> None:
        num_tokens, num_topk = topk_idx.shape
        check_tensor("x", rows, [BF16] if sf is None else [FP8], (num_tokens, None))
        check_tensor("topk_idx", topk_idx, [topk_idx_t], (None, None))
        check_tensor("topk_weights", topk_weights, [F32], (num_tokens, num_topk))
        if sf is not None:
            check_tensor("sf", sf, [F32, I32], (num_tokens, None), is_contiguous=False)
        hidden = rows.shape[1]
        host_assert(num_tokens <= num_max_tokens, "num_tokens <= num_max_tokens_per_rank")
        host_assert(hidden * rows.element_size() % 32 == 0, "row bytes % 32")
        host_assert(self.num_ranks <= MAX_RANKS and num_experts <= MAX_EXPERTS, "ranks, experts")
        host_assert(num_experts % self.num_ranks == 0, "num_experts % num_ranks")
        host_assert(num_experts // self.num_ranks <= MAX_LOCAL_EXPERTS, "local experts")
        host_assert(num_topk <= MAX_TOPK, "nvcc fails: num_topk <= 32")
        needed = elastic_size(
            num_ranks=self.num_ranks,
            num_max_tokens=num_max_tokens,
            hidden=hidden,
            num_topk=num_topk,
            element_size=rows.element_size(),
            num_sf_packs=0 if sf is None else sf.shape[1],
            allow_multiple_reduction=True,
        )
        host_assert(needed <= self.num_bytes, "num_bytes is too small")

    def _part(self, inputs: Part, first_expert: int, num_local: int) -> Part:
        local = inputs["topk_idx"] - first_expert
        is_local = (local >= 0) & (local < num_local)
        tokens = is_local.any(dim=1).nonzero().flatten().tolist()
        self._random.shuffle(tokens)
        index = torch.tensor(tokens, dtype=torch.int64)
        part = {name: take(tensor, index) for name, tensor in inputs.items()}
        return {**part, "topk_idx": local.masked_fill(~is_local, -1)[index], "token": index}
