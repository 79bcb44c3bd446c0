"""Config and the sizes of the buffers, with the library's formulas."""

import torch

from tests.emulators.deep_ep.checks import host_assert

topk_idx_t = torch.int64

NUM_MAX_NVL_PEERS = 8
BUFFER_ALIGNMENT = 128
ELASTIC_ALIGNMENT = 2 << 20


class Config:
    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        nvl_send, nvl_recv = num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens
        rdma_send, rdma_recv = num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens
        host_assert(num_sms >= 0 and 0 < nvl_send < nvl_recv and rdma_send > 0, "chunk sizes")
        rdma_recv = align(rdma_recv, rdma_send)
        host_assert(rdma_send <= rdma_recv // 2, "RDMA chunk sizes")
        self.num_sms = num_sms
        self.nvl_recv = nvl_recv
        self.rdma_recv = rdma_recv

    @property
    def num_channels(self) -> int:
        return self.num_sms // 2

    def queue_bytes(self, token_bytes: int, num_ranks: int) -> int:
        """What normal mode needs on one node for tokens of this size."""
        queues = self.num_channels * num_ranks
        return queues * (16 + self.nvl_recv * token_bytes) + num_ranks**2 * 4

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        peers = NUM_MAX_NVL_PEERS
        host_assert(num_ranks < peers or num_ranks % peers == 0, "num_ranks")
        num_rdma_ranks, num_nvl_ranks = max(num_ranks // peers, 1), min(num_ranks, peers)
        queues = self.num_channels * num_nvl_ranks
        # source meta 8; at most 128 top-k ids (8) and weights (4), and 128 scales (4)
        token = hidden_bytes + 8 + 128 * (8 + 4 + 4)
        return align(queues * ((2 * num_rdma_ranks + 3) * 4 + self.nvl_recv * token), 128)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        if num_ranks <= NUM_MAX_NVL_PEERS:
            return 0
        host_assert(num_ranks % NUM_MAX_NVL_PEERS == 0 and self.num_sms % 2 == 0, "num_ranks")
        queues = self.num_channels * (num_ranks // NUM_MAX_NVL_PEERS) * 2
        token = hidden_bytes + 8 + 128 * (8 + 4 + 4) + 16
        return align(queues * ((2 * NUM_MAX_NVL_PEERS + 2) * 4 + self.rdma_recv * token), 128)


# num_ranks: NVL send and receive, RDMA send and receive (tokens)
DISPATCH_CHUNKS = {
    2: (24, 256, 6, 128),
    4: (6, 256, 6, 128),
    8: (6, 256, 6, 128),
    16: (36, 288, 20, 128),
    **dict.fromkeys((24, 32, 48, 64), (32, 288, 8, 128)),
    96: (20, 480, 12, 128),
    128: (20, 560, 12, 128),
    144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}
COMBINE_CHUNKS = {
    2: (10, 256, 6, 128),
    4: (9, 256, 6, 128),
    8: (4, 256, 6, 128),
    16: (4, 288, 12, 128),
    **dict.fromkeys((24, 32, 48, 64), (1, 288, 8, 128)),
    96: (1, 480, 8, 128),
    128: (1, 560, 8, 128),
    **dict.fromkeys((144, 160), (2, 720, 8, 128)),
}


def low_latency_bytes(num_max_tokens: int, hidden: int, num_experts: int) -> int:
    """Without the final rounding."""
    num_scales = hidden // 128
    dispatch_slot = 16 + max(2 * hidden, hidden + 4 * num_scales)
    combine_slot = 4 * num_scales + 2 * hidden
    send = max(num_max_tokens * dispatch_slot, num_experts * num_max_tokens * combine_slot)
    recv = num_experts * num_max_tokens * max(dispatch_slot, combine_slot)
    return 2 * (send + recv + align(4 * num_experts, 128))


def low_latency_size_hint(num_max_tokens: int, hidden: int, num_experts: int) -> int:
    size = low_latency_bytes(num_max_tokens, hidden, num_experts)
    return (size // BUFFER_ALIGNMENT + 1) * BUFFER_ALIGNMENT  # the next multiple, even if exact


def elastic_size(
    *,
    num_ranks: int,
    num_max_tokens: int,
    hidden: int,
    num_topk: int,
    element_size: int,
    num_sf_packs: int,
    allow_multiple_reduction: bool,
) -> int:
    """Larger of the dispatch and the combine layout on one NVLink node; not rounded."""
    lists = num_topk * 8
    dispatch = align(hidden * element_size, 32) + align(num_sf_packs * 4, 32)
    dispatch += align(lists + (1 + num_topk) * 4, 32)
    combine = align(hidden * 2, 32) + align(lists, 32)
    num_returned = min(num_ranks, num_topk) if allow_multiple_reduction else num_topk
    return num_max_tokens * max(num_ranks * dispatch, num_returned * combine)


def elastic_size_hint(
    *,
    num_ranks: int,
    num_max_tokens: int,
    hidden: int,
    num_topk: int,
    use_fp8_dispatch: bool,
    allow_multiple_reduction: bool,
) -> int:
    host_assert(num_max_tokens > 0 and hidden > 0, "num_max_tokens_per_rank > 0 and hidden > 0")
    size = elastic_size(
        num_ranks=num_ranks,
        num_max_tokens=num_max_tokens,
        hidden=hidden,
        num_topk=num_topk or 32,
        element_size=1 if use_fp8_dispatch else 2,
        num_sf_packs=-(-hidden // 32) if use_fp8_dispatch else 0,
        allow_multiple_reduction=allow_multiple_reduction,
    )
    return align(size, ELASTIC_ALIGNMENT)


def align(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
