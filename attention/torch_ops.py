"""What both paths of the torch backend use: places in the cache, and a softmax with its sum."""

import torch

from attention.base import BLOCK_SIZE, AttentionBatch

MASKED = -1e30  # finite: keys that a query does not see at all get weight 0 when merged, not NaN


class CacheRows:
    """Maps (request, position) of a batch to rows of the flattened cache."""

    def __init__(self, batch: AttentionBatch) -> None:
        blocks = [block for table in batch.block_tables for block in table]
        sizes = torch.tensor([len(table) for table in batch.block_tables], dtype=torch.int64)
        self._blocks = torch.tensor(blocks, dtype=torch.int64)
        self._first = sizes.cumsum(0) - sizes  # [B]

    def __call__(self, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Both int64 and of shapes that broadcast."""
        block = self._blocks[self._first[requests] + positions // BLOCK_SIZE]
        return block * BLOCK_SIZE + positions % BLOCK_SIZE


def softmax_lse(
    scores: torch.Tensor, *, with_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Probabilities over the last dimension in the dtype of scores; log-sum-exp float32, or None.

    Without the log-sum-exp, which only merging needs, it is one pass that widens inside. With it,
    the largest probability is exp(max) over the sum of all, so the sum comes without a second pass
    of exponentials.
    """
    if not with_lse:
        return torch.softmax(scores, dim=-1), None
    probs = torch.softmax(scores, dim=-1, dtype=torch.float32)
    lse = scores.amax(dim=-1).float() - probs.amax(dim=-1).log()
    return probs.to(scores.dtype), lse
