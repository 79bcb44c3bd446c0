"""The products: every check of the library, its unwritten rules, and then the arithmetic."""

from collections.abc import Iterator

import torch

from tests.emulators.cuda_graph import kernel, refuse_capture
from tests.emulators.deep_gemm.layout import (
    align,
    ceil_div,
    check_sf,
    is_mn_major,
    transform_sf_into_required_layout,
    unpack,
)
from tests.emulators.deep_gemm.state import STATE, get_num_sms, is_sm100, require

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
Scaled = tuple[torch.Tensor, torch.Tensor]
Recipe = tuple[int, int, int]
Granularity = tuple[int, int]


@kernel
def fp8_gemm_nt(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: Granularity | None = None,
    recipe_b: Granularity | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
    epilogue: object = None,
) -> None:
    require(c is None and d.dtype is BF16, "block-scaled products take no C and write BF16")
    _check_defaults(recipe, recipe_a, recipe_b, disable_ue8m0_cast, alpha, epilogue)
    _check_shapes(a[0], b[0], d, FP8, num_dims=2)
    if d.numel():
        rows, weight = _restore_a(a, None), _restore_b(b)
        d.copy_(rows @ weight.T)


@kernel
def bf16_gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "nk",
    alpha: float | None = None,
    epilogue: object = None,
) -> None:
    require(c is None and alpha is None and epilogue is None, "not emulated")
    _check_shapes(a, b, d, BF16, num_dims=2)
    d.copy_(a.float() @ b.float().T)


@kernel
def m_grouped_fp8_gemm_nt_contiguous(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: Recipe | None = None,
    recipe_a: Granularity | None = None,
    recipe_b: Granularity | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
    epilogue: object = None,
) -> None:
    _check_defaults(recipe, recipe_a, recipe_b, disable_ue8m0_cast, None, epilogue)
    _check_shapes(a[0], b[0], d, FP8, num_dims=2)
    groups = _groups(grouped_layout, len(d), len(b[0]), use_psum_layout)
    require(use_psum_layout or expected_m_for_psum_layout is None, "expected_m without psum")
    if len(d):
        rows = _restore_a(a, grouped_layout if use_psum_layout else None)
        _multiply_groups(rows, _restore_b(b), d, groups)


@kernel
def m_grouped_bf16_gemm_nt_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
    epilogue: object = None,
) -> None:
    require(epilogue is None, "not emulated")
    _check_shapes(a, b, d, BF16, num_dims=2)
    require(use_psum_layout or expected_m_for_psum_layout is None, "expected_m without psum")
    groups = _groups(grouped_layout, len(d), len(b), use_psum_layout)
    _multiply_groups(a.float(), b.float(), d, groups)


@kernel
def m_grouped_fp8_gemm_nt_masked(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: Recipe | None = None,
    recipe_a: Granularity | None = None,
    recipe_b: Granularity | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    epilogue: object = None,
) -> None:
    _check_defaults(recipe, recipe_a, recipe_b, disable_ue8m0_cast, None, epilogue)
    _check_shapes(a[0], b[0], d, FP8, num_dims=3)
    groups = _masked_groups(masked_m, expected_m, d)
    rows = _restore_a(a, None).flatten(0, 1)
    _multiply_groups(rows, _restore_b(b), d.flatten(0, 1), groups)


@kernel
def m_grouped_bf16_gemm_nt_masked(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    compiled_dims: str = "nk",
    epilogue: object = None,
) -> None:
    require(epilogue is None, "not emulated")
    _check_shapes(a, b, d, BF16, num_dims=3)
    groups = _masked_groups(masked_m, expected_m, d)
    _multiply_groups(a.float().flatten(0, 1), b.float(), d.flatten(0, 1), groups)


def _multiply_groups(
    rows: torch.Tensor, weights: torch.Tensor, d: torch.Tensor, groups: list[slice]
) -> None:
    """Rows of no group are left open by the library: NaN here, and never read."""
    d.fill_(torch.nan)
    for group, weight in zip(groups, weights, strict=True):
        d[group] = (rows[group] @ weight.T).to(d.dtype)


def _groups(
    layout: torch.Tensor, num_rows: int, num_groups: int, use_psum_layout: bool
) -> list[slice]:
    require(layout.dtype is torch.int32 and layout.is_contiguous(), f"layout of {layout.dtype}")
    require(layout.dim() == 1, f"layout of {layout.dim()} dimensions")
    if use_psum_layout:
        require(len(layout) == num_groups, f"{len(layout)} ends for {num_groups} groups")
        return list(_psum_groups(layout.tolist(), num_rows))
    require(len(layout) == num_rows, f"{len(layout)} row indices for {num_rows} rows")
    return [_index_group(layout, group) for group in range(num_groups)]


def _psum_groups(ends: list[int], num_rows: int) -> Iterator[slice]:
    """Ends are unpadded; the next group starts at the next multiple of the set alignment."""
    start = 0
    for end in ends:
        require(start <= end <= num_rows, f"ends {ends}: one is not in {start} to {num_rows}")
        yield slice(start, end)
        start = align(end, STATE.mk_alignment)


def _index_group(indices: torch.Tensor, group: int) -> slice:
    """The kernel looks at the first row of each block alone, so a block has one group."""
    rows = (indices == group).nonzero().flatten()
    if not len(rows):
        return slice(0)
    start, end = int(rows[0]), int(rows[-1]) + 1
    require(end - start == len(rows), f"rows of group {group} are not consecutive")
    require(start % STATE.mk_alignment == 0, f"group {group} starts at row {start}")
    tail = indices[end : align(end, STATE.mk_alignment)]
    require(bool((tail == -1).all()), f"a block of group {group} holds rows of another")
    return slice(start, end)


def _masked_groups(masked_m: torch.Tensor, expected_m: int, d: torch.Tensor) -> list[slice]:
    num_groups, capacity, _ = d.shape
    require(masked_m.dtype is torch.int32 and masked_m.is_contiguous(), "masked_m int32 contiguous")
    require(tuple(masked_m.shape) == (num_groups,), f"masked_m of shape {tuple(masked_m.shape)}")
    require(type(expected_m) is int and expected_m > 0, f"expected_m {expected_m!r}")
    require(d.numel() > 0, "every size must be positive")
    # A block that reaches past its group's rows is stored over the first rows of the next group.
    require(capacity % STATE.mk_alignment == 0, f"{capacity} rows per group are not whole blocks")
    counts = masked_m.tolist()
    require(min(counts) >= 0 and max(counts) <= capacity, f"masked_m {counts} of {capacity}")
    return [slice(g * capacity, g * capacity + count) for g, count in enumerate(counts)]


def _check_defaults(
    recipe: Recipe | None,
    recipe_a: Granularity | None,
    recipe_b: Granularity | None,
    disable_ue8m0_cast: bool,
    alpha: float | None,
    epilogue: object,
) -> None:
    is_default = recipe is None and recipe_a is None and recipe_b is None
    require(is_default and not disable_ue8m0_cast, "only the default recipe is emulated")
    require(alpha is None and epilogue is None, "alpha and epilogue are not emulated")


def _check_shapes(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, dtype: torch.dtype, *, num_dims: int
) -> None:
    is_sm100()
    require(get_num_sms() % 2 == 0, f"{get_num_sms()} SMs, must be even")
    require(a.dim() == d.dim() == num_dims, f"A of {a.dim()} and D of {d.dim()} dimensions")
    require(b.dim() in (num_dims, 3), f"B of {b.dim()} dimensions")
    require(a.dtype is b.dtype is dtype, f"A of {a.dtype}, B of {b.dtype}")
    require(a.device == b.device == d.device, "devices differ")
    (m, k), (n, k_b) = a.shape[-2:], b.shape[-2:]
    require(tuple(d.shape[-2:]) == (m, n) and k == k_b, f"{a.shape} x {b.shape} -> {d.shape}")
    require(num_dims == 2 or a.shape[0] == b.shape[0] == d.shape[0], "numbers of groups differ")
    require(n > 0 and k > 0, "N and K must be positive")
    require(dtype is FP8 or k % 64 == 0, f"K {k} of a BF16 product is no multiple of 64")
    require(d.dtype is BF16, f"D of {d.dtype}")
    for name, tensor in (("A", a), ("B", b), ("D", d)):
        _check_tma(name, tensor)
    compiled = (dtype, tuple(a.shape), tuple(b.shape))
    if compiled not in STATE.kernels:
        refuse_capture("a kernel that was never used is compiled and loaded first")
    STATE.kernels.add(compiled)


def _check_tma(name: str, tensor: torch.Tensor) -> None:
    rows, cols = tensor.shape[-2:]
    require(tensor.stride(-1) == 1, f"{name} must be contiguous along its last dimension")
    if tensor.dim() == 3:
        require(tensor.stride(0) == rows * cols, f"groups of {name} are not packed")
    require(tensor.data_ptr() % 16 == 0, f"{name} does not start at 16 bytes")
    row_bytes = tensor.stride(-2) * tensor.element_size()
    require(row_bytes % 16 == 0, f"rows of {name} are {row_bytes} bytes apart, not 16 * n")
    require(cols * tensor.element_size() % 16 == 0, f"rows of {name} are not whole 16 bytes")


def _restore_a(a: Scaled, psum: torch.Tensor | None) -> torch.Tensor:
    """float32 ``[.., M, K]``."""
    rows, sf = a
    *groups, m, k = rows.shape
    num_groups = groups[0] if groups else None
    require(is_sm100() or sf.dtype is torch.float32, f"SM90 takes float32 scales, got {sf.dtype}")
    final = transform_sf_into_required_layout(
        sf, m, k, (1, 128), num_groups=num_groups, psum_layout=psum
    )
    require(final is sf, f"SFA {sf.dtype} of strides {sf.stride()} is re-laid in every call")
    require(is_mn_major(sf), f"SFA of strides {sf.stride()} is not MN-major")
    scales = unpack(sf, ceil_div(k, 128)) if is_sm100() else sf
    return rows.float() * scales.repeat_interleave(128, dim=-1)[..., :k]


def _restore_b(b: Scaled) -> torch.Tensor:
    """float32 ``[.., N, K]``."""
    weight, sf = b
    *groups, n, k = weight.shape
    num_groups = groups[0] if groups else None
    if is_sm100():
        require(sf.dtype is torch.int32, "float32 SFB is packed again in every call")
        transform_sf_into_required_layout(sf, n, k, (1, 128), num_groups=num_groups)
        scales = unpack(sf, ceil_div(k, 128))
    else:
        require(sf.dtype is torch.float32, f"SM90 takes float32 scales, got {sf.dtype}")
        check_sf(sf, n, k, 128, 128, num_groups)
        require(sf.is_contiguous() or sf.mT.is_contiguous(), "SFB must be contiguous")
        scales = sf.repeat_interleave(128, dim=-2)[..., :n, :]
    # Anew only when a byte has changed: it takes longer than the product.
    place = (weight.data_ptr(), weight.shape, sf.data_ptr())
    content = (weight.view(torch.int64), sf)
    kept, restored = STATE.restored.get(place, (None, None))
    if kept is None or not all(map(torch.equal, kept, content)):
        restored = weight.float() * scales.repeat_interleave(128, dim=-1)[..., :k]
        STATE.restored[place] = tuple(part.clone() for part in content), restored
    return restored
