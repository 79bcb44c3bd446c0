"""Time on a GPU, and the speeds that nothing on it can exceed."""

from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.costs import Ceilings
from bench.measure import Samples
from moe_ep.fp8 import FP8

WARM_UP_CALLS = 3
FLUSH_BYTES = 256 << 20  # several times the second-level cache
HOST_LEAD_CYCLES = 400_000  # some 0.2 ms: the host queues the whole sample meanwhile
COPY_BYTES = 1 << 30
MATRIX_SIZE = 8192

Call = Callable[[], Any]
Timer = Callable[[Call], Samples]


class CudaTimer:
    """Times a call on the current device. The cache is filled by reading, not by writing: lines
    that must first be written back would slow the sample down."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._flush = torch.ones(FLUSH_BYTES // 4, device="cuda")

    def __call__(self, call: Call) -> Samples:
        for _ in range(WARM_UP_CALLS):
            call()
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(self._num_samples)
        ]
        for start, stop in pairs:
            self._flush.sum()
            torch.cuda._sleep(HOST_LEAD_CYCLES)
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize()
        return Samples(tuple(start.elapsed_time(stop) / 1e3 for start, stop in pairs))


def measure_ceilings(
    timer: Timer,
    device: torch.device,
    *,
    copy_bytes: int = COPY_BYTES,
    matrix_size: int = MATRIX_SIZE,
) -> Ceilings:
    """From the fastest samples: interruptions and low clocks only ever slow one down."""
    source = torch.ones(copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy = timer(lambda: target.copy_(source)).best
    a, b = (
        torch.randn(matrix_size, matrix_size, dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    qa, qb, one = a.to(FP8), b.to(FP8), torch.ones((), device=device)

    def multiply_fp8() -> torch.Tensor:
        return torch._scaled_mm(
            qa, qb.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    num_flops = 2 * matrix_size**3
    return Ceilings(
        copy_bytes_per_s=2 * copy_bytes / copy,
        bfloat16_flops_per_s=num_flops / timer(lambda: a @ b.T).best,
        fp8_flops_per_s=num_flops / timer(multiply_fp8).best,
        empty_call=timer(lambda: None).median,
    )
