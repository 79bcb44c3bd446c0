"""Quantisation, activation and grouped products, for Triton and where installed DeepGEMM.

Scales are powers of two, the only ones that every GPU generation of DeepGEMM multiplies with, so
that all contestants see the same values.

Shape letters: S slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu import costs
from bench.gpu.case import KernelCase, Sizes
from bench.gpu.parity import FP8_DIFF, assert_rows_agree, restored, restored_weight, swiglu_of
from moe_ep.deep_gemm_library import DeepGemm, find_problem
from moe_ep.dispatch import ContiguousLayout, MaskedLayout
from moe_ep.fp8 import FP8, num_blocks, quantize_rows

BF16 = torch.bfloat16
GEMM_ALIGNMENT = 128  # of rows where no library says otherwise


@dataclass(frozen=True)
class Rows:
    """Where rows lie: leading dimensions of the tensor, and each slot's rows when flattened."""

    layout: ContiguousLayout | MaskedLayout
    leading: tuple[int, ...]
    places: list[slice]

    @classmethod
    def lay_out(
        cls, counts: Sequence[int], *, is_masked: bool, alignment: int, device: torch.device
    ) -> "Rows":
        """counts: rows of each slot. Slots start at multiples of the alignment."""
        most = max(counts)
        room = [-(-(most if is_masked else n) // alignment) * alignment for n in counts]
        starts = [sum(room[:slot]) for slot in range(len(counts))]
        places = [slice(start, start + n) for start, n in zip(starts, counts, strict=True)]
        if is_masked:
            layout = MaskedLayout(torch.tensor(counts, dtype=torch.int32, device=device))
            return cls(layout, (len(counts), room[0]), places)
        ends = torch.tensor([p.stop for p in places], dtype=torch.int32, device=device)
        return cls(ContiguousLayout(ends, alignment), (sum(room),), places)

    def draw(self, width: int) -> torch.Tensor:
        """BF16 ``[*leading, width]``, NaN outside the layout."""
        device = (
            self.layout.counts.device
            if isinstance(self.layout, MaskedLayout)
            else self.layout.psum.device
        )
        rows = torch.full((*self.leading, width), torch.nan, dtype=BF16, device=device)
        for place in self.places:
            rows.flatten(0, -2)[place].normal_()
        return rows


def shape_of(counts: Sequence[int], **others: int) -> dict[str, int]:
    return {"slots": len(counts), "rows": sum(counts), **others}


def quantize_case(num_rows: int, sizes: Sizes, device: torch.device) -> KernelCase:
    from moe_ep.kernels import quantize

    x = torch.randn(num_rows, sizes.hidden, dtype=BF16, device=device)
    return KernelCase(
        "quantize",
        {"rows": num_rows, "hidden": sizes.hidden},
        costs.quantize_cost(num_rows, sizes.hidden),
        {"triton": lambda: quantize.quantize_rows(x)},
        lambda got: assert_rows_agree(restored(*got), x, FP8_DIFF),
    )


def swiglu_case(
    counts: Sequence[int], sizes: Sizes, device: torch.device, *, is_masked: bool
) -> KernelCase:
    from moe_ep.kernels.swiglu import swiglu

    rows = Rows.lay_out(counts, is_masked=is_masked, alignment=GEMM_ALIGNMENT, device=device)
    gate_up = rows.draw(2 * sizes.intermediate)

    def call() -> Any:
        return swiglu(
            gate_up,
            layout=rows.layout,
            intermediate=sizes.intermediate,
            row_weights=None,
            quantizes=True,
        )

    def check(got: Any) -> None:
        values, scales = (part.flatten(0, -2) for part in got)
        for place in rows.places:
            want = swiglu_of(gate_up.flatten(0, -2)[place])
            assert_rows_agree(restored(values[place], scales[place]), want, FP8_DIFF)

    cost = costs.swiglu_cost(sum(counts), sizes.intermediate)
    kernel = "swiglu_masked" if is_masked else "swiglu_contiguous"
    shape = shape_of(counts, intermediate=sizes.intermediate)
    return KernelCase(kernel, shape, cost, {"triton": call}, check)


def grouped_gemm_case(
    counts: Sequence[int], width: int, depth: int, device: torch.device, *, is_masked: bool
) -> KernelCase:
    """``[rows, depth] @ [width, depth].T`` for every slot, FP8 with scales."""
    from moe_ep.kernels.grouped_gemm import grouped_gemm

    library = DeepGemm() if find_problem() is None else None
    alignment = library.row_alignment if library else GEMM_ALIGNMENT
    rows = Rows.lay_out(counts, is_masked=is_masked, alignment=alignment, device=device)
    a, a_scales = quantize_rows(rows.draw(depth), use_ue8m0=True)
    b, b_scales = _draw_weights(len(counts), width, depth, device)
    calls: dict[str, Callable[[], Any]] = {
        "triton": lambda: grouped_gemm(
            a, b, layout=rows.layout, a_scales=a_scales, b_scales=b_scales
        )
    }
    if library:
        calls["deep_gemm"] = _deep_gemm_call(library, rows, (a, a_scales), (b, b_scales))

    def check(got: torch.Tensor) -> None:
        flat, flat_a, scales = (t.flatten(0, -2) for t in (got, a, a_scales))
        for slot, place in enumerate(rows.places):
            exact = restored(flat_a[place], scales[place])
            want = exact @ restored_weight(b[slot], b_scales[slot]).T
            assert_rows_agree(flat[place], want, FP8_DIFF)

    kernel = "grouped_gemm_masked" if is_masked else "grouped_gemm_contiguous"
    shape = shape_of(counts, n=width, k=depth)
    cost = costs.grouped_gemm_cost(counts, width, depth)
    return KernelCase(kernel, shape, cost, calls, check, "deep_gemm")


def _draw_weights(
    num_slots: int, width: int, depth: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 ``[S, width, depth]`` and power-of-two scales per 128x128."""
    weights = torch.empty(num_slots, width, depth, dtype=FP8, device=device)
    for weight in weights:
        weight.copy_(torch.randn(width, depth, device=device))
    blocks = (num_slots, num_blocks(width), num_blocks(depth))
    return weights, torch.exp2(torch.randint(-8, -4, blocks, device=device).float())


def _deep_gemm_call(
    library: DeepGemm,
    rows: Rows,
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
) -> Callable[[], torch.Tensor]:
    """Operands are brought into the library's form here, as the adapter does when it loads."""
    num_slots, width, depth = b[0].shape
    operand = library.rows(*a)
    scales = library.empty_weight_scales(num_slots, (width, depth), b[0].device)
    for target, weight, scale in zip(scales, *b, strict=True):
        target.copy_(library.weight(weight, scale)[1])
    layout, weights = rows.layout, (b[0], scales)

    def call() -> torch.Tensor:
        out = torch.empty(*rows.leading, width, dtype=BF16, device=b[0].device)
        if isinstance(layout, MaskedLayout):
            expected = max(place.stop - place.start for place in rows.places)
            library.lib.m_grouped_fp8_gemm_nt_masked(operand, weights, out, layout.counts, expected)
        else:
            library.lib.m_grouped_fp8_gemm_nt_contiguous(
                operand, weights, out, layout.psum, use_psum_layout=True
            )
        return out

    return call
