"""One rank holds all slots: no communication, the same quantised payload, and one layout.

Both modes give the contiguous layout, since rows without gaps spare the experts a gather and a
scatter; the modes differ in their limits, as everywhere. On a GPU with Triton nothing goes through
the host: see ``local_device.py``.

Shape letters: T tokens, K choices per token, S slots, H hidden.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed import ProcessGroup

from moe_ep import kernels
from moe_ep.dispatch.base import Dispatched, Dispatcher, DispatchSpec, Mode, Pending, Ready
from moe_ep.dispatch.encode import encode_rows
from moe_ep.dispatch.layout import (
    Entries,
    LayoutBuffer,
    place,
    sum_order,
    weighted_sums,
)
from moe_ep.dispatch.local_device import DeviceHandle, combine_on_device, dispatch_on_device
from moe_ep.dispatch.routing import check_inputs, check_outputs, read_choices, spec_problem


@dataclass(frozen=True)
class _Handle:
    num_tokens: int
    entries: Entries
    positions: np.ndarray


class LocalDispatcher(Dispatcher):
    """The dispatcher of an engine with EP size 1."""

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None = None) -> None:
        if (problem := self.supports(spec)) is not None:
            raise ValueError(problem)
        self.spec = spec

    @classmethod
    def supports(cls, spec: DispatchSpec) -> str | None:
        if spec.num_ranks != 1:
            return f"num_ranks: {spec.num_ranks} given, local serves one rank only"
        return spec_problem(spec)

    @classmethod
    def capture_problem(cls, mode: Mode) -> str | None:
        is_on_device = kernels.are_used(torch.device("cuda"))
        return None if is_on_device else super().capture_problem(mode)

    def dispatch(
        self, *, x: torch.Tensor, topk_slots: torch.Tensor, topk_weights: torch.Tensor, mode: Mode
    ) -> Pending[Dispatched]:
        spec = self.spec
        if kernels.are_used(x.device):
            check_inputs(
                x=x, topk_slots=topk_slots, topk_weights=topk_weights, mode=mode, spec=spec
            )
            return Ready(dispatch_on_device(x, topk_slots, topk_weights, spec))
        choices = read_choices(
            x=x, topk_slots=topk_slots, topk_weights=topk_weights, mode=mode, spec=spec
        )
        entries = Entries(choices.tokens, choices.slots, choices.weights)
        places = place(entries, spec, Mode.NORMAL)
        buffer = LayoutBuffer(spec, Mode.NORMAL, places, x.device)
        if len(entries.rows):
            rows, scales = encode_rows(x[: entries.rows[-1] + 1], spec.payload_dtype)
            buffer.fill(places.positions, rows, scales, entries.rows)
        return Ready(buffer.finish(_Handle(len(x), entries, places.positions)))

    def combine(self, *, y: torch.Tensor, dispatched: Dispatched) -> Pending[torch.Tensor]:
        check_outputs(y, dispatched, self.spec)
        handle: _Handle | DeviceHandle = dispatched.handle
        if isinstance(handle, DeviceHandle):
            return Ready(combine_on_device(y, handle))
        entries = handle.entries
        starts = sum_order(entries.rows, handle.num_tokens)
        values = y.reshape(-1, self.spec.hidden)
        return Ready(weighted_sums(values, handle.positions, starts, entries.weights))

    def destroy(self) -> None:
        """Nothing is held."""
