"""What both paths of the torch backend use: a softmax with its sum, and what hides a key."""

import torch

MASKED = -1e30  # finite: keys that a query does not see at all get weight 0 when merged, not NaN


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
