"""The two modes of DeepEP V1, each on a ``Buffer`` that it is given; see ``deep_ep_v1.py``.

Shape letters: T tokens of this rank, K choices, N rows received, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from moe_ep.config.exchange import v1_rounded_capacity
from moe_ep.dispatch.base import Dispatched, DispatchSpec, MaskedLayout, Pending, T
from moe_ep.dispatch.encode import encode_rows
from moe_ep.dispatch.expand import Expansion, expand
from moe_ep.fp8 import FP8, ScaleFormat

# Micro-batches between their dispatch and their combine: the library has two buffers.
MAX_OPEN_DISPATCHES = 2


@dataclass(frozen=True)
class NormalHandle:
    """handle: the library's. weights: float32 ``[N, K]`` of the received rows."""

    handle: tuple
    expansion: Expansion
    weights: torch.Tensor


@dataclass(frozen=True)
class _OnWait(Pending[T]):
    finish: Callable[[], T]

    def wait(self) -> T:
        return self.finish()


class NormalMode:
    def __init__(self, deep_ep: ModuleType, buffer: Any, spec: DispatchSpec) -> None:
        self._buffer, self._spec = buffer, spec
        self._topk_idx_t = deep_ep.topk_idx_t
        # Kept, so that dispatch and combine have the same number of SMs whoever changes it later.
        self._dispatch_config = deep_ep.Buffer.get_dispatch_config(spec.num_ranks)
        self._combine_config = deep_ep.Buffer.get_combine_config(spec.num_ranks)

    def dispatch(
        self, x: torch.Tensor, topk_slots: torch.Tensor, topk_weights: torch.Tensor
    ) -> Pending[Dispatched]:
        spec = self._spec
        rows, scales = encode_rows(x, spec.payload_dtype, spec.scale_format)
        topk_idx = topk_slots.to(self._topk_idx_t).contiguous()
        per_rank, per_rdma_rank, per_slot, is_in_rank, _ = self._buffer.get_dispatch_layout(
            topk_idx, spec.num_slots
        )
        received, slots, weights, slot_counts, handle, event = self._buffer.dispatch(
            rows if scales is None else (rows, scales),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_slot,
            topk_idx=topk_idx,
            topk_weights=topk_weights.contiguous(),
            expert_alignment=spec.row_alignment,
            config=self._dispatch_config,
            async_finish=True,
        )

        def finish() -> Dispatched:
            event.current_stream_wait()
            expansion = expand(
                slots.long(),
                num_slots=spec.num_slots_per_rank,
                num_rows=sum(slot_counts),
                alignment=spec.row_alignment,
            )
            received_rows, received_scales = (received, None) if scales is None else received
            return Dispatched(
                rows=expansion.copy(received_rows),
                scales=None
                if received_scales is None
                else expansion.copy(received_scales, is_column_major=True),
                layout=expansion.layout,
                row_weights=None,
                handle=NormalHandle(handle, expansion, weights),
            )

        return _OnWait(finish)

    def combine(self, y: torch.Tensor, handle: Any) -> Pending[torch.Tensor]:
        partial = handle.expansion.weighted_sums(y, handle.weights)
        out, _, event = self._buffer.combine(
            partial, handle.handle, config=self._combine_config, async_finish=True
        )

        def finish() -> torch.Tensor:
            event.current_stream_wait()
            return out

        return _OnWait(finish)


@dataclass(frozen=True)
class LowLatencyHandle:
    """handle: the library's. The routing is needed again to combine."""

    handle: tuple
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


class _Hooked(Pending[T]):
    """A low-latency call that was issued; ``receive`` may be called early and is done once."""

    def __init__(self, hook: Callable[[], None], value: T) -> None:
        self._hook: Callable[[], None] | None = hook
        self._value = value

    def receive(self) -> None:
        if self._hook is not None:
            hook, self._hook = self._hook, None
            hook()

    def wait(self) -> T:
        self.receive()
        return self._value


class LowLatencyMode:
    """Two micro-batches may be between their dispatch and their combine, but the library lets only
    one call be issued and not received: sending the next clears the counters of the one before. So
    a send first receives what is still open. What a dispatch or a combine returned is valid until
    the second call after it.
    """

    def __init__(self, deep_ep: ModuleType, buffer: Any, spec: DispatchSpec) -> None:
        self._buffer, self._spec = buffer, spec
        self._topk_idx_t = deep_ep.topk_idx_t
        self._num_tokens = v1_rounded_capacity(spec)
        self._open: _Hooked[Any] | None = None
        self._num_open_dispatches = 0

    def dispatch(
        self, x: torch.Tensor, topk_slots: torch.Tensor, topk_weights: torch.Tensor
    ) -> Pending[Dispatched]:
        spec = self._spec
        if self._num_open_dispatches == MAX_OPEN_DISPATCHES:
            raise RuntimeError(
                f"{MAX_OPEN_DISPATCHES} low-latency dispatches have not been combined; "
                "the buffers of a third would be those of the first"
            )
        self.receive_open()
        topk_idx = topk_slots.to(self._topk_idx_t).contiguous()
        is_ue8m0 = spec.payload_dtype is FP8 and spec.scale_format is ScaleFormat.UE8M0
        received, counts, handle, _, hook = self._buffer.low_latency_dispatch(
            x.to(torch.bfloat16).contiguous(),
            topk_idx,
            self._num_tokens,
            spec.num_slots,
            use_fp8=spec.payload_dtype is FP8,
            round_scale=is_ue8m0,
            use_ue8m0=is_ue8m0,
            return_recv_hook=True,
        )
        self._num_open_dispatches += 1
        rows, scales = received if isinstance(received, tuple) else (received, None)
        routing = LowLatencyHandle(handle, topk_idx, topk_weights.contiguous())
        dispatched = Dispatched(rows, scales, MaskedLayout(counts), None, routing)
        return self._issued(hook, dispatched)

    def combine(self, y: torch.Tensor, handle: Any) -> Pending[torch.Tensor]:
        self.receive_open()
        out, _, hook = self._buffer.low_latency_combine(
            y.contiguous(),
            handle.topk_idx,
            handle.topk_weights,
            handle.handle,
            return_recv_hook=True,
        )
        self._num_open_dispatches -= 1
        return self._issued(hook, out)

    def receive_open(self) -> None:
        """Receive the call that was issued last, unless that has been done."""
        if self._open is not None:
            self._open.receive()
            self._open = None

    def clean(self) -> None:
        self.receive_open()
        spec = self._spec
        self._buffer.clean_low_latency_buffer(self._num_tokens, spec.hidden, spec.num_slots)

    def _issued(self, hook: Callable[[], None], value: T) -> Pending[T]:
        pending = _Hooked(hook, value)
        self._open = pending
        return pending
