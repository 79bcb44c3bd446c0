"""One comparison helper: per row, with NaN and infinity positions, saying where and how many."""

from dataclasses import dataclass

import torch

MAX_ROWS_SHOWN = 8


@dataclass(frozen=True)
class Tolerance:
    """Allowed error of one row: ``atol + rtol * (largest magnitude in the expected row)``."""

    rtol: float
    atol: float


# The row's largest magnitude is the scale, because a small element is a difference of large terms
# and inherits their rounding. Each bound is a few units of rounding of its dtype:
TOLERANCES = {
    torch.float64: Tolerance(rtol=1e-12, atol=1e-12),  # 2^-53, sums of some thousand terms
    torch.float32: Tolerance(rtol=1e-5, atol=1e-6),  # 2^-24, sums of some thousand terms
    torch.bfloat16: Tolerance(rtol=2e-2, atol=1e-3),  # 2^-9 per rounding, a few roundings in a row
    torch.float16: Tolerance(rtol=4e-3, atol=1e-4),  # 2^-12 per rounding, a few roundings in a row
    torch.float8_e4m3fn: Tolerance(rtol=7e-2, atol=2e-3),  # 2^-4 per rounding of one operand
}


def assert_rows_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Every row (all dimensions but the last) of ``actual`` is near the same row of ``expected``.

    Shapes must be equal, and NaN and infinities must stand at the same places. The tolerance is
    that of ``dtype`` (default: the dtype of ``actual``); rtol and atol replace its parts.
    """
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    default = TOLERANCES[dtype or actual.dtype]
    limit = Tolerance(
        default.rtol if rtol is None else rtol, default.atol if atol is None else atol
    )
    got, want = _as_rows(actual), _as_rows(expected)
    for name, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        _check_places(name, test(got), test(want))
    got, want = got.nan_to_num(0.0, 0.0, 0.0), want.nan_to_num(0.0, 0.0, 0.0)
    error = (got - want).abs().amax(dim=-1)
    allowed = limit.atol + limit.rtol * want.abs().amax(dim=-1)
    bad = (error > allowed).nonzero().flatten().tolist()
    lines = [
        f"  row {row}: error {error[row]:.3e}, allowed {allowed[row]:.3e}, "
        f"at column {int((got[row] - want[row]).abs().argmax())}"
        for row in bad[:MAX_ROWS_SHOWN]
    ]
    assert not bad, f"{len(bad)} of {len(error)} rows differ ({limit}):\n" + "\n".join(lines)


def assert_bits_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Same shape, dtype and bits, NaN payloads included; says how many differ and where."""
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    got, want = (t.contiguous().flatten().view(torch.uint8) for t in (actual, expected))
    differs = (got != want).view(-1, actual.element_size()).any(dim=-1).view(actual.shape)
    places = differs.nonzero()[:MAX_ROWS_SHOWN].tolist()
    assert not differs.any(), f"{int(differs.sum())} of {differs.numel()} differ, first at {places}"


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.detach().to(torch.float64)
    if wide.dim() == 0 or wide.numel() == 0:
        return wide.reshape(-1, 1)
    return wide.reshape(-1, wide.shape[-1])


def _check_places(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    differs = got != want
    places = differs.nonzero()[:MAX_ROWS_SHOWN].tolist()
    assert not differs.any(), (
        f"{name} at {int(got.sum())} places, expected {int(want.sum())}; "
        f"{int(differs.sum())} differ, first [row, column]: {places}"
    )
