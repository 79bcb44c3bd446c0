"""Puts the stand-ins where ``import deep_ep`` and its like find them."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EMULATED = {
    name: f"tests.emulators.{name}"
    for name in (
        "deep_ep",
        "deep_gemm",
        "deep_gemm.testing",
        "deep_gemm.utils",
        "flash_mla",
        "flash_mla.flash_mla_interface",
    )
}


def install(*names: str) -> None:
    """Make the stand-ins importable under the names of the libraries, in this process."""
    for name in names:
        sys.modules[name] = importlib.import_module(EMULATED[name])


def uninstall(*names: str) -> None:
    for name in names:
        if name in sys.modules and sys.modules[name] is sys.modules.get(EMULATED[name]):
            del sys.modules[name]


@contextmanager
def emulated(*names: str) -> Iterator[None]:
    """``install`` for a while. Rank processes live on after a job, so workers use this."""
    install(*names)
    try:
        yield
    finally:
        uninstall(*names)
