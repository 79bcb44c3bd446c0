"""Block tables as the host reads them when a step is planned: arrays, and no loop over blocks.

A request keeps its table as an ``array("i")``. It grows like a list, and many are joined in less
than half of the time that NumPy arrays or tensors take. It cannot grow while an array shares its
memory, so whatever is made of tables is a copy.

Shape letters: B requests.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from attention.base import BLOCK_SIZE, AttentionBatch


def joined(block_tables: "Sequence[array[int]]") -> np.ndarray:
    """int32: the blocks of all tables, one table after the other."""
    blocks = np.frombuffer(bytearray().join(block_tables), dtype=np.int32)
    assert len(blocks) == sum(map(len, block_tables)), "block tables are not of int32"
    return blocks


class CacheRows:
    """Maps (request, position) of a batch to rows of the flattened cache, that is to slots."""

    def __init__(self, batch: AttentionBatch) -> None:
        sizes = np.array([len(table) for table in batch.block_tables], dtype=np.int64)
        lengths = np.add(batch.context_lens, batch.query_lens)
        assert (lengths <= sizes * BLOCK_SIZE).all(), f"{lengths} tokens in {sizes} blocks"
        self._blocks = joined(batch.block_tables)
        self._first = sizes.cumsum() - sizes  # [B]

    def __call__(self, requests: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """Both int64 and of shapes that broadcast; so is the result."""
        block = self._blocks[self._first[requests] + positions // BLOCK_SIZE]
        return block * np.int64(BLOCK_SIZE) + positions % BLOCK_SIZE
