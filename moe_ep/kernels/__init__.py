"""Triton kernels of the MoE layer, for GPUs without a library and for the glue no library has.

Every module here but this one imports triton, as its kernels must be module-level functions; so
they are imported where they are used, inside functions, and nothing else imports them earlier.
Kernels are written for Hopper (``sm_90``) and never wait for the host: sizes that only the device
knows (rows of a slot, real tokens of a step) are read by the kernels.

With ``TRITON_INTERPRET=1``, set before triton is imported, they run on a CPU, slowly; that is for
tests at small sizes.
"""

from functools import cache

import torch

FP8_CAPABILITY = (8, 9)  # the first with e4m3 tensor cores


def device_problem(device: torch.device, *, needs_fp8: bool) -> str | None:
    """None when kernels can run on tensors of this device, else the reason why not."""
    try:
        import triton
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    if triton.knobs.runtime.interpret:
        return None
    if device.type != "cuda" or not torch.cuda.is_available():
        return "triton kernels need a CUDA device (or TRITON_INTERPRET=1, which is for tests)"
    capability = torch.cuda.get_device_capability(device)
    if needs_fp8 and capability < FP8_CAPABILITY:
        needed = ".".join(map(str, FP8_CAPABILITY))
        return f"FP8 needs compute capability {needed}, this device has {capability}"
    return None


@cache
def are_used(device: torch.device) -> bool:
    """Whether these kernels, and not torch, do what both can do on tensors of this device.

    The one place where that is decided. Not in the interpreter: torch is faster there.
    """
    return device.type == "cuda" and device_problem(device, needs_fp8=True) is None
