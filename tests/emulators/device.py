"""The GPU that the emulated libraries believe in, and how a process is made to see them.

One object is both what the emulators obey and what ``torch.cuda.get_device_properties`` returns, so
that a backend asks the same question here and on a real machine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tests.emulators.install import emulated


@dataclass
class EmulatedDevice:
    """The properties that anyone reads. Tests set ``major`` to 10 for SM100."""

    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    total_memory: int = 141 << 30
    name: str = "emulated H200"


DEVICE = EmulatedDevice()


@contextmanager
def emulated_kernels(*, major: int = 9) -> Iterator[EmulatedDevice]:
    """Stand-ins of ``deep_gemm`` and ``flash_mla`` over a GPU of this generation, as a new process
    finds them; what was there before is put back at the end."""
    from tests.emulators.deep_gemm.state import STATE

    properties = torch.cuda.get_device_properties
    with emulated(
        "deep_gemm",
        "deep_gemm.testing",
        "deep_gemm.utils",
        "flash_mla",
        "flash_mla.flash_mla_interface",
    ):
        STATE.reset()
        vars(DEVICE).update(vars(EmulatedDevice(major=major)))
        torch.cuda.get_device_properties = lambda device=None: DEVICE  # type: ignore[assignment]
        try:
            yield DEVICE
        finally:
            torch.cuda.get_device_properties = properties
            STATE.reset()
            vars(DEVICE).update(vars(EmulatedDevice()))
