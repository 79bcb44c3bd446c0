"""Settings that an engine wants of the process it runs in."""

import ctypes
import re

import torch

# Parameters of glibc's mallopt, from malloc.h. Larger mmap thresholds are refused.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD = 32 * 2**20
_TRIM_THRESHOLD = 2**31 - 1
# Advice of Linux's madvise, from mman.h; MADV_COLLAPSE is known since 6.1.
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_HUGE_PAGE = 2 * 2**20
# An anonymous private mapping of /proc/self/maps that may be written: heap or allocator memory.
_ANONYMOUS = re.compile(r"(\w+)-(\w+) rw-p 00000000 00:00 0 +(?:\[heap\])?$")


def prepare_process(num_threads: int) -> None:
    """Compute on ``num_threads`` CPU threads, and keep freed memory in the process.

    A step frees and takes the same temporaries again in every layer. By default glibc returns the
    large ones to the kernel at once, which then clears the pages that it gives back: a third of
    the time of a prefill. Other C libraries are left as they are.
    """
    torch.set_num_threads(num_threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)


def use_huge_pages() -> None:
    """Move what this process has allocated so far into huge pages, where Linux offers them.

    A decode step streams all weights; with pages of 4 KiB an eighth of its time goes into address
    translation. Call once the weights are loaded. Where it is not possible nothing changes.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in _anonymous_mappings():
        first, last = -(-start // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
        if last > first:
            madvise(first, last - first, _MADV_HUGEPAGE)
            madvise(first, last - first, _MADV_COLLAPSE)


def _anonymous_mappings() -> list[tuple[int, int]]:
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            found = [_ANONYMOUS.match(line.rstrip()) for line in maps]
    except OSError:
        return []
    return [(int(m[1], 16), int(m[2], 16)) for m in found if m is not None]
