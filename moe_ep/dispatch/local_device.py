"""Dispatch and combine of one rank on a GPU: Triton kernels from end to end, no word from the host.

The layout has as many rows as the worst routing of so many tokens would need, and says on the
device which are real; so a captured step serves any routing.

Shape letters: T tokens, K choices per token, H hidden.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_ep.dispatch.base import Dispatched, DispatchSpec
from moe_ep.dispatch.encode import encode_rows

if TYPE_CHECKING:
    from moe_ep.kernels.permute import Places


@dataclass(frozen=True)
class DeviceHandle:
    places: "Places"
    topk_weights: torch.Tensor


def dispatch_on_device(
    x: torch.Tensor, topk_slots: torch.Tensor, topk_weights: torch.Tensor, spec: DispatchSpec
) -> Dispatched:
    """As ``Dispatcher.dispatch``; slots must be in range, which is not checked: it would wait."""
    from moe_ep.kernels.permute import permute, place_contiguous

    places = place_contiguous(
        topk_slots.contiguous(), num_slots=spec.num_slots, alignment=spec.row_alignment
    )
    rows, scales = encode_rows(x, spec.payload_dtype, spec.scale_format)
    return Dispatched(
        rows=permute(rows, places),
        scales=None if scales is None else permute(scales, places, is_column_major=True),
        layout=places.layout,
        row_weights=None,
        handle=DeviceHandle(places, topk_weights.contiguous()),
    )


def combine_on_device(y: torch.Tensor, handle: DeviceHandle) -> torch.Tensor:
    from moe_ep.kernels.permute import unpermute

    return unpermute(y.contiguous(), handle.places, handle.topk_weights)
