"""Reference-counted ids of the paged cache's blocks, and which of them hold known tokens.

Knows nothing of requests, of the cache's memory or of a device: a block is a number. The last block
freed is the first handed out, so that a small working set stays warm. A block that was published
under a name keeps its contents while nobody owns it, until no other block is free: of such, the one
that was freed first goes first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice, takewhile

from moe_ep.engine.prefix import Name


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that hold the latents of ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Blocks ``0 .. num_blocks - 1``; each is free or has one or more owners, and may have a name,
    which no other block has."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: {num_blocks} given; at least 1 is needed")
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        # Free, but named; in the order in which they were freed.
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self._names: dict[int, Name] = {}
        self._blocks: dict[Name, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._kept)

    def allocate(self, n: int) -> list[int]:
        """Take n blocks, each with one owner; all or none: ValueError when fewer are free."""
        if not 0 <= n <= self.num_free:
            raise ValueError(f"allocate: {n} blocks asked for; {self.num_free} are free")
        self.forget(list(islice(self._kept, max(0, n - len(self._free)))))
        blocks = [self._free.pop() for _ in range(n)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one owner of each block; the last one returns it. ValueError on a free block.

        Of a request's blocks the last ones are freed first: without its beginning none is found.
        """
        for block in reversed(blocks):
            self._check_owned(block)
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._names:
                    self._kept[block] = None
                else:
                    self._free.append(block)

    def publish(self, block: int, name: Name) -> None:
        """Let an owned block, which will not change any more, be found by ``name``, unless another
        already is."""
        self._check_owned(block)
        if name not in self._blocks and block not in self._names:
            self._names[block] = name
            self._blocks[name] = block

    def find(self, names: Sequence[Name]) -> list[int]:
        """The blocks of the first names, up to the first one that is not known."""
        return [self._blocks[name] for name in takewhile(self._blocks.__contains__, names)]

    def num_kept(self, blocks: Sequence[int]) -> int:
        """How many of these blocks nobody owns, so that sharing them leaves fewer free."""
        return sum(block in self._kept for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Add an owner to each block, which is owned or named; ValueError on any other."""
        for block in blocks:
            if block not in self._kept:
                self._check_owned(block)
            self._kept.pop(block, None)
            self._ref_counts[block] += 1

    def forget(self, blocks: Sequence[int]) -> None:
        """Take these blocks' names away, if they have any: nobody finds them any more."""
        for block in blocks:
            name = self._names.pop(block, None)
            if name is not None:
                del self._blocks[name]
            if block in self._kept:
                del self._kept[block]
                self._free.append(block)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def check_integrity(self) -> None:
        """Free blocks, counts and names agree; linear in the number of blocks, meant for idle
        moments."""
        free = {*self._free, *self._kept}
        assert len(free) == self.num_free, f"blocks twice among the free: {sorted(self._free)}"
        unowned = {block for block, count in enumerate(self._ref_counts) if count == 0}
        assert free == unowned, f"free or unowned, but not both: {sorted(free ^ unowned)}"
        assert {name: block for block, name in self._names.items()} == self._blocks
        kept = {block for block in self._names if block in free}
        assert kept == set(self._kept), f"free and named, but not kept: {sorted(kept)}"

    def _check_owned(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} does not exist; there are {self.num_blocks}")
        if self._ref_counts[block] == 0:
            raise ValueError(f"block {block} has no owner; was it freed twice?")
