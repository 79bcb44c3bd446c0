"""What DeepGEMM gets wrong without a word, or dies of, unless its user knows; on SM90.

The numbers are those of the list of traps that the GPU libraries are held against. Each test fails
when its guard is taken out.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moe_ep.deep_gemm_library import DeepGemm, find_problem
from moe_ep.experts import resolve_backend
from moe_ep.experts.deep_gemm_experts import DeepGemmExperts
from moe_ep.fp8 import FP8, dequantize_rows, quantize_rows
from tests.compare import assert_bits_equal, assert_rows_close
from tests.emulators.deep_gemm.state import STATE
from tests.emulators.device import DEVICE
from tests.experts.cases import NAN, SlotInputs, kernel_reference, valid_rows, with_row_weights
from tests.experts.deep_gemm_cases import (
    BF16,
    COUNTS,
    check,
    column_major,
    loaded,
    make_spec,
    restored_rows,
)

pytestmark = pytest.mark.usefixtures("sm90")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Arguments (a, b, d, layout) of every grouped FP8 product."""
    library, seen = importlib.import_module("deep_gemm"), []

    def spied(function: Callable) -> Callable:
        def spy(a, b, d, *args, **kwargs):
            seen.append((a, b, d, args[0]))
            function(a, b, d, *args, **kwargs)

        return spy

    for name in ("m_grouped_fp8_gemm_nt_masked", "m_grouped_fp8_gemm_nt_contiguous"):
        monkeypatch.setattr(library, name, spied(getattr(library, name)))
    return seen


def test_trap_01_row_weights_are_applied_once_and_only_when_given():
    experts, weights = loaded(make_spec())
    inputs = SlotInputs.random(COUNTS, 384, FP8)
    plain = inputs.masked(256)
    check(experts, weights, inputs, plain)
    weighted = with_row_weights(plain, 2.0)
    y = valid_rows(experts(weighted), weighted)
    for slot, row_weights in enumerate(valid_rows(weighted.row_weights, weighted)):
        expected = kernel_reference(restored_rows(inputs, slot), weights[slot], row_weights)
        assert_rows_close(y[slot].double(), expected, dtype=BF16)


@pytest.mark.parametrize("alignment", [1, 16, 64, 192])
def test_trap_04_a_layout_of_another_alignment_is_refused(alignment, calls):
    experts, _ = loaded(make_spec())
    with pytest.raises(ValueError, match=f"alignment: {alignment} given"):
        experts(SlotInputs.random(COUNTS, 384, FP8).contiguous(alignment))
    assert not calls


def test_trap_04_the_library_is_set_to_the_alignment_that_dispatch_is_told():
    STATE.mk_alignment = 64  # what another user of the process left behind
    experts, weights = loaded(make_spec())
    assert experts.row_alignment == STATE.mk_alignment == 128
    inputs = SlotInputs.random(COUNTS, 384, FP8)
    check(experts, weights, inputs, inputs.contiguous(experts.row_alignment))


def test_trap_04_an_alignment_that_someone_changed_later_is_found(calls):
    experts, _ = loaded(make_spec())
    STATE.mk_alignment = 64
    for dispatched in (
        SlotInputs.random(COUNTS, 384, FP8).contiguous(128),
        SlotInputs.random(COUNTS, 384, FP8).masked(256),
    ):
        with pytest.raises(RuntimeError, match="changed from 128 to 64"):
            experts(dispatched)
    assert not calls


def test_trap_05_the_library_is_given_unpadded_ends(calls):
    experts, _ = loaded(make_spec())
    experts(SlotInputs.random(COUNTS, 384, FP8).contiguous(128))
    # Slots 0 to 5 start at 0, 128, 128, 384, 512, 512.
    assert [layout.tolist() for *_, layout in calls] == [[3, 128, 258, 424, 512, 529]] * 2


def test_trap_06_column_major_scales_are_taken_as_they_lie(calls):
    experts, weights = loaded(make_spec())
    inputs = SlotInputs.random(COUNTS, 384, FP8)
    dispatched = column_major(inputs.masked(256))
    check(experts, weights, inputs, dispatched)
    (_, scales), *_ = calls[0]
    assert scales.data_ptr() == dispatched.scales.data_ptr()
    assert scales.stride() == (256 * 3, 1, 256)


def test_trap_06_row_major_scales_are_turned_once_per_product(calls):
    experts, weights = loaded(make_spec())
    inputs = SlotInputs.random(COUNTS, 384, FP8)
    for dispatched in (inputs.contiguous(128), inputs.masked(256)):
        assert dispatched.scales.is_contiguous()
        check(experts, weights, inputs, dispatched)
    for (rows, scales), *_ in calls:
        assert scales.stride(-2) == 1
        assert scales.stride(-1) == -(-rows.shape[-2] // 4) * 4


def test_trap_06_column_major_scales_of_bf16_experts():
    """Restoring rows must not view the scales as a matrix."""
    spec = make_spec(is_fp8=False)
    experts, _ = loaded(spec)
    dispatched = SlotInputs.random(COUNTS, 384, FP8).masked(256)
    want, got = experts(dispatched), experts(column_major(dispatched))
    for a, b in zip(valid_rows(got, dispatched), valid_rows(want, dispatched), strict=True):
        assert_bits_equal(a, b)


def test_trap_07_packed_scales_are_refused_on_sm90(calls):
    experts, _ = loaded(make_spec())
    dispatched = SlotInputs.random(COUNTS, 384, FP8).masked(256)
    packed = torch.zeros(6, 256, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"scales of torch\.int32 do not fit this GPU"):
        experts(replace(dispatched, scales=packed))
    assert not calls


@pytest.mark.parametrize("capacity", [4, 64, 200])
def test_trap_08_a_capacity_that_is_not_whole_blocks_is_refused(capacity, calls):
    experts, _ = loaded(make_spec())
    with pytest.raises(ValueError, match=f"C: {capacity} given, must be a multiple of 128"):
        experts(SlotInputs.random([1] * 6, 384, FP8).masked(capacity))
    assert not calls


@pytest.mark.parametrize("garbage", [NAN, float("inf"), -1e30, 7.0])
def test_trap_08_rows_of_padding_reach_no_other_row(garbage):
    experts, _ = loaded(make_spec())
    inputs = SlotInputs.random(COUNTS, 384, FP8)
    for dispatched in (inputs.contiguous(128), inputs.contiguous(256), inputs.masked(256)):
        clean = valid_rows(experts(dispatched), dispatched)
        is_padding = torch.ones(dispatched.rows.shape[:-1])
        for rows in valid_rows(is_padding, dispatched):
            rows.zero_()
        scales = dispatched.scales.masked_fill(is_padding.bool()[..., None], garbage)
        spoilt = replace(dispatched, scales=scales)
        for got, want in zip(valid_rows(experts(spoilt), spoilt), clean, strict=True):
            assert_bits_equal(got, want)


def test_trap_15_the_products_are_within_the_librarys_own_measure():
    calc_diff = importlib.import_module("deep_gemm.testing").calc_diff
    generator = torch.Generator().manual_seed(3)
    x, w = (torch.randn(rows, 512, generator=generator) for rows in (96, 128))
    (q, scales), (qw, scales_w) = quantize_rows(x), quantize_rows(w)
    restored = (
        dequantize_rows(q, scales, BF16).double() @ dequantize_rows(qw, scales_w, BF16).T.double()
    )
    assert 1e-5 < calc_diff(restored, x.double() @ w.T.double()) < 1e-3
    # DeepEP adds 1 to both sides of its own, which would pass a result that is all wrong.
    tiny = torch.full((8, 8), 1e-4)
    assert calc_diff(tiny, -tiny) == 2.0
    assert calc_diff(tiny + 1, -tiny + 1) < 1e-6


@pytest.mark.parametrize(
    "error",
    [
        ImportError("undefined symbol: CUDAErrorLogCapture"),
        OSError("libcuda.so.1: cannot open shared object file"),
        AssertionError("CUDA home"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_trap_18_a_library_that_fails_to_load_is_a_reason_not_a_crash(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr("moe_ep.deep_gemm_library.importlib.import_module", fail)
    assert str(error) in (find_problem() or "")
    backend, reason = resolve_backend("auto", make_spec())
    assert backend == "torch"
    assert str(error) in reason


@pytest.mark.parametrize(
    "error",
    [AssertionError("Torch not compiled with CUDA enabled"), RuntimeError("no NVIDIA driver")],
    ids=lambda error: type(error).__name__,
)
def test_trap_18_a_library_without_a_gpu_is_a_reason_not_a_crash(monkeypatch, error):
    def fail(device=None):
        raise error

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    assert find_problem() == f"deep_gemm needs a GPU: {error}"
    assert DeepGemmExperts.supports(make_spec()) == find_problem()


@pytest.mark.parametrize(("major", "minor"), [(8, 0), (12, 0)])
def test_trap_18_other_generations_are_refused(major, minor):
    DEVICE.major, DEVICE.minor = major, minor
    assert find_problem() == f"deep_gemm needs SM90 or SM100, this device is SM{major}{minor}"


@pytest.mark.parametrize(
    ("device_sms", "left", "used"), [(132, 20, 112), (132, 21, 110), (131, 0, 130)]
)
def test_trap_19_products_leave_sms_to_the_exchange_and_use_an_even_number(device_sms, left, used):
    DEVICE.multi_processor_count = device_sms
    experts, weights = loaded(make_spec())
    assert experts.library.leave_sms(left) == used
    assert used + left <= device_sms
    inputs = SlotInputs.random(COUNTS, 384, FP8)
    check(experts, weights, inputs, inputs.masked(256))


@pytest.mark.parametrize("left", [-2, 131, 132, 200])
def test_trap_19_sms_that_cannot_be_left_are_refused(left):
    with pytest.raises(ValueError, match=f"{left} of 132 SMs cannot be left"):
        DeepGemm().leave_sms(left)
