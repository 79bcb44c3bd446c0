"""In which type matrix products are computed.

BF16 values are float32 values, and a BF16 product accumulates in float32 anyway. So where a CPU has
no instructions for BF16, the same product in float32 differs only in rounding, and takes an eighth
of the time that PyTorch's loop takes there (9 against 60 to 70 GFLOP/s on one core with AVX2,
2.3 times less for a single row, whose weight is twice as long).
"""

import torch


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """``dtype``, or float32 for BF16 on a CPU without instructions for it."""
    if dtype is torch.bfloat16 and device.type == "cpu" and not cpu_has_bf16():
        return torch.float32
    return dtype


def cpu_has_bf16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
