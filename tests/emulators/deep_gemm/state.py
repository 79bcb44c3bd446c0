"""The settings of the emulated process, and its two kinds of failure."""

from dataclasses import dataclass, field
from typing import Any

from tests.emulators.device import DEVICE


class DeviceAssertError(RuntimeError):
    """An assertion inside a kernel: on a GPU the whole context is lost."""


@dataclass
class ProcessState:
    """What the two setters set: the alignment (128 in a new process) and the SMs (None: all).

    kernels: sizes of products so far. Which of them share a kernel is the library's secret.
    restored: weights in float32, kept by ``gemms``.
    """

    mk_alignment: int = 128
    num_sms: int | None = None
    kernels: set[tuple[Any, ...]] = field(default_factory=set)
    restored: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.mk_alignment, self.num_sms = 128, None
        self.kernels.clear()
        self.restored.clear()


STATE = ProcessState()


def require(condition: bool, text: str) -> None:
    """The library's host assertion."""
    if not condition:
        raise RuntimeError(f"Assertion error (emulator): {text}")


def is_sm100() -> bool:
    require(DEVICE.major in (9, 10), f"Unsupported architecture SM{DEVICE.major}0")
    return DEVICE.major == 10


def set_num_sms(new_num_sms: int) -> None:
    require(0 < new_num_sms <= DEVICE.multi_processor_count, f"{new_num_sms} SMs")
    STATE.num_sms = new_num_sms


def get_num_sms() -> int:
    return STATE.num_sms or DEVICE.multi_processor_count
