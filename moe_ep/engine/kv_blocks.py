"""Reference-counted ids of the paged cache's blocks.

Knows nothing of requests, of the cache's memory or of a device: a block is a number. The last block
freed is the first handed out, so that a small working set stays warm.
"""

from collections.abc import Sequence


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that hold the latents of ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Blocks ``0 .. num_blocks - 1``; each is free or has one or more owners."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: {num_blocks} given; at least 1 is needed")
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Take n blocks, each with one owner; all or none: ValueError when fewer are free."""
        if not 0 <= n <= self.num_free:
            raise ValueError(f"allocate: {n} blocks asked for; {self.num_free} are free")
        blocks = [self._free.pop() for _ in range(n)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def incref(self, blocks: Sequence[int]) -> None:
        """Add an owner to each block; ValueError on a free one."""
        for block in blocks:
            self._check_owned(block)
            self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one owner of each block; the last one returns it. ValueError on a free block."""
        for block in reversed(blocks):
            self._check_owned(block)
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def check_integrity(self) -> None:
        """Free list and counts agree; linear in the number of blocks, meant for idle moments."""
        free = set(self._free)
        assert len(free) == len(self._free), f"blocks twice in the free list: {sorted(self._free)}"
        unowned = {block for block, count in enumerate(self._ref_counts) if count == 0}
        assert free == unowned, f"free or unowned, but not both: {sorted(free ^ unowned)}"

    def _check_owned(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} does not exist; there are {self.num_blocks}")
        if self._ref_counts[block] == 0:
            raise ValueError(f"block {block} has no owner; was it freed twice?")
