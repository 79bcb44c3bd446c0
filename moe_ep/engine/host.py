"""Settings that an engine wants of the process it runs in."""

import ctypes

import torch

# Parameters of glibc's mallopt, from malloc.h. Larger mmap thresholds are refused.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD = 32 * 2**20
_TRIM_THRESHOLD = 2**31 - 1


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
