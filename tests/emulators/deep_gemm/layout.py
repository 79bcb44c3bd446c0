"""Scale layouts and the alignment of the contiguous layout."""

import torch
import torch.nn.functional as F

from tests.emulators.deep_gemm.state import STATE, DeviceAssertError, is_sm100, require


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def align(x: int, y: int) -> int:
    return ceil_div(x, y) * y


def get_tma_aligned_size(x: int, element_size: int) -> int:
    return align(x, 16 // element_size)


def set_mk_alignment_for_contiguous_layout(new_value: int) -> None:
    """Stricter: the library takes any number and compiles it into its kernels."""
    require(new_value == get_theoretical_mk_alignment_for_contiguous_layout(), f"{new_value}")
    STATE.mk_alignment = new_value


def get_mk_alignment_for_contiguous_layout() -> int:
    return STATE.mk_alignment


def get_theoretical_mk_alignment_for_contiguous_layout(expected_m: int | None = None) -> int:
    return 256 if is_sm100() else 128


def is_mn_major(sf: torch.Tensor) -> bool:
    """Whether the scales lie as the kernels read them, groups packed tightly."""
    mn, sk = sf.shape[-2:]
    stride = get_tma_aligned_size(mn, sf.element_size())
    is_group_tight = sf.dim() == 2 or sf.stride(0) == stride * sk
    return is_group_tight and (sf.stride(-2) == 1 or mn == 1) and sf.stride(-1) == stride


def empty_mn_major(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    *groups, mn, sk = shape
    stride = get_tma_aligned_size(mn, dtype.itemsize)
    strides = (*([stride * sk] if groups else []), 1, stride)
    return torch.empty_strided((*groups, mn, sk), strides, dtype=dtype)


def get_mn_major_tma_aligned_tensor(sf: torch.Tensor) -> torch.Tensor:
    require(sf.dtype is torch.float32, f"scales must be float32, got {sf.dtype}")
    require(sf.dim() in (2, 3), f"scales must have 2 or 3 dimensions, got {sf.dim()}")
    require(sf.numel() > 0, "a launch with an empty grid")
    return sf if is_mn_major(sf) else empty_mn_major(sf.shape, sf.dtype).copy_(sf)


def get_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: torch.Tensor, psum_layout: torch.Tensor | None = None
) -> torch.Tensor:
    require(sf.dtype is torch.float32, f"scales must be float32, got {sf.dtype}")
    require(sf.numel() > 0, "a launch with an empty grid")
    if psum_layout is not None:
        require(sf.dim() == 2 and sf.is_contiguous(), "psum takes row-major float32 scales only")
        require(psum_layout.dtype is torch.int32 and psum_layout.is_contiguous(), "psum_layout")
        sf = sf.masked_fill(~_is_group_row(psum_layout, len(sf))[:, None], 0.0)
    bits = sf.contiguous().view(torch.int32)
    if (bits & -0x7F800001).any():  # sign and mantissa
        raise DeviceAssertError("a scale is not a non-negative power of two")
    exponents = F.pad(bits >> 23, (0, -sf.shape[-1] % 4)).to(torch.uint8)
    packed = exponents.view(torch.int32)
    return empty_mn_major(packed.shape, packed.dtype).copy_(packed)


def transform_sf_into_required_layout(
    sf: torch.Tensor,
    mn: int,
    k: int,
    recipe: tuple[int, ...],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: torch.Tensor | None = None,
) -> torch.Tensor:
    require((is_sfa is not None) == (len(recipe) == 3), "is_sfa goes with a 3-tuple recipe")
    gran_mn, gran_k = recipe if len(recipe) == 2 else (recipe[0 if is_sfa else 1], recipe[2])
    check_sf(sf, mn, k, gran_mn, gran_k, num_groups)
    keeps_float = not is_sm100() or disable_ue8m0_cast
    if sf.dtype is torch.float32 and gran_k == 128 and keeps_float and gran_mn in (1, 128):
        if gran_mn == 1:
            return get_mn_major_tma_aligned_tensor(sf)
        require(sf.is_contiguous() or sf.mT.is_contiguous(), "SFB must be contiguous")
        return sf
    if sf.dtype is torch.float32 and gran_k in (32, 128) and is_sm100():
        if gran_mn != 1:
            sf = sf.index_select(-2, torch.arange(mn) // gran_mn)
        return get_mn_major_tma_aligned_packed_ue8m0_tensor(sf, psum_layout)
    if sf.dtype is torch.int32 and gran_mn == 1 and gran_k in (32, 128) and is_sm100():
        require(is_mn_major(sf), f"packed scales of strides {sf.stride()} are not MN-major")
        return sf
    raise RuntimeError(f"Unknown SF transformation: {sf.dtype} {recipe}")


def check_sf(
    sf: torch.Tensor, mn: int, k: int, gran_mn: int, gran_k: int, num_groups: int | None
) -> None:
    require(sf.dtype in (torch.float32, torch.int32), f"scales of {sf.dtype}")
    per_scale = gran_k * (1 if sf.dtype is torch.float32 else 4)
    groups = () if num_groups is None else (num_groups,)
    shape = (*groups, ceil_div(mn, gran_mn), ceil_div(k, per_scale))
    require(tuple(sf.shape) == shape, f"scales must be {shape}, got {tuple(sf.shape)}")


def unpack(packed: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """int32 exponents ``[.., mn, ceil(blocks / 4)]`` to float32 ``[.., mn, blocks]``."""
    row_major = torch.empty(packed.shape, dtype=torch.int32).copy_(packed)
    exponents = row_major.view(torch.uint8)[..., :num_blocks].int()
    values = torch.exp2((exponents - 127).double()).float()
    return values.masked_fill(exponents == 255, torch.nan)


def _is_group_row(psum: torch.Tensor, num_rows: int) -> torch.Tensor:
    is_row, start = torch.zeros(num_rows, dtype=torch.bool), 0
    for end in psum.tolist():
        is_row[start:end] = True
        start = align(end, STATE.mk_alignment)
    return is_row
