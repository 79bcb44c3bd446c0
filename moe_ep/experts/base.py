"""The expert contract: grouped SwiGLU feed-forward networks over dispatched rows.

Shape letters: S slots on this rank, H hidden, I expert intermediate.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from moe_ep.dispatch.base import Dispatched

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


class Experts(ABC):
    """The experts of one MoE layer that live on this rank."""

    spec: ExpertSpec
    row_alignment: int
    """What this backend needs of both layouts: slots start at multiples of it (contiguous), and
    have room for a multiple of it (masked: C)."""

    @abstractmethod
    def __init__(self, spec: ExpertSpec) -> None:
        """All slots are empty. Raises ValueError with the reason when the spec is not supported."""

    @classmethod
    @abstractmethod
    def supports(cls, spec: ExpertSpec) -> str | None:
        """None when this backend can serve the spec, else the reason why not."""

    @abstractmethod
    def load_slot(self, slot: int, weights: ExpertWeights) -> None:
        """Place an expert in a slot (0-based on this rank), replacing what it held."""

    @abstractmethod
    def __call__(self, dispatched: Dispatched) -> torch.Tensor:
        """Return ``down(silu(gate(x)) * up(x))`` for every valid row, laid out as the rows.

        Output dtype is the spec's. Applies ``dispatched.row_weights`` when given. Rows outside the
        layout are not read and are unspecified in the output.
        """
