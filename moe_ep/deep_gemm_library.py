"""DeepGEMM as this engine uses it: whether it can run here, and its operands in its own layouts.

The library repairs an operand in a wrong layout by launching another kernel in every call, and does
not notice a wrong alignment at all; so operands are brought into their final form in this one
place. Nothing here reads a value on the host after the weights are loaded.

Scales, with rows ("mn") of stride 1 and each column of blocks starting at 16 bytes (MN-major):
- SM90: float32, one per row and 128 columns; weights keep one per 128x128, row-major.
- SM100: powers of two alone, the exponents of four blocks packed into an int32 (UE8M0), one per row
  and 512 columns, for weights too.
"""

import importlib
from types import ModuleType

import torch

from moe_ep.fp8 import (
    BLOCK,
    FP8,
    ScaleFormat,
    ceil_to_power_of_two,
    dequantize_blocks,
    new_scales,
    num_blocks,
    pack_exponents,
    quantize_blocks,
    to_columns,
)
from moe_ep.fp8_rows import quantize_rows


def find_problem() -> str | None:
    """None when DeepGEMM can run in this process, else the reason why not."""
    try:
        importlib.import_module("deep_gemm")
    # It asserts a CUDA home in some versions and loads shared libraries by hand in others.
    except (ImportError, AssertionError, OSError) as error:
        return f"deep_gemm cannot be imported: {error}"
    try:
        device = torch.cuda.get_device_properties()
    except (AssertionError, RuntimeError) as error:
        return f"deep_gemm needs a GPU: {error}"
    if device.major not in (9, 10):
        return f"deep_gemm needs SM90 or SM100, this device is SM{device.major}{device.minor}"
    return None


class DeepGemm:
    """The imported library of this process, for the GPU that it runs on.

    row_alignment: rows of a slot start at multiples of this in the contiguous layout, and a slot
        has a multiple of it in the masked one; set in the library, process-wide.
    is_packed: scales are packed UE8M0 (SM100), not float32 (SM90).
    """

    def __init__(self) -> None:
        """Raises RuntimeError with the reason when ``find_problem`` gives one."""
        if (problem := find_problem()) is not None:
            raise RuntimeError(problem)
        self.lib: ModuleType = importlib.import_module("deep_gemm")
        self.is_packed = torch.cuda.get_device_properties().major == 10
        self.row_alignment: int = self.lib.get_theoretical_mk_alignment_for_contiguous_layout()
        self.lib.set_mk_alignment_for_contiguous_layout(self.row_alignment)

    @property
    def scale_format(self) -> ScaleFormat:
        return ScaleFormat.UE8M0 if self.is_packed else ScaleFormat.FLOAT32

    def check_alignment(self) -> None:
        """Raises RuntimeError when someone else has set another one: it is the kernels' block, and
        they would give wrong results without an error."""
        found = self.lib.get_mk_alignment_for_contiguous_layout()
        if found != self.row_alignment:
            raise RuntimeError(
                f"the alignment in deep_gemm was changed from {self.row_alignment} to {found}"
            )

    def leave_sms(self, num_sms: int) -> int:
        """Use all SMs of the device but ``num_sms``, which another library's kernels keep at the
        same time; process-wide. Returns the number used, which must be even for the library.

        Raises ValueError when too few would be left.
        """
        total = torch.cuda.get_device_properties().multi_processor_count
        used = (total - num_sms) // 2 * 2
        if num_sms < 0 or used < 2:
            raise ValueError(f"{num_sms} of {total} SMs cannot be left to other kernels")
        self.lib.set_num_sms(used)
        return used

    def quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """BF16 or float32 ``[.., M, K]`` as an A operand."""
        return quantize_rows(x, scale_format=self.scale_format, is_column_major=True)

    def rows(self, rows: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """FP8 rows with their scales as an A operand; what lies right already is not copied.

        scales: float32 ``[.., M, ceil(K / 128)]`` of any strides, or on SM100 int32 as the library
        wants it. There, float32 scales that are no powers of two are rounded up and the rows
        rounded once more: have the sender quantise with powers of two.
        """
        if scales.dtype is torch.int32 and self.is_packed:
            return rows, scales
        if scales.dtype is not torch.float32:
            raise ValueError(f"scales of {scales.dtype} do not fit this GPU")
        if not self.is_packed:
            return rows, self.lib.get_mn_major_tma_aligned_tensor(scales)
        rounded = ceil_to_power_of_two(scales.contiguous())
        ratio = (scales / rounded).repeat_interleave(BLOCK, dim=-1)[..., : rows.shape[-1]]
        # Not packed by the library's kernel, which asserts on the device, and so ends the process,
        # when rows of padding hold anything but powers of two.
        return (rows.float() * ratio).to(FP8), to_columns(pack_exponents(rounded))

    def weight(
        self, weight: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """FP8 ``[N, K]`` with float32 scales per 128x128 as a B operand, ready for every call.

        On SM100 a weight whose scales are no powers of two is quantised anew. Waits for the GPU.
        """
        if not self.is_packed:
            return weight, scale.contiguous()
        if not torch.equal(scale, ceil_to_power_of_two(scale.contiguous())):
            restored = dequantize_blocks(weight, scale, torch.float32)
            weight, scale = quantize_blocks(restored, use_ue8m0=True)
        packed = self.lib.transform_sf_into_required_layout(
            scale.contiguous(), weight.shape[0], weight.shape[1], (1, BLOCK, BLOCK), is_sfa=False
        )
        return weight, packed

    def empty_weight_scales(
        self, num_weights: int, shape: tuple[int, int], device: torch.device
    ) -> torch.Tensor:
        """Uninitialised room for the scales of many weights ``[N, K]``, each as ``weight`` makes
        them."""
        num_rows, num_cols = shape
        if self.is_packed:
            return new_scales(
                (num_weights, num_rows),
                num_cols,
                scale_format=self.scale_format,
                is_column_major=True,
                device=device,
            )
        blocks = (num_weights, num_blocks(num_rows), num_blocks(num_cols))
        return torch.empty(blocks, dtype=torch.float32, device=device)
