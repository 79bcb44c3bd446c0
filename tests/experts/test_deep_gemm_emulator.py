"""The stand-in of DeepGEMM refuses what the library refuses, repairs in silence, or gets wrong."""

from typing import NamedTuple

import pytest
import torch

from moe_ep.fp8 import quantize_rows
from tests.compare import assert_bits_equal, assert_rows_close
from tests.emulators import deep_gemm
from tests.emulators.deep_gemm import DeviceAssertError
from tests.emulators.deep_gemm.state import STATE
from tests.emulators.device import DEVICE
from tests.emulators.test_manifest import described, manifest_of

pytestmark = pytest.mark.usefixtures("sm90")

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


class Problem(NamedTuple):
    """FP8 rows ``[M, K]`` with MN-major scales, weights ``[2, N, K]``, and room for the result."""

    a: tuple[torch.Tensor, torch.Tensor]
    b: tuple[torch.Tensor, torch.Tensor]
    d: torch.Tensor


def make_problem(num_rows: int = 256) -> Problem:
    generator = torch.Generator().manual_seed(0)
    q, scales = quantize_rows(torch.randn(num_rows, 256, generator=generator))
    b = torch.randn(2, 128, 256, generator=generator)
    weights = [deep_gemm.per_block_cast_to_fp8(w, use_ue8m0=False) for w in b]
    return Problem(
        (q, deep_gemm.get_mn_major_tma_aligned_tensor(scales)),
        (torch.stack([w for w, _ in weights]), torch.stack([s for _, s in weights])),
        torch.empty(num_rows, 128, dtype=BF16),
    )


def masked(problem: Problem, counts: torch.Tensor, expected_m: int = 1) -> torch.Tensor:
    q, scales = problem.a
    per_group = scales.view(2, -1, 2)
    a = q.view(2, -1, 256), deep_gemm.get_mn_major_tma_aligned_tensor(per_group)
    d = problem.d.view(2, -1, 128)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, problem.b, d, counts, expected_m)
    return d


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_both_contiguous_layouts_and_the_masked_one_agree_and_leave_nan_elsewhere():
    indices = torch.full((256,), -1, dtype=torch.int32)
    indices[:5], indices[128:140] = 0, 1
    outs = []
    for layout, is_psum in ((int32(5, 140), True), (indices, False)):
        problem = make_problem()
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            problem.a, problem.b, problem.d, layout, use_psum_layout=is_psum
        )
        outs.append(problem.d)
    outs.append(masked(make_problem(), int32(5, 12)).view(256, 128))
    q, scales = make_problem().a
    rows = q.double() * scales.double().repeat_interleave(128, dim=1)
    w, ws = make_problem().b
    full = w.double() * ws.double().repeat_interleave(128, dim=-1)
    for out in outs:
        assert_rows_close(out[:5].double(), rows[:5] @ full[0].T, dtype=BF16)
        assert_rows_close(out[128:140].double(), rows[128:140] @ full[1].T, dtype=BF16)
        assert out[5:128].isnan().all()
        assert out[140:].isnan().all()
    assert_bits_equal(outs[0], outs[1])


@pytest.mark.parametrize(
    ("layout", "is_psum", "named"),
    [
        (int32(5, 140).long(), True, "layout of torch.int64"),
        (int32(5), True, "1 ends for 2 groups"),
        (int32(5, 40), True, "one is not in 128 to 256"),
        (int32(5, 257), True, "one is not in 128 to 256"),
        (int32(0, 1), False, "2 row indices for 256 rows"),
        (torch.arange(256).div(16).int() % 2, False, "rows of group 0 are not consecutive"),
        (torch.arange(256).ge(100).int(), False, "a block of group 0 holds rows of another"),
        (torch.arange(256).ge(1).int() - 1, False, "group 0 starts at row 1"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout, is_psum, named):
    a, b, d = make_problem()
    with pytest.raises(RuntimeError, match=named):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout, use_psum_layout=is_psum)


def test_masked_arguments_are_checked():
    for counts, named in ((int32(1, 129), "masked_m"), (int32(1), "masked_m of shape")):
        with pytest.raises(RuntimeError, match=named):
            masked(make_problem(), counts)
    with pytest.raises(RuntimeError, match="masked_m int32"):
        masked(make_problem(), int32(1, 1).long())
    with pytest.raises(RuntimeError, match="expected_m"):
        masked(make_problem(), int32(1, 1), expected_m=0)
    with pytest.raises(RuntimeError, match="32 rows per group are not whole blocks"):
        masked(make_problem(64), int32(1, 1))


def test_dense_operands_are_checked():
    (q, scales), (w, ws), d = make_problem()
    dense = (q, scales), (w[0], ws[0]), d
    deep_gemm.fp8_gemm_nt(*dense)
    skewed = torch.empty(q.numel() + 8, dtype=torch.uint8)[8:].view(FP8).view(q.shape)
    cases = [
        (((q, scales.contiguous()), dense[1], d), "SFA"),
        (((q, scales.double()), dense[1], d), "SM90 takes float32"),
        (((q.bfloat16(), scales), dense[1], d), "A of torch.bfloat16"),
        (((q, scales), dense[1], d.float()), "write BF16"),
        (((q, scales), dense[1], d.T.contiguous().T), "D must be contiguous"),
        (((q, scales), (w[0], ws[0, :, :1]), d), "scales must be"),
        (((skewed, scales), dense[1], d), "does not start at 16 bytes"),
        (((q, scales), (w[0, :100], ws[0]), d[:, :100]), "whole 16 bytes"),
    ]
    for arguments, named in cases:
        with pytest.raises(RuntimeError, match=named):
            deep_gemm.fp8_gemm_nt(*arguments)


def test_bf16_products_take_64_columns_at_a_time():
    a, b = torch.ones(4, 96, dtype=BF16), torch.ones(8, 96, dtype=BF16)
    with pytest.raises(RuntimeError, match="K 96"):
        deep_gemm.bf16_gemm_nt(a, b, torch.empty(4, 8, dtype=BF16))
    d = torch.empty(4, 8, dtype=BF16)
    deep_gemm.bf16_gemm_nt(a[:, :64].contiguous(), b[:, :64].contiguous(), d)
    assert d.eq(64).all()


def test_settings_are_checked():
    with pytest.raises(RuntimeError, match="7"):
        deep_gemm.set_mk_alignment_for_contiguous_layout(7)
    with pytest.raises(RuntimeError, match="133 SMs"):
        deep_gemm.set_num_sms(133)
    deep_gemm.set_num_sms(111)
    assert deep_gemm.get_num_sms() == STATE.num_sms == 111
    with pytest.raises(RuntimeError, match="111 SMs, must be even"):
        masked(make_problem(), int32(1, 1))


def test_sm100_scales_are_checked():
    DEVICE.major = 10
    a, b, d = make_problem(512)
    with pytest.raises(DeviceAssertError, match="power of two"):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, torch.zeros(512).int())
    with pytest.raises(RuntimeError, match="psum takes row-major float32 scales only"):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, int32(5, 300), use_psum_layout=True)
    packed = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(torch.ones(512, 2))
    with pytest.raises(RuntimeError, match="float32 SFB is packed again"):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (a[0], packed), b, d, int32(5, 300), use_psum_layout=True
        )


@pytest.mark.parametrize(("size", "aligned"), [(1, 4), (4, 4), (5, 8), (128, 128)])
def test_sizes_are_aligned_to_16_bytes(size, aligned):
    assert deep_gemm.get_tma_aligned_size(size, 4) == aligned


def test_exponents_are_packed_little_endian():
    """Byte j of an int32 is the exponent of block 4 i + j."""
    scales = torch.tensor([[2.0**-3, 1.0, 2.0, 4.0, 8.0]])
    packed = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(scales)
    assert packed.tolist() == [[124 | 127 << 8 | 128 << 16 | -127 << 24, 130]]


def test_signatures_are_those_of_the_library():
    """The compiled binding calls ``epilogue`` what its own stubs call ``epilogue_class``; FP8
    products are aliases of the FP8 and FP4 ones."""
    manifest = manifest_of("deep_gemm")
    compared = set()
    for name in deep_gemm.__all__:
        listed = manifest.get(name.replace("fp8_gemm", "fp8_fp4_gemm"), ["*args", "**kwargs"])
        if listed != ["*args", "**kwargs"]:
            want = [parameter.replace("epilogue_class", "epilogue") for parameter in listed]
            assert described(getattr(deep_gemm, name)) == want, name
            compared.add(name)
    assert len(compared) == 12
    assert described(deep_gemm.testing.calc_diff) == manifest["calc_diff"]
