"""Experts as grouped products of DeepGEMM, for Hopper (SM90) and Blackwell (SM100) GPUs.

FP8 weights are multiplied as they are stored: both products take FP8 rows with 1x128 scales, so the
activation is quantised between them. BF16 weights use the library's BF16 products. Counts stay on
the device; nothing here waits for it, and all addresses but those of the rows are constant, so that
a decode step can be captured.

Shape letters: S slots, C capacity, M rows, H hidden, I expert intermediate.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from moe_ep import kernels
from moe_ep.deep_gemm_library import DeepGemm, find_problem
from moe_ep.dispatch.base import ContiguousLayout, Dispatched, MaskedLayout
from moe_ep.experts.base import (
    Experts,
    ExpertSpec,
    ExpertWeights,
    check_rows,
    check_scales,
    check_slot,
)
from moe_ep.fp8 import BLOCK, FP8, dequantize_rows, new_nan, num_blocks

BF16 = torch.bfloat16
BF16_MULTIPLE = 64  # columns that the library's BF16 products take at a time

# What the library multiplies: a BF16 tensor, or FP8 and its scales.
Operand = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Product = Callable[[Operand, Operand, torch.Tensor], None]


class _Bank(NamedTuple):
    """One projection of all slots: weights ``[S, N, K]`` and, for FP8, their scales."""

    weights: torch.Tensor
    scales: torch.Tensor | None

    @property
    def operand(self) -> Operand:
        return self.weights if self.scales is None else (self.weights, self.scales)

    def store(self, slot: int, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        self.weights[slot].copy_(weight)
        if self.scales is not None and scale is not None:
            self.scales[slot].copy_(scale)

    def of_slot(self, slot: int) -> list[torch.Tensor]:
        return [part[slot] for part in self if part is not None]


class DeepGemmExperts(Experts):
    """See ``Experts``. Outputs of a slot that was never loaded are NaN: the counts, which would
    tell that it has rows, are not read on the host.

    In the masked layout C must be a multiple of ``row_alignment`` too: a product writes whole
    blocks of so many rows, and a smaller C would let one slot overwrite the next one's.
    """

    def __init__(self, spec: ExpertSpec) -> None:
        if (problem := self.supports(spec)) is not None:
            raise ValueError(problem)
        self.spec = spec
        self.library = DeepGemm()
        self.row_alignment = self.library.row_alignment
        if spec.is_fp8:
            self.scale_format = self.library.scale_format
        self._gate_up = self._bank(2 * spec.intermediate, spec.hidden)
        self._down = self._bank(spec.hidden, spec.intermediate)

    @classmethod
    def supports(cls, spec: ExpertSpec) -> str | None:
        if spec.dtype is not BF16:
            return f"dtype: {spec.dtype} given, deep_gemm computes in bfloat16"
        if spec.num_slots < 1:
            return f"num_slots: {spec.num_slots} given, must be at least 1"
        # FP8 gate and up share one weight, so neither may end within a block of scales.
        multiple = BLOCK if spec.is_fp8 else BF16_MULTIPLE
        for name in ("hidden", "intermediate"):
            size = getattr(spec, name)
            if size < 1 or size % multiple:
                return f"{name}: {size} given, deep_gemm needs a multiple of {multiple}"
        return find_problem()

    @classmethod
    def capture_problem(cls) -> str | None:
        return None

    def load_slot(self, slot: int, weights: ExpertWeights) -> None:
        """See ``Experts``. The weights are copied, in place and in the order of the current stream.

        Raises IndexError for a slot out of range, ValueError for a wrong shape or dtype, and for
        scales that are missing or too many; the slot then keeps what it held.
        """
        check_slot(slot, self.spec)
        hidden, intermediate = self.spec.hidden, self.spec.intermediate
        self._check("gate", weights.gate, weights.gate_scale, (intermediate, hidden))
        self._check("up", weights.up, weights.up_scale, (intermediate, hidden))
        self._check("down", weights.down, weights.down_scale, (hidden, intermediate))
        gate_up = torch.cat([weights.gate, weights.up])
        gate_up_scale = None
        if weights.gate_scale is not None and weights.up_scale is not None:
            gate_up_scale = torch.cat([weights.gate_scale, weights.up_scale])
        self._store(self._gate_up, slot, gate_up, gate_up_scale)
        self._store(self._down, slot, weights.down, weights.down_scale)

    def slot_tensors(self, slot: int) -> list[torch.Tensor]:
        return [*self._gate_up.of_slot(slot), *self._down.of_slot(slot)]

    def __call__(self, dispatched: Dispatched) -> torch.Tensor:
        """See ``Experts``. Raises ValueError when the rows or the layout do not fit the spec or
        the alignment, before any kernel runs."""
        self._check_rows(dispatched)
        *leading, _ = rows_shape = dispatched.rows.shape
        y = torch.empty(rows_shape, dtype=BF16, device=dispatched.rows.device)
        if not y.numel():
            return y
        multiply = self._product(dispatched.layout, leading[-1])
        gate_up = y.new_empty(*leading, 2 * self.spec.intermediate)
        multiply(self._input(dispatched), self._gate_up.operand, gate_up)
        hidden = self._activation(gate_up, dispatched)
        multiply(hidden, self._down.operand, y)
        return y

    def _product(self, layout: ContiguousLayout | MaskedLayout, num_rows: int) -> Product:
        """The library's function for these rows, its layout arguments filled in."""
        kind = "fp8" if self.spec.is_fp8 else "bf16"
        library = self.library.lib
        if isinstance(layout, MaskedLayout):
            masked = getattr(library, f"m_grouped_{kind}_gemm_nt_masked")
            expected_m = min(self.spec.expected_rows or num_rows, num_rows)
            return lambda a, b, d: masked(a, b, d, layout.counts, expected_m)
        # An alignment that is a multiple of the library's only makes it start slots early, on rows
        # of padding.
        contiguous = getattr(library, f"m_grouped_{kind}_gemm_nt_contiguous")
        return lambda a, b, d: contiguous(a, b, d, layout.psum, use_psum_layout=True)

    def _input(self, dispatched: Dispatched) -> Operand:
        rows, scales = dispatched.rows, dispatched.scales
        if not self.spec.is_fp8:
            return rows.to(BF16) if scales is None else dequantize_rows(rows, scales, BF16)
        return self.library.quantized(rows) if scales is None else self.library.rows(rows, scales)

    def _activation(self, gate_up: torch.Tensor, dispatched: Dispatched) -> Operand:
        """SwiGLU in float32, times the row weight, rounded once. ``[.., 2I]`` -> ``[.., I]``.

        Row weights are applied here, not to the output: the down projection is linear, and its
        output would be rounded a second time.
        """
        if kernels.are_used(gate_up.device):
            return self._activation_by_kernel(gate_up, dispatched)
        # Rows outside the layout are computed from whatever they hold, which costs no search for
        # them and reaches no other row.
        gate, up = gate_up.float().chunk(2, dim=-1)
        hidden = F.silu(gate).mul_(up)
        if dispatched.row_weights is not None:
            hidden.mul_(dispatched.row_weights.unsqueeze(-1))
        return self.library.quantized(hidden) if self.spec.is_fp8 else hidden.to(BF16)

    def _activation_by_kernel(self, gate_up: torch.Tensor, dispatched: Dispatched) -> Operand:
        from moe_ep.kernels.swiglu import swiglu

        values, scales = swiglu(
            gate_up,
            layout=dispatched.layout,
            intermediate=self.spec.intermediate,
            row_weights=dispatched.row_weights,
            quantizes=self.spec.is_fp8,
            scale_format=self.library.scale_format,
            is_column_major=True,
        )
        return values if scales is None else (values, scales)

    def _bank(self, num_rows: int, num_cols: int) -> _Bank:
        shape, device = (self.spec.num_slots, num_rows, num_cols), self.spec.device
        if not self.spec.is_fp8:
            return _Bank(torch.full(shape, torch.nan, dtype=BF16, device=device), None)
        weights = new_nan(shape, device)
        scales = self.library.empty_weight_scales(shape[0], shape[1:], device)
        return _Bank(weights, scales.fill_(1))

    def _store(
        self, bank: _Bank, slot: int, weight: torch.Tensor, scale: torch.Tensor | None
    ) -> None:
        if scale is not None:
            device = self.spec.device
            weight, scale = self.library.weight(weight.to(device), scale.to(device))
        bank.store(slot, weight, scale)

    def _check(
        self, name: str, weight: torch.Tensor, scale: torch.Tensor | None, shape: tuple[int, int]
    ) -> None:
        if tuple(weight.shape) != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(weight.shape)}")
        if not self.spec.is_fp8:
            if weight.dtype not in (BF16, torch.float16, torch.float32):
                raise ValueError(f"{name} must be BF16, FP16 or float32, got {weight.dtype}")
            if scale is not None:
                raise ValueError(f"{name}_scale is given, but {name} is {weight.dtype}")
            return
        if weight.dtype is not FP8:
            raise ValueError(f"{name} must be {FP8}, got {weight.dtype}")
        if scale is None:
            raise ValueError(f"{name} is FP8 and has no {name}_scale; its values are unknown")
        blocks = tuple(map(num_blocks, shape))
        if tuple(scale.shape) != blocks or scale.dtype is not torch.float32:
            given = f"{scale.dtype} {tuple(scale.shape)}"
            raise ValueError(f"{name}_scale must have shape {blocks} in float32, got {given}")

    def _check_rows(self, dispatched: Dispatched) -> None:
        check_rows(dispatched, self.spec)
        check_scales(dispatched)
        layout = dispatched.layout
        if isinstance(layout, MaskedLayout):
            name, size = "C", dispatched.rows.shape[1]
        else:
            name, size = "alignment", layout.alignment
        if size % self.row_alignment:
            raise ValueError(f"{name}: {size} given, must be a multiple of {self.row_alignment}")
        self.library.check_alignment()
