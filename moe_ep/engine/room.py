"""What fits into this rank's memory, asked before anything is allocated.

In the order in which a rank starts: exchange buffers, then weights, and the cache gets what is
left. The bytes of weights are those that ``moe-ep plan`` counts (``moe_ep.engine.memory``).
"""

import logging

import psutil
import torch

from attention import BLOCK_SIZE
from attention.products import product_dtype
from moe_ep.config import EngineConfig, ModelConfig
from moe_ep.engine.kv_blocks import blocks_needed
from moe_ep.engine.memory import WeightStorage, weight_bytes
from moe_ep.engine.world import World

logger = logging.getLogger(__name__)


class Room:
    """config: resolved, with its backends named. All errors are MemoryError, with the field whose
    change would help."""

    def __init__(self, config: EngineConfig, model: ModelConfig, world: World) -> None:
        self.config = config
        self.model = model
        self.world = world

    def free_bytes(self) -> int:
        """That this rank may still take; ranks of a host share the memory of its CPUs."""
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()  # what only torch's allocator holds is free
            return torch.cuda.mem_get_info(self.world.device)[0]
        return psutil.virtual_memory().available // self.world.num_local_ranks

    def check_buffers(self, num_bytes: int) -> None:
        backend, free = self.config.moe_a2a_backend, self.free_bytes()
        if num_bytes > free:
            raise MemoryError(
                f"moe_a2a_backend: the buffers of {backend} take {num_bytes} bytes, {free} are free"
                f" on rank {self.world.rank}; lower max_num_seqs or max_num_batched_tokens"
            )
        logger.info("rank %d: buffers of %s: %d bytes", self.world.rank, backend, num_bytes)

    def check_weights(self, num_slots: int) -> None:
        """num_slots: of this rank, in every MoE layer. Loading may need more for a moment."""
        device = self.world.device
        is_sm100 = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10
        storage = WeightStorage.of(
            self.config,
            self.model,
            is_sm100=is_sm100,
            is_cpu=device.type == "cpu",
            is_widened=product_dtype(torch.bfloat16, device) is torch.float32,
        )
        needed = weight_bytes(self.model, storage, num_slots=num_slots)
        free = self.free_bytes()
        if needed.total > free:
            raise MemoryError(
                f"ep_size: {self.config.ep_size} given; the weights of a rank then take"
                f" {needed.total} bytes, {needed.routed_experts} of them routed experts, and {free}"
                f" are free on rank {self.world.rank}; more ranks share the routed experts"
            )

    def cache_blocks(self, bytes_per_block: int, max_model_len: int) -> int:
        """As many as all sequences at full length can use, bounded by this rank's share of the
        memory that is available once buffers are made and weights are loaded."""
        config = self.config
        if config.num_kv_blocks:
            return config.num_kv_blocks
        most_useful = config.max_num_seqs * blocks_needed(max_model_len, BLOCK_SIZE)
        fitting = self._bytes_for_cache() // bytes_per_block - 1  # one more is for padding
        if fitting < 1:
            raise MemoryError(
                f"gpu_memory_utilization: {config.gpu_memory_utilization} given, which leaves no"
                f" room for one cache block of {bytes_per_block} bytes on rank {self.world.rank}"
            )
        return min(most_useful, fitting)

    def _bytes_for_cache(self) -> int:
        """The share is of all of a GPU's memory, but of what is free beside CPUs."""
        free, share = self.free_bytes(), self.config.gpu_memory_utilization
        if self.world.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.world.device).total_memory
            return free - int((1 - share) * total)
        return int(free * share)
