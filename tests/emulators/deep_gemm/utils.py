"""The library's quantisation helpers, as it writes them, and what it re-exports beside them."""

import torch

from tests.emulators.deep_gemm.layout import (
    align,
    ceil_div,
    get_mk_alignment_for_contiguous_layout,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_tensor,
    get_theoretical_mk_alignment_for_contiguous_layout,
    get_tma_aligned_size,
    set_mk_alignment_for_contiguous_layout,
)

__all__ = [
    "align",
    "ceil_div",
    "ceil_to_ue8m0",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "per_block_cast_to_fp8",
    "per_token_cast_to_fp8",
    "set_mk_alignment_for_contiguous_layout",
]


def ceil_to_ue8m0(x: torch.Tensor) -> torch.Tensor:
    """Round up to a power of two, through the logarithm."""
    return torch.exp2(torch.ceil(torch.log2(x.abs().double()))).float()


def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.dim() == 2
    assert use_ue8m0 or not use_packed_ue8m0
    num_rows, width = x.shape
    blocks = _padded(x, 1, gran_k).unflatten(1, (-1, gran_k))
    q, sf = _cast(blocks, (2,), use_ue8m0)
    q = q.flatten(1)[:, :width].contiguous()
    sf = sf.view(num_rows, -1)
    if not use_packed_ue8m0:
        return q, sf
    exponents = torch.nn.functional.pad(sf, (0, -sf.shape[1] % 4), value=1.0).view(torch.int32)
    return q, (exponents >> 23).to(torch.uint8).view(torch.int32)


def per_block_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.dim() == 2
    padded = _padded(x, gran_k, gran_k)
    blocks = padded.unflatten(1, (-1, gran_k)).unflatten(0, (-1, gran_k))
    q, sf = _cast(blocks, (1, 3), use_ue8m0)
    return q.view(padded.shape)[: len(x), : x.shape[1]].contiguous(), sf.flatten(2).flatten(1)


def _padded(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[1] % cols, 0, -x.shape[0] % rows))


def _cast(
    blocks: torch.Tensor, dims: tuple[int, ...], use_ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    sf = blocks.abs().float().amax(dim=dims, keepdim=True).clamp(1e-4) / 448.0
    sf = ceil_to_ue8m0(sf) if use_ue8m0 else sf
    return (blocks * (1.0 / sf)).to(torch.float8_e4m3fn), sf
