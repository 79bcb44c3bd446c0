"""What of a request's tokens the cache already holds, and letting later requests know.

Knows requests and the block pool, and nothing of steps.
"""

from moe_ep.engine.kv_blocks import BlockPool
from moe_ep.engine.prefix import extend_names
from moe_ep.engine.request import Request


class PrefixCache:
    """Full blocks of one rank's pool by what they hold; ``block_size`` tokens each."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def known(self, request: Request) -> list[int]:
        """Blocks that hold the first of a waiting request's tokens.

        One token is always left to compute, for its logits; two of a request that has sampled
        before, which would be a decode with one. Nothing for one that wants logits of its prompt.
        """
        if request.prompt_logprobs is not None:
            return []
        num_left = 1 if request.num_output_tokens == 0 else 2
        num_blocks = (len(request.token_ids) - num_left) // self._block_size
        extend_names(request.block_names, request.token_ids, self._block_size, num_blocks)
        return self._pool.find(request.block_names[:num_blocks])

    def take(self, request: Request) -> None:
        """Let a request that starts, or starts again, go on after what is known."""
        known = self.known(request)
        self._pool.share(known)
        request.block_table.extend(known)
        request.num_computed_tokens = len(known) * self._block_size
        if request.num_output_tokens == 0:
            request.num_cached_tokens = request.num_computed_tokens

    def publish(self, request: Request, start: int) -> None:
        """Let others find the blocks that its computed tokens from ``start`` on have filled."""
        num_full = request.num_computed_tokens // self._block_size
        extend_names(request.block_names, request.token_ids, self._block_size, num_full)
        for index in range(start // self._block_size, num_full):
            self._pool.publish(request.block_table[index], request.block_names[index])
