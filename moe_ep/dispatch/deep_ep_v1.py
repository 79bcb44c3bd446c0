"""DeepEP V1, ``Buffer``: normal mode for prefill, low-latency mode for decode.

Normal mode: this side quantises; a token travels once per rank; the received rows are laid out per
slot here, and before the way back weighted and added per row, in float32 in order of k, because the
library's combine is a plain sum over ranks. The host waits for the counts, so no graph can hold it.

Low-latency mode: the kernel quantises and lays out (masked, scales column-major), and its combine
applies the weights. Nothing waits for the device. A call is issued when it starts and received by
its hook in ``wait``; see ``LowLatencyMode`` for what may be in flight. The library alternates two
buffers by a count kept on the host, so a captured graph must hold whole dispatch-combine pairs and
no eager low-latency call may stand alone between replays.

Only modes that the spec has get a buffer. Up to eight ranks, each has one of its own and none ever
has to be cleaned. Over several nodes NVSHMEM can be initialised only once, so they share one, which
is cleaned on the way from normal to low-latency mode: by ``prepare``, which a runner calls before
it replays a graph.

Shape letters: T tokens of this rank, K choices, R ranks, S slots per rank, n most tokens of a rank
in low-latency mode, N rows received, M rows of the layout, H hidden.
"""

from types import ModuleType
from typing import Any

import torch
from torch.distributed import ProcessGroup

from moe_ep.config.exchange import (
    v1_buffer_bytes,
    v1_has_one_buffer,
    v1_limit,
    v1_rounded_capacity,
)
from moe_ep.dispatch import deep_ep_library as library
from moe_ep.dispatch.base import Dispatched, Dispatcher, DispatchSpec, Mode, Pending
from moe_ep.dispatch.deep_ep_v1_modes import LowLatencyMode, NormalHandle, NormalMode
from moe_ep.dispatch.routing import check_group, check_inputs, check_outputs


class DeepEpV1Dispatcher(Dispatcher):
    """low_latency_tokens: n, the spec's capacity rounded up so that a slot's R * n rows are whole
    blocks of the grouped GEMM. The limit on tokens stays the spec's capacity.
    """

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None) -> None:
        """Collective. The spec's ``num_sms`` are those of normal mode; low-latency kernels take
        what they need."""
        if (problem := self.supports(spec)) is not None:
            raise ValueError(problem)
        group = check_group(group, spec)
        deep_ep = library.load_deep_ep()
        self.spec = spec
        self.low_latency_tokens = v1_rounded_capacity(spec)
        deep_ep.Buffer.set_num_sms(spec.num_sms)  # of configs made from here on
        buffers = _make_buffers(deep_ep, spec, group)
        self._buffers = list({id(buffer): buffer for buffer in buffers.values()}.values())
        self._normal: NormalMode | None = None
        self._low_latency: LowLatencyMode | None = None
        if Mode.NORMAL in buffers:
            self._normal = NormalMode(deep_ep, buffers[Mode.NORMAL], spec)
        if Mode.LOW_LATENCY in buffers:
            self._low_latency = LowLatencyMode(deep_ep, buffers[Mode.LOW_LATENCY], spec)
        self._needs_cleaning = False

    @classmethod
    def supports(cls, spec: DispatchSpec) -> str | None:
        return library.common_problem(spec) or v1_limit(spec) or library.library_problem()

    @classmethod
    def buffer_bytes(cls, spec: DispatchSpec) -> int:
        """Device memory of one rank's buffers; needs neither the library nor a device."""
        return v1_buffer_bytes(spec).total(spec)

    @classmethod
    def capture_problem(cls, mode: Mode) -> str | None:
        return "the host waits for the counts" if mode is Mode.NORMAL else None

    def prepare(self, mode: Mode) -> None:
        """Clean the buffer, where both modes share one and normal mode has used it."""
        if mode is Mode.LOW_LATENCY and self._low_latency and self._needs_cleaning:
            self._low_latency.clean()
            self._needs_cleaning = False

    def dispatch(
        self, *, x: torch.Tensor, topk_slots: torch.Tensor, topk_weights: torch.Tensor, mode: Mode
    ) -> Pending[Dispatched]:
        """See ``Dispatcher``. A slot may occur once among the choices of a token, and slots must be
        in range; neither is checked, because that would wait for the device."""
        check_inputs(
            x=x, topk_slots=topk_slots, topk_weights=topk_weights, mode=mode, spec=self.spec
        )
        exchange = self._normal if mode is Mode.NORMAL else self._low_latency
        if exchange is None:
            raise ValueError(f"mode: {mode.value} given, which the spec does not have")
        self.prepare(mode)
        if mode is Mode.NORMAL:
            self._needs_cleaning = len(self._buffers) < len(self.spec.modes)
        return exchange.dispatch(x, topk_slots, topk_weights)

    def combine(self, *, y: torch.Tensor, dispatched: Dispatched) -> Pending[torch.Tensor]:
        check_outputs(y, dispatched, self.spec)
        is_normal = isinstance(dispatched.handle, NormalHandle)
        exchange = self._normal if is_normal else self._low_latency
        assert exchange is not None
        return exchange.combine(y, dispatched.handle)

    def destroy(self) -> None:
        """Collective on the first call."""
        if self._low_latency is not None:
            self._low_latency.receive_open()
        while self._buffers:
            self._buffers.pop().destroy()


def _make_buffers(deep_ep: ModuleType, spec: DispatchSpec, group: ProcessGroup) -> dict[Mode, Any]:
    """The buffer of each mode that the spec has; may be one and the same."""
    sizes = v1_buffer_bytes(spec)
    rdma, slots = sizes.low_latency_rdma, spec.num_slots_per_rank  # a queue pair per local slot
    if v1_has_one_buffer(spec):
        shared = deep_ep.Buffer(
            group,
            sizes.nvl,
            max(sizes.normal_rdma, rdma),
            low_latency_mode=Mode.LOW_LATENCY in spec.modes,
            num_qps_per_rank=max(spec.num_sms, slots),
            explicitly_destroy=True,
        )
        return dict.fromkeys(spec.modes, shared)
    buffers = {}
    if Mode.NORMAL in spec.modes:
        buffers[Mode.NORMAL] = deep_ep.Buffer(group, sizes.nvl, explicitly_destroy=True)
    if Mode.LOW_LATENCY in spec.modes:
        buffers[Mode.LOW_LATENCY] = deep_ep.Buffer(
            group,
            num_rdma_bytes=rdma,
            low_latency_mode=True,
            num_qps_per_rank=slots,
            explicitly_destroy=True,
        )
    return buffers
