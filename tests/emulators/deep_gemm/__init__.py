"""``deep_gemm`` 2.8.2 on CPU tensors: the functions that grouped and dense FP8/BF16 products use.

Signatures are the compiled binding's. Stricter than the library: what it would silently repair in
every call (scale layouts), silently get wrong (alignments, rows of one group over another's) or
assert on the device is an error here, and rows whose content it leaves open are NaN.
The generation of the GPU is ``tests.emulators.device.DEVICE.major``.
"""

from tests.emulators.deep_gemm import testing, utils
from tests.emulators.deep_gemm.gemms import (
    bf16_gemm_nt,
    fp8_gemm_nt,
    m_grouped_bf16_gemm_nt_contiguous,
    m_grouped_bf16_gemm_nt_masked,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
)
from tests.emulators.deep_gemm.layout import (
    get_mk_alignment_for_contiguous_layout,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_tensor,
    get_theoretical_mk_alignment_for_contiguous_layout,
    get_tma_aligned_size,
    set_mk_alignment_for_contiguous_layout,
    transform_sf_into_required_layout,
)
from tests.emulators.deep_gemm.state import DeviceAssertError, get_num_sms, set_num_sms
from tests.emulators.deep_gemm.utils import per_block_cast_to_fp8, per_token_cast_to_fp8

__version__ = "2.8.2"
__all__ = [
    "DeviceAssertError",
    "bf16_gemm_nt",
    "fp8_gemm_nt",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "get_num_sms",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "per_block_cast_to_fp8",
    "per_token_cast_to_fp8",
    "set_mk_alignment_for_contiguous_layout",
    "set_num_sms",
    "testing",
    "transform_sf_into_required_layout",
    "utils",
]
