"""The expert contract: grouped SwiGLU feed-forward networks over dispatched rows.

Shape letters: S slots on this rank, H hidden, I expert intermediate.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from moe_ep.dispatch.base import Dispatched
from moe_ep.fp8 import FP8, ScaleFormat

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ExpertSpec:
    """Sizes and types of the experts of one layer on one rank.

    dtype: compute and output dtype, ``bfloat16`` or ``float32``.
    is_fp8: the checkpoint's expert weights are FP8 with 128x128 scales; activations are then
        quantised per 1x128 before the down projection too, as the GPU kernels do, unless the
        compute dtype is float32.
    device: where weights are kept and rows arrive.
    expected_rows: rows that a slot gets on average in a full low-latency step, when known; kernels
        are tuned by it, results do not depend on it.
    """

    num_slots: int
    hidden: int
    intermediate: int
    dtype: torch.dtype
    is_fp8: bool
    device: torch.device = CPU
    expected_rows: int | None = None


@dataclass(frozen=True)
class ExpertWeights:
    """One logical expert as a checkpoint holds it.

    gate, up: ``[I, H]``; down: ``[H, I]``; each BF16/FP16/FP32, or float8_e4m3fn with its
    ``*_scale`` float32 ``[ceil(rows / 128), ceil(cols / 128)]`` (value = weight * scale).
    """

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    gate_scale: torch.Tensor | None = None
    up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None


def check_slot(slot: int, spec: ExpertSpec) -> None:
    """Raises IndexError when the bank has no such slot."""
    if not 0 <= slot < spec.num_slots:
        raise IndexError(f"slot {slot} is not one of 0 to {spec.num_slots - 1}")


def check_rows(dispatched: Dispatched, spec: ExpertSpec) -> None:
    """Raises ValueError when the rows are not those of a bank of this spec; reads no counts."""
    rows, num_slots = dispatched.rows, dispatched.layout.num_slots
    if num_slots != spec.num_slots or rows.shape[-1] != spec.hidden:
        raise ValueError(
            f"expected {spec.num_slots} slots and rows of width {spec.hidden},"
            f" got {num_slots} slots and rows of shape {list(rows.shape)}"
        )


def check_scales(dispatched: Dispatched) -> None:
    """Raises ValueError when FP8 rows come without scales, or other rows with them."""
    rows, scales = dispatched.rows, dispatched.scales
    if (rows.dtype is FP8) != (scales is not None):
        given = "with" if scales is not None else "without"
        raise ValueError(f"rows of {rows.dtype} came {given} scales; FP8 rows, and no others, do")


class Experts(ABC):
    """The experts of one MoE layer that live on this rank."""

    spec: ExpertSpec
    row_alignment: int
    """What this backend needs of both layouts: slots start at multiples of it (contiguous), and
    have room for a multiple of it (masked: C)."""
    scale_format: ScaleFormat = ScaleFormat.FLOAT32
    """Of FP8 rows, as this backend multiplies them. One that wants UE8M0 takes float32 too: not
    every exchange can send it."""

    @abstractmethod
    def __init__(self, spec: ExpertSpec) -> None:
        """All slots are empty. Raises ValueError with the reason when the spec is not supported."""

    @classmethod
    @abstractmethod
    def supports(cls, spec: ExpertSpec) -> str | None:
        """None when this backend can serve the spec, else the reason why not."""

    @classmethod
    def capture_problem(cls) -> str | None:
        """None when ``__call__`` can be captured as a graph, else the reason why not."""
        return "the host reads the counts of every slot"

    @abstractmethod
    def load_slot(self, slot: int, weights: ExpertWeights) -> None:
        """Place an expert in a slot (0-based on this rank), replacing what it held."""

    @abstractmethod
    def slot_tensors(self, slot: int) -> list[torch.Tensor]:
        """What a slot holds, in this backend's own form: all of it, of the same shapes and dtypes
        for every slot of every bank with this spec. Not to be modified; may be views of it."""

    def stage(self, tensors: list[torch.Tensor]) -> object:
        """Make what ``slot_tensors`` gave, here or on another rank, ready for ``load_staged``.

        Touches nothing in use and may run in a thread beside ``__call__``. The tensors may be kept.
        """
        return [tensor.to(self.spec.device) for tensor in tensors]

    def load_staged(self, slot: int, staged: Any) -> None:
        """Place a staged expert in a slot: exactly what the slot that it came from held.

        In the order of the current stream and without waiting; addresses stay as they are, so that
        captured steps see it.
        """
        for kept, given in zip(self.slot_tensors(slot), staged, strict=True):
            kept.copy_(given)
            if given.is_cuda:  # staged on another stream, whose memory this copy still reads
                given.record_stream(torch.cuda.current_stream())

    @abstractmethod
    def __call__(self, dispatched: Dispatched) -> torch.Tensor:
        """Return ``down(silu(gate(x)) * up(x))`` for every valid row, laid out as the rows.

        Output dtype is the spec's. Applies ``dispatched.row_weights`` when given. Rows outside the
        layout are not read and are unspecified in the output.
        """
