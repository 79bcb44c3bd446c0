"""DeepEP V2, ``ElasticBuffer``: rows come back expanded, one per (token, slot), grouped by slot.

The layout is DeepGEMM's prefix-sum layout as it comes. This side quantises; the experts apply the
gate weights that travel with the rows, because the library's combine is a plain sum: first over the
slots of a rank, rounded to bfloat16, then over ranks, in an order that follows from the token's own
choices. Rows that the layout does not cover are never written, nor are their weights and scales.

A normal step lets the host wait for the counts and gets exactly the rows that came. A low-latency
step does not wait, so it can be captured: it gets as many rows as the worst routing would need, and
the layout says which are real. Both have the contiguous layout; a full-size y goes back.

The kernels are compiled when first used, once for every set of sizes, so sizes are constants of the
spec: one set for each mode.

Shape letters: T tokens of this rank, K choices, R ranks, S slots per rank, M rows, H hidden.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from moe_ep.config.exchange import v2_buffer_bytes, v2_limit
from moe_ep.dispatch import deep_ep_library as library
from moe_ep.dispatch.base import (
    ContiguousLayout,
    Dispatched,
    Dispatcher,
    DispatchSpec,
    Mode,
    Pending,
)
from moe_ep.dispatch.encode import encode_rows
from moe_ep.dispatch.routing import check_group, check_inputs, check_outputs
from moe_ep.fp8 import FP8

NETWORK_DEVICES = Path("/sys/class/infiniband")


class DeepEpV2Dispatcher(Dispatcher):
    """The dispatcher over NCCL's symmetric memory."""

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None) -> None:
        """Collective. Every call is told the spec's ``num_sms``: the library's own estimate reads
        link speeds from command-line tools and assumes a balanced gate.

        Sets ``EP_DISABLE_GIN=1`` in this process when the machine has no RDMA device: the library
        asks for one even if all ranks are on one node.
        """
        if (problem := self.supports(spec)) is not None:
            raise ValueError(problem)
        group = check_group(group, spec)
        if not _has_network_device():
            os.environ.setdefault("EP_DISABLE_GIN", "1")
        deep_ep = library.load_deep_ep()
        self.spec = spec
        self._topk_idx_t = deep_ep.topk_idx_t
        self._buffer: Any = deep_ep.ElasticBuffer(
            group,
            num_max_tokens_per_rank=_max_tokens(spec),
            hidden=spec.hidden,
            num_topk=spec.num_topk,
            use_fp8_dispatch=spec.payload_dtype is FP8,
            explicitly_destroy=True,
        )

    @classmethod
    def supports(cls, spec: DispatchSpec) -> str | None:
        return library.common_problem(spec) or v2_limit(spec) or library.library_problem()

    @classmethod
    def buffer_bytes(cls, spec: DispatchSpec) -> int:
        """Device memory of one rank's buffer and workspace when all ranks are on one NVLink node.

        The library's formula (``csrc/elastic/buffer.hpp``, DeepEP 2.1.0). Over several nodes it
        adds forwarding buffers that depend on the topology it finds: then ask its
        ``ElasticBuffer.get_buffer_size_hint`` with the group.
        """
        return v2_buffer_bytes(spec, is_fp8=spec.payload_dtype is FP8)

    @classmethod
    def capture_problem(cls, mode: Mode) -> str | None:
        return "the host waits for the counts" if mode is Mode.NORMAL else None

    def dispatch(
        self, *, x: torch.Tensor, topk_slots: torch.Tensor, topk_weights: torch.Tensor, mode: Mode
    ) -> Pending[Dispatched]:
        """See ``Dispatcher``. A slot may occur once among the choices of a token, or the kernel
        ends the process; slots must be in range; neither is checked, as that would wait for the
        device."""
        spec = self.spec
        check_inputs(x=x, topk_slots=topk_slots, topk_weights=topk_weights, mode=mode, spec=spec)
        rows, scales = encode_rows(x, spec.payload_dtype, spec.scale_format)
        is_normal = mode is Mode.NORMAL
        received, _, row_weights, handle, event = self._buffer.dispatch(
            rows if scales is None else (rows, scales),
            topk_idx=topk_slots.to(self._topk_idx_t).contiguous(),
            topk_weights=topk_weights.contiguous(),
            num_experts=spec.num_slots,
            num_max_tokens_per_rank=spec.max_tokens_per_rank if is_normal else spec.capacity,
            expert_alignment=spec.row_alignment,
            num_sms=spec.num_sms,
            async_with_compute_stream=True,
            do_cpu_sync=is_normal,
            do_expand=True,
            use_tma_aligned_col_major_sf=scales is not None,
        )
        received_rows, received_scales = (received, None) if scales is None else received
        # Without expand the same field holds sums of padded counts, which no layout has.
        psum = handle.psum_num_recv_tokens_per_expert
        dispatched = Dispatched(
            rows=received_rows,
            scales=received_scales,
            layout=ContiguousLayout(psum, spec.row_alignment),
            row_weights=row_weights,
            handle=handle,
        )
        return _AfterEvent(event, dispatched)

    def combine(self, *, y: torch.Tensor, dispatched: Dispatched) -> Pending[torch.Tensor]:
        check_outputs(y, dispatched, self.spec)
        out, _, event = self._buffer.combine(
            y.contiguous(), dispatched.handle, async_with_compute_stream=True
        )
        return _AfterEvent(event, out)

    def destroy(self) -> None:
        """Collective on the first call."""
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            buffer.destroy()


@dataclass(frozen=True)
class _AfterEvent(Pending[Any]):
    event: Any
    value: Any

    def wait(self) -> Any:
        self.event.current_stream_wait()
        return self.value


def _max_tokens(spec: DispatchSpec) -> int:
    return max(spec.max_tokens_per_rank, spec.capacity, 1)


def _has_network_device() -> bool:
    return NETWORK_DEVICES.is_dir() and any(NETWORK_DEVICES.iterdir())
