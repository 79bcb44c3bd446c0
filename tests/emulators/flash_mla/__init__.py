"""``flash_mla`` 1.0 on CPU tensors: dense decode over a paged latent cache.

Stricter than the library: old-style arguments to ``get_mla_metadata`` are refused, a schedule is
bound to the lengths it was first used with, and where the library would end the process this raises
``ProcessWouldExit``. Block-table entries and cache rows past a sequence's end are never read.
"""

from tests.emulators.flash_mla.flash_mla_interface import (
    ProcessWouldExit,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

__version__ = "1.0.0"
__all__ = ["ProcessWouldExit", "flash_mla_with_kvcache", "get_mla_metadata"]
