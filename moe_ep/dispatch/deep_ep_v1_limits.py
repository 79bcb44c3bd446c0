"""What DeepEP V1 can serve, and the bytes of its buffers: known without the library or a GPU.

The formulas are the library's (``csrc/legacy/config.hpp``, DeepEP 2.1.0), the limits those of its
kernels. Shape letters: R ranks, n most tokens of a rank in low-latency mode, H hidden.
"""

import math
from typing import NamedTuple

from moe_ep.dispatch import deep_ep_library as library
from moe_ep.dispatch.base import DispatchSpec

# num_ranks for which normal-mode kernels exist, and the largest receive chunk, in tokens, of the
# library's dispatch and combine configs for it: over NVLink, over RDMA.
CHUNKS = {
    2: (256, 0),
    4: (256, 0),
    8: (256, 0),
    16: (288, 140),
    **dict.fromkeys((24, 32, 48, 64), (288, 128)),
    96: (480, 132),
    128: (560, 132),
    144: (720, 132),
    160: (720, 132),
}
LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
LOW_LATENCY_MAX_TOPK = 11
# 2 (n + 1) work requests fit into a queue pair of NVSHMEM_QP_DEPTH = 1024.
LOW_LATENCY_MAX_TOKENS = 511
# Rows of a slot are a whole number of these, or the masked GEMM writes into the next slot.
MASKED_ROW_ALIGNMENT = 128
# Slots that the normal-mode kernels can count: per rank on one node, per node over several.
MAX_SLOTS, MAX_SLOTS_PER_NODE = 128, 512


class BufferBytes(NamedTuple):
    """Of one rank: NVLink and RDMA buffers of normal mode, RDMA buffer of low-latency mode."""

    nvl: int
    normal_rdma: int
    low_latency_rdma: int


def spec_limits(spec: DispatchSpec) -> str | None:
    """Why no installation of V1 can serve this spec in both modes; None when one can."""
    if (problem := library.common_problem(spec)) is not None:
        return problem
    ranks, slots = spec.num_ranks, spec.num_slots_per_rank
    if ranks not in CHUNKS:
        return f"num_ranks: {ranks} given, V1 kernels exist for {', '.join(map(str, CHUNKS))}"
    if spec.hidden not in LOW_LATENCY_HIDDEN:
        sizes = ", ".join(map(str, LOW_LATENCY_HIDDEN))
        return f"hidden: {spec.hidden} given, low-latency kernels exist for {sizes}"
    if spec.num_topk > LOW_LATENCY_MAX_TOPK:
        return f"num_topk: {spec.num_topk} given, at most {LOW_LATENCY_MAX_TOPK} in low latency"
    most_slots = MAX_SLOTS if ranks <= library.RANKS_PER_NODE else MAX_SLOTS_PER_NODE // 8
    if slots > most_slots:
        return f"num_slots_per_rank: {slots} given, at most {most_slots} with {ranks} ranks"
    if rounded_capacity(spec) > LOW_LATENCY_MAX_TOKENS:
        return (
            f"capacity: {spec.capacity} given ({rounded_capacity(spec)} in whole blocks), at most "
            f"{LOW_LATENCY_MAX_TOKENS} tokens of a rank in low latency"
        )
    return None


def rounded_capacity(spec: DispatchSpec) -> int:
    """n: the smallest capacity with ``R * n`` rows per slot in whole blocks."""
    block = math.lcm(MASKED_ROW_ALIGNMENT, spec.row_alignment)
    return library.align(max(spec.capacity, 1), block // math.gcd(block, spec.num_ranks))


def buffer_sizes(spec: DispatchSpec, num_sms: int) -> BufferBytes:
    nvl_chunk, rdma_chunk = CHUNKS[spec.num_ranks]
    num_nodes = max(spec.num_ranks // library.RANKS_PER_NODE, 1)
    nvl_ranks, channels = min(spec.num_ranks, library.RANKS_PER_NODE), num_sms // 2
    # BF16 row, source 8; room for 128 choices (id 8, weight 4) and 128 scales (4)
    row = 2 * spec.hidden + 8 + 128 * (8 + 4 + 4)
    nvl = channels * nvl_ranks * ((2 * num_nodes + 3) * 4 + nvl_chunk * row)
    rdma = 2 * channels * num_nodes * (2 * 8 + 2) * 4 + 2 * channels * num_nodes * rdma_chunk * (
        row + 16
    )
    return BufferBytes(
        nvl=library.align(nvl, 128),
        normal_rdma=library.align(rdma, 128) if rdma_chunk else 0,
        low_latency_rdma=_low_latency_bytes(spec),
    )


def _low_latency_bytes(spec: DispatchSpec) -> int:
    num_tokens, scales = rounded_capacity(spec), spec.hidden // 128
    dispatch_slot = 16 + max(2 * spec.hidden, spec.hidden + 4 * scales)
    combine_slot = 4 * scales + 2 * spec.hidden
    rows = spec.num_slots * num_tokens
    send = max(num_tokens * dispatch_slot, rows * combine_slot)
    receive = rows * max(dispatch_slot, combine_slot)
    total = 2 * (send + receive + library.align(4 * spec.num_slots, 128))
    return (total // 128 + 1) * 128  # the next multiple, even of a multiple


def has_one_buffer(spec: DispatchSpec) -> bool:
    """Whether both modes share a buffer: over several nodes, where NVSHMEM serves both."""
    return spec.num_ranks > library.RANKS_PER_NODE


def total_bytes(spec: DispatchSpec, sizes: BufferBytes) -> int:
    """Of one rank."""
    if has_one_buffer(spec):
        return sizes.nvl + max(sizes.normal_rdma, sizes.low_latency_rdma)
    return sizes.nvl + sizes.low_latency_rdma
