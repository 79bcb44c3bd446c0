"""Dense projections of FP8 checkpoints: multiplied as they are stored where a library can.

``Linear`` of ``moe_ep.linear`` holds restored weights; ``DeepGemmLinear`` holds FP8 weights, half
the bytes, and quantises its input. ``create_linear`` chooses, so that the model only says which
weights make up a projection.

Shape letters: N outputs, K inputs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from moe_ep.deep_gemm_library import DeepGemm, find_problem
from moe_ep.fp8 import BLOCK, FP8, dequantize_blocks, num_blocks
from moe_ep.linear import Linear

OUTPUT_MULTIPLE = 8  # BF16 values in 16 bytes, which the library writes at a time


class StoredWeight(NamedTuple):
    """A matrix ``[N, K]`` as a checkpoint holds it; FP8 with float32 scales per 128x128."""

    weight: torch.Tensor
    scale: torch.Tensor | None


class DeepGemmLinear:
    """``y = x @ weight.T + bias`` with FP8 operands: x is quantised 1x128 in every call."""

    def __init__(
        self, stored: StoredWeight, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> None:
        """Keeps the weight, which must not change afterwards, and its scales in the library's form.

        Raises ValueError with the reason when ``supports`` gives one.
        """
        if (problem := self.supports(stored, dtype)) is not None:
            raise ValueError(problem)
        assert stored.scale is not None
        self.out_features, self.in_features = stored.weight.shape
        self.dtype = dtype
        self.library = DeepGemm()
        self._weight = self.library.weight(stored.weight.contiguous(), stored.scale)
        self._bias = None if bias is None else bias.to(dtype)

    @classmethod
    def supports(cls, stored: StoredWeight, dtype: torch.dtype) -> str | None:
        """None when this weight can be multiplied here, else the reason why not."""
        weight, scale = stored
        if weight.dtype is not FP8 or scale is None:
            return f"the weight is {weight.dtype}, deep_gemm multiplies FP8 with scales"
        if dtype is not torch.bfloat16:
            return f"deep_gemm computes in bfloat16, not {dtype}"
        num_rows, num_cols = weight.shape
        if tuple(scale.shape) != (num_blocks(num_rows), num_blocks(num_cols)):
            return f"scales {list(scale.shape)} are not one per 128x128 of {list(weight.shape)}"
        if num_cols % BLOCK or num_rows % OUTPUT_MULTIPLE:
            return f"{num_rows} x {num_cols} are not multiples of {OUTPUT_MULTIPLE} x {BLOCK}"
        return find_problem()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: ``[..., K]`` BF16, rows of any stride. Returns new ``[..., N]``.

        Raises ValueError for another dtype or width.
        """
        if x.dtype is not self.dtype or x.shape[-1] != self.in_features:
            raise ValueError(
                f"x must be {self.dtype} [..., {self.in_features}], got {x.dtype} {list(x.shape)}"
            )
        rows = x.reshape(-1, self.in_features)
        out = rows.new_empty(len(rows), self.out_features)
        if len(rows):
            self.library.lib.fp8_gemm_nt(self.library.quantized(rows), self._weight, out)
        if self._bias is not None:
            out += self._bias
        return out.view(*x.shape[:-1], self.out_features)


def create_linear(
    parts: Sequence[StoredWeight],
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    keeps_fp8: bool,
) -> Linear | DeepGemmLinear:
    """One projection ``[sum of N, K]`` of weights that are multiplied with the same input.

    keeps_fp8: multiply FP8 weights as they are stored; ValueError with the reason where that cannot
        be. Otherwise, and where no part is FP8, they are restored to ``dtype``.
    """
    if keeps_fp8 and any(part.scale is not None for part in parts):
        return DeepGemmLinear(_stacked(parts), dtype, bias)
    restored = [
        weight.to(dtype) if scale is None else dequantize_blocks(weight, scale, dtype)
        for weight, scale in parts
    ]
    return Linear(torch.cat(restored), dtype, bias)


def _stacked(parts: Sequence[StoredWeight]) -> StoredWeight:
    scales = [part.scale for part in parts if part.scale is not None]
    if len(scales) < len(parts) or any(len(part.weight) % BLOCK for part in parts[:-1]):
        shapes = [(part.weight.dtype, list(part.weight.shape)) for part in parts]
        raise ValueError(f"weights cannot share a scale per 128x128: {shapes}")
    return StoredWeight(torch.cat([part.weight for part in parts]), torch.cat(scales))
