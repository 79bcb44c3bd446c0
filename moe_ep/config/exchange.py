"""What DeepEP can serve and the bytes of its buffers, as plain arithmetic on sizes.

No tensor, no library and no device is needed, so a plan asks here what an engine asks. The formulas
are the library's (``csrc/legacy/config.hpp`` and ``csrc/elastic/buffer.hpp``, DeepEP 2.1.0), the
limits those of its kernels. Shape letters: R ranks, S slots per rank, n most tokens of a rank in
low-latency mode, H hidden.
"""

import math
from collections.abc import Set
from enum import Enum
from typing import NamedTuple, Protocol

RANKS_PER_NODE = 8
NUM_SMS = 20  # that exchange kernels take in normal mode; the library's own default

# num_ranks for which normal-mode kernels of V1 exist, and the largest receive chunk, in tokens, of
# the library's dispatch and combine configs for it: over NVLink, over RDMA.
V1_CHUNKS = {
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
NORMAL_HIDDEN_MULTIPLE = 16  # FP8 values in 16 bytes
NORMAL_MAX_TOPK = 32  # a lane of a warp for each
# Slots that the normal-mode kernels of V1 can count: per rank on one node, per node over several.
V1_MAX_SLOTS, V1_MAX_SLOTS_PER_NODE = 128, 512

V2_HIDDEN_MULTIPLE = 256  # of the combine kernel
V2_MAX_TOPK = 32
V2_MAX_RANKS, V2_MAX_SLOTS, V2_MAX_SLOTS_PER_RANK = 1024, 2048, 256
V2_MAX_SLOTS_PER_RANK_OVER_NODES = 120  # ranks of a node + slots of a rank are at most 128
V2_MEMORY_ALIGNMENT = 2 << 20
# Counters and signals for the largest number of ranks and slots (``WorkspaceLayout``).
V2_WORKSPACE_BYTES = 14 << 20


class Mode(Enum):
    """The two exchange modes of one step; all ranks use the same one.

    Which layout comes back in a mode is the dispatcher's business.
    """

    NORMAL = "normal"  # exact counts: prefill and mixed steps; usually the contiguous layout
    LOW_LATENCY = "low_latency"  # fixed capacity: decode steps; usually the masked layout


class Sizes(Protocol):
    """What the formulas read; ``moe_ep.dispatch.DispatchSpec`` has it, and so has a plan."""

    @property
    def hidden(self) -> int: ...
    @property
    def num_topk(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def num_slots_per_rank(self) -> int: ...
    @property
    def max_tokens_per_rank(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def row_alignment(self) -> int: ...
    @property
    def num_sms(self) -> int: ...
    @property
    def modes(self) -> Set[Mode]: ...


class V1BufferBytes(NamedTuple):
    """Of one rank: NVLink and RDMA buffers of normal mode, RDMA buffer of low-latency mode."""

    nvl: int
    normal_rdma: int
    low_latency_rdma: int

    def total(self, sizes: Sizes) -> int:
        if v1_has_one_buffer(sizes):
            return self.nvl + max(self.normal_rdma, self.low_latency_rdma)
        return self.nvl + self.low_latency_rdma


def align(size: int, alignment: int) -> int:
    """``size`` rounded up to a multiple of ``alignment``."""
    return -(-size // alignment) * alignment


def v1_limit(sizes: Sizes) -> str | None:
    """Why V1 cannot serve these sizes in their modes; None when it can."""
    if (problem := _v1_ranks_limit(sizes)) is not None:
        return problem
    limits = {Mode.LOW_LATENCY: _low_latency_limit, Mode.NORMAL: _normal_limit}
    problems = (limit(sizes) for mode, limit in limits.items() if mode in sizes.modes)
    return next(filter(None, problems), None)


def _v1_ranks_limit(sizes: Sizes) -> str | None:
    ranks = sizes.num_ranks
    if Mode.NORMAL in sizes.modes and ranks not in V1_CHUNKS:
        return f"num_ranks: {ranks} given, V1 kernels exist for {', '.join(map(str, V1_CHUNKS))}"
    if ranks > RANKS_PER_NODE and ranks % RANKS_PER_NODE:
        return f"num_ranks: {ranks} given, over several nodes a multiple of 8 needed"
    return None


def _normal_limit(sizes: Sizes) -> str | None:
    ranks, slots = sizes.num_ranks, sizes.num_slots_per_rank
    most_slots = V1_MAX_SLOTS if ranks <= RANKS_PER_NODE else V1_MAX_SLOTS_PER_NODE // 8
    if sizes.hidden % NORMAL_HIDDEN_MULTIPLE:
        return f"hidden: {sizes.hidden} given, V1 needs a multiple of {NORMAL_HIDDEN_MULTIPLE}"
    if sizes.num_topk > NORMAL_MAX_TOPK:
        return f"num_topk: {sizes.num_topk} given, at most {NORMAL_MAX_TOPK}"
    if slots > most_slots:
        return f"num_slots_per_rank: {slots} given, at most {most_slots} with {ranks} ranks"
    return None


def _low_latency_limit(sizes: Sizes) -> str | None:
    if sizes.hidden not in LOW_LATENCY_HIDDEN:
        known = ", ".join(map(str, LOW_LATENCY_HIDDEN))
        return f"hidden: {sizes.hidden} given, low-latency kernels exist for {known}"
    if sizes.num_topk > LOW_LATENCY_MAX_TOPK:
        return f"num_topk: {sizes.num_topk} given, at most {LOW_LATENCY_MAX_TOPK} in low latency"
    if v1_rounded_capacity(sizes) > LOW_LATENCY_MAX_TOKENS:
        return (
            f"capacity: {sizes.capacity} given ({v1_rounded_capacity(sizes)} in whole blocks), at "
            f"most {LOW_LATENCY_MAX_TOKENS} tokens of a rank in low latency"
        )
    return None


def v1_rounded_capacity(sizes: Sizes) -> int:
    """n: the smallest capacity with ``R * n`` rows per slot in whole blocks."""
    block = math.lcm(MASKED_ROW_ALIGNMENT, sizes.row_alignment)
    return align(max(sizes.capacity, 1), block // math.gcd(block, sizes.num_ranks))


def v1_buffer_bytes(sizes: Sizes) -> V1BufferBytes:
    """Nothing for a mode that is not wanted."""
    nvl, rdma = _normal_bytes(sizes) if Mode.NORMAL in sizes.modes else (0, 0)
    low_latency = _low_latency_bytes(sizes) if Mode.LOW_LATENCY in sizes.modes else 0
    return V1BufferBytes(nvl=nvl, normal_rdma=rdma, low_latency_rdma=low_latency)


def v1_has_one_buffer(sizes: Sizes) -> bool:
    """Whether all modes share a buffer: over several nodes, where NVSHMEM serves both."""
    return sizes.num_ranks > RANKS_PER_NODE


def _normal_bytes(sizes: Sizes) -> tuple[int, int]:
    """Over NVLink, over RDMA."""
    nvl_chunk, rdma_chunk = V1_CHUNKS[sizes.num_ranks]
    num_nodes = max(sizes.num_ranks // RANKS_PER_NODE, 1)
    nvl_ranks, channels = min(sizes.num_ranks, RANKS_PER_NODE), sizes.num_sms // 2
    # BF16 row, source 8; room for 128 choices (id 8, weight 4) and 128 scales (4)
    row = 2 * sizes.hidden + 8 + 128 * (8 + 4 + 4)
    nvl = channels * nvl_ranks * ((2 * num_nodes + 3) * 4 + nvl_chunk * row)
    rdma = 2 * channels * num_nodes * ((2 * 8 + 2) * 4 + rdma_chunk * (row + 16))
    return align(nvl, 128), align(rdma, 128) if rdma_chunk else 0


def _low_latency_bytes(sizes: Sizes) -> int:
    num_tokens, scales = v1_rounded_capacity(sizes), sizes.hidden // 128
    num_slots = sizes.num_ranks * sizes.num_slots_per_rank
    dispatch_slot = 16 + max(2 * sizes.hidden, sizes.hidden + 4 * scales)
    combine_slot = 4 * scales + 2 * sizes.hidden
    rows = num_slots * num_tokens
    send = max(num_tokens * dispatch_slot, rows * combine_slot)
    receive = rows * max(dispatch_slot, combine_slot)
    total = 2 * (send + receive + align(4 * num_slots, 128))
    return (total // 128 + 1) * 128  # the next multiple, even of a multiple


def v2_limit(sizes: Sizes) -> str | None:
    """Why V2 cannot serve these sizes; None when it can."""
    slots = sizes.num_slots_per_rank
    is_one_node = sizes.num_ranks <= RANKS_PER_NODE
    most = V2_MAX_SLOTS_PER_RANK if is_one_node else V2_MAX_SLOTS_PER_RANK_OVER_NODES
    if sizes.hidden % V2_HIDDEN_MULTIPLE:
        return f"hidden: {sizes.hidden} given, V2 needs a multiple of {V2_HIDDEN_MULTIPLE}"
    if sizes.num_topk > V2_MAX_TOPK:
        return f"num_topk: {sizes.num_topk} given, at most {V2_MAX_TOPK}"
    if sizes.num_ranks > V2_MAX_RANKS:
        return f"num_ranks: {sizes.num_ranks} given, at most {V2_MAX_RANKS}"
    if slots > most:
        return f"num_slots_per_rank: {slots} given, at most {most}"
    if slots * sizes.num_ranks > V2_MAX_SLOTS:
        total = slots * sizes.num_ranks
        return f"num_slots_per_rank x num_ranks: {total} given, at most {V2_MAX_SLOTS}"
    return None


def v2_buffer_bytes(sizes: Sizes, *, is_fp8: bool) -> int:
    """Buffer and workspace of one rank when all ranks are on one NVLink node. Over several nodes
    the library adds forwarding buffers that depend on the topology it finds.

    is_fp8: what travels to the experts.
    """
    num_lists = sizes.num_topk * (4 + 4)  # ids and weights
    # Scales as if for blocks of 32, as the library reckons.
    fp8_row = sizes.hidden + align(-(-sizes.hidden // 32) * 4, 32)
    row = fp8_row if is_fp8 else 2 * sizes.hidden
    sent = row + align(num_lists + (1 + sizes.num_topk) * 4, 32)
    returned = 2 * sizes.hidden + align(num_lists, 32)
    per_token = max(sizes.num_ranks * sent, min(sizes.num_ranks, sizes.num_topk) * returned)
    tokens = max(sizes.max_tokens_per_rank, sizes.capacity, 1)
    return align(tokens * per_token, V2_MEMORY_ALIGNMENT) + V2_WORKSPACE_BYTES
