"""DeepEP V1, ``Buffer``: normal mode for prefill, low-latency mode for decode.

Normal mode: this side quantises; a token travels once per rank; the received rows are laid out per
slot here, and before the way back weighted and added per row, in float32 in order of k, because the
library's combine is a plain sum over ranks. The host waits for the counts, so no graph can hold it.

Low-latency mode: the kernel quantises and lays out (masked, scales column-major), and its combine
applies the weights. Nothing waits for the device. A call is issued when it starts and received by
its hook in ``wait``; see ``LowLatencyMode`` for what may be in flight. The library alternates two
buffers by a count kept on the host, so a captured graph must hold whole dispatch-combine pairs and
no eager low-latency call may stand alone between replays.

Up to eight ranks, each mode has a buffer of its own and none ever has to be cleaned. Over several
nodes NVSHMEM can be initialised only once, so they share one, which is cleaned on the way from
normal to low-latency mode: by ``prepare``, which a runner calls before it replays a graph.

Shape letters: T tokens of this rank, K choices, R ranks, S slots per rank, n most tokens of a rank
in low-latency mode, N rows received, M rows of the layout, H hidden.
"""

from types import ModuleType
from typing import Any

import torch
from torch.distributed import ProcessGroup

from moe_ep.dispatch import deep_ep_library as library
from moe_ep.dispatch.base import Dispatched, Dispatcher, DispatchSpec, Mode, Pending
from moe_ep.dispatch.deep_ep_v1_limits import (
    buffer_sizes,
    has_one_buffer,
    rounded_capacity,
    spec_limits,
    total_bytes,
)
from moe_ep.dispatch.deep_ep_v1_modes import LowLatencyMode, NormalHandle, NormalMode
from moe_ep.dispatch.routing import check_group, check_inputs, check_outputs


class DeepEpV1Dispatcher(Dispatcher):
    """low_latency_tokens: n, the spec's capacity rounded up so that a slot's R * n rows are whole
    blocks of the grouped GEMM. The limit on tokens stays the spec's capacity.
    """

    def __init__(
        self, spec: DispatchSpec, group: ProcessGroup | None, *, num_sms: int = library.NUM_SMS
    ) -> None:
        """num_sms: of the normal-mode kernels; low-latency ones take what they need. Collective."""
        if (problem := self.supports(spec)) is not None:
            raise ValueError(problem)
        group = check_group(group, spec)
        deep_ep = library.load_deep_ep()
        self.spec = spec
        self.low_latency_tokens = rounded_capacity(spec)
        deep_ep.Buffer.set_num_sms(library.check_num_sms(num_sms))  # configs made from here on
        normal, low_latency = _make_buffers(deep_ep, spec, group, num_sms)
        self._buffers = [normal] if normal is low_latency else [normal, low_latency]
        self._normal = NormalMode(deep_ep, normal, spec)
        self._low_latency = LowLatencyMode(deep_ep, low_latency, spec)
        self._needs_cleaning = False

    @classmethod
    def supports(cls, spec: DispatchSpec) -> str | None:
        return spec_limits(spec) or library.library_problem()

    @classmethod
    def buffer_bytes(cls, spec: DispatchSpec, num_sms: int = library.NUM_SMS) -> int:
        """Device memory of one rank's buffers; needs neither the library nor a device."""
        return total_bytes(spec, buffer_sizes(spec, num_sms))

    def prepare(self, mode: Mode) -> None:
        """Make the buffer ready for a step of this mode. Collective when it has to clean, which
        all ranks know alike; not to be captured."""
        if mode is Mode.LOW_LATENCY and self._needs_cleaning:
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
        self.prepare(mode)
        if mode is Mode.NORMAL:
            self._needs_cleaning = len(self._buffers) == 1
            return self._normal.dispatch(x, topk_slots, topk_weights)
        return self._low_latency.dispatch(x, topk_slots, topk_weights)

    def combine(self, *, y: torch.Tensor, dispatched: Dispatched) -> Pending[torch.Tensor]:
        check_outputs(y, dispatched, self.spec)
        if isinstance(dispatched.handle, NormalHandle):
            return self._normal.combine(y, dispatched.handle)
        return self._low_latency.combine(y, dispatched.handle)

    def destroy(self) -> None:
        """Collective on the first call."""
        self._low_latency.receive_open()
        while self._buffers:
            self._buffers.pop().destroy()


def _make_buffers(
    deep_ep: ModuleType, spec: DispatchSpec, group: ProcessGroup, num_sms: int
) -> tuple[Any, Any]:
    """The buffers of normal and of low-latency mode; may be one and the same."""
    sizes = buffer_sizes(spec, num_sms)
    rdma, slots = sizes.low_latency_rdma, spec.num_slots_per_rank  # a queue pair per local slot
    if has_one_buffer(spec):
        shared = deep_ep.Buffer(
            group,
            sizes.nvl,
            max(sizes.normal_rdma, rdma),
            low_latency_mode=True,
            num_qps_per_rank=max(num_sms, slots),
            explicitly_destroy=True,
        )
        return shared, shared
    normal = deep_ep.Buffer(group, sizes.nvl, explicitly_destroy=True)
    low_latency = deep_ep.Buffer(
        group,
        num_rdma_bytes=rdma,
        low_latency_mode=True,
        num_qps_per_rank=slots,
        explicitly_destroy=True,
    )
    return normal, low_latency
