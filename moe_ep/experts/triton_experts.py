"""Experts on Triton: two grouped products with the activation between them, three kernels in all.

Weights stay as the checkpoint has them: FP8 with 128x128 scales, multiplied in FP8 when the rows
are FP8 too and in BF16 otherwise, or BF16. All slots lie in one tensor per projection. Gate and up
are one matrix; each of the two starts at a multiple of 128 rows, so that its scale blocks stay
whole whatever the intermediate size.

Nothing here waits for the device, so what only the device knows is not checked: counts must fit
the rows, and rows of a slot that was never loaded come out as NaN.

Shape letters: S slots, H hidden, I expert intermediate, P: I rounded up to a multiple of 128.
"""

import torch

from moe_ep.dispatch.base import Dispatched, MaskedLayout
from moe_ep.experts.base import (
    Experts,
    ExpertSpec,
    ExpertWeights,
    check_rows,
    check_slot,
)
from moe_ep.fp8 import BLOCK, FP8, new_nan, num_blocks


class _Weight:
    """One projection of all slots: values ``[S, rows, cols]``, and scales per 128x128 when FP8."""

    def __init__(self, spec: ExpertSpec, num_rows: int, num_cols: int) -> None:
        shape = (spec.num_slots, num_rows, num_cols)
        self.scales: torch.Tensor | None = None
        if spec.is_fp8:
            self.values = new_nan(shape, spec.device)
            blocks = (spec.num_slots, num_blocks(num_rows), num_blocks(num_cols))
            self.scales = torch.full(blocks, torch.nan, device=spec.device)
        else:
            self.values = torch.full(shape, torch.nan, dtype=spec.dtype, device=spec.device)

    def load(
        self, slot: int, first_row: int, weight: torch.Tensor, scale: torch.Tensor | None
    ) -> None:
        """first_row: a multiple of 128."""
        self.values[slot, first_row : first_row + len(weight)].copy_(weight)
        if self.scales is not None and scale is not None:
            first = first_row // BLOCK
            self.scales[slot, first : first + len(scale)].copy_(scale)

    def of_slot(self, slot: int) -> list[torch.Tensor]:
        return [part[slot] for part in (self.values, self.scales) if part is not None]


class TritonExperts(Experts):
    """See ``Experts``."""

    row_alignment = 1  # tiles start at the first row of a slot, wherever that is

    def __init__(self, spec: ExpertSpec) -> None:
        if (problem := self.supports(spec)) is not None:
            raise ValueError(problem)
        self.spec = spec
        self._padded = num_blocks(spec.intermediate) * BLOCK
        self._gate_up = _Weight(spec, 2 * self._padded, spec.hidden)
        self._down = _Weight(spec, spec.hidden, spec.intermediate)

    @classmethod
    def supports(cls, spec: ExpertSpec) -> str | None:
        from moe_ep.kernels import device_problem

        if spec.dtype is not torch.bfloat16:
            return f"dtype: {spec.dtype} given, triton experts compute in bfloat16"
        for name in ("num_slots", "hidden", "intermediate"):
            if getattr(spec, name) < 1:
                return f"{name}: {getattr(spec, name)} given, must be at least 1"
        return device_problem(spec.device, needs_fp8=spec.is_fp8)

    @classmethod
    def capture_problem(cls) -> str | None:
        return None

    def load_slot(self, slot: int, weights: ExpertWeights) -> None:
        """See ``Experts``. The weights are copied; the caller may reuse them.

        Raises IndexError for a slot out of range, ValueError for a wrong shape or dtype, for FP8
        without its scale and for a scale without FP8; the slot then keeps what it held.
        """
        check_slot(slot, self.spec)
        hidden, intermediate = self.spec.hidden, self.spec.intermediate
        _check("gate", weights.gate, weights.gate_scale, (intermediate, hidden), self.spec)
        _check("up", weights.up, weights.up_scale, (intermediate, hidden), self.spec)
        _check("down", weights.down, weights.down_scale, (hidden, intermediate), self.spec)
        self._gate_up.load(slot, 0, weights.gate, weights.gate_scale)
        self._gate_up.load(slot, self._padded, weights.up, weights.up_scale)
        self._down.load(slot, 0, weights.down, weights.down_scale)

    def slot_tensors(self, slot: int) -> list[torch.Tensor]:
        return [*self._gate_up.of_slot(slot), *self._down.of_slot(slot)]

    def __call__(self, dispatched: Dispatched) -> torch.Tensor:
        """See ``Experts``. Raises ValueError when the rows do not fit the spec."""
        from moe_ep.kernels.grouped_gemm import grouped_gemm
        from moe_ep.kernels.swiglu import swiglu

        check_rows(dispatched, self.spec)
        if dispatched.rows.dtype not in (FP8, torch.bfloat16):
            raise ValueError(f"rows must be {FP8} or bfloat16, got {dispatched.rows.dtype}")
        layout = dispatched.layout
        # Masked rows have far more room than they need; contiguous ones about what they need.
        expected_rows = self.spec.expected_rows if isinstance(layout, MaskedLayout) else None
        gate_up = grouped_gemm(
            dispatched.rows,
            self._gate_up.values,
            layout=layout,
            a_scales=dispatched.scales,
            b_scales=self._gate_up.scales,
            expected_rows=expected_rows,
        )
        hidden = swiglu(
            gate_up,
            layout=layout,
            intermediate=self.spec.intermediate,
            row_weights=dispatched.row_weights,
            quantizes=self.spec.is_fp8,
        )
        return grouped_gemm(
            hidden.values,
            self._down.values,
            layout=layout,
            a_scales=hidden.scales,
            b_scales=self._down.scales,
            expected_rows=expected_rows,
        )


def _check(
    name: str,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    shape: tuple[int, int],
    spec: ExpertSpec,
) -> None:
    if tuple(weight.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(weight.shape)}")
    if not spec.is_fp8:
        if scale is not None or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            given = "with" if scale is not None else "without"
            raise ValueError(
                f"{name} must be BF16, FP16 or float32 without a scale,"
                f" got {weight.dtype} {given} {name}_scale"
            )
        return
    if weight.dtype is not FP8 or scale is None:
        given = "without" if scale is None else "with"
        raise ValueError(f"{name} must be {FP8} with {name}_scale, got {weight.dtype} {given} it")
    blocks = (num_blocks(shape[0]), num_blocks(shape[1]))
    if tuple(scale.shape) != blocks or scale.dtype is not torch.float32:
        raise ValueError(
            f"{name}_scale must be float32 {list(blocks)}, got {scale.dtype} {list(scale.shape)}"
        )
