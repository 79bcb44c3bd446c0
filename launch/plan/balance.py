"""How uneven expert loads are: a number, a recorded load, or what was published for EP sizes."""

import math
from bisect import bisect_left

# Mean over maximum of tokens per GPU, with and without expert balancing, by EP size. Simulated on
# recorded loads (LMSYS slides amd_meetup_sglang_ep.pdf, read off a figure).
BALANCED = {8: 0.94, 16: 0.90, 32: 0.80, 72: 0.81}
UNBALANCED = {8: 0.67, 16: 0.61, 32: 0.55, 64: 0.48}


def imbalance(ep_size: int, *, is_balanced: bool) -> float:
    """Rows of the busiest rank over the mean, interpolated over the logarithm of the EP size and
    held constant beyond the published sizes; 1 on one rank."""
    if ep_size == 1:
        return 1.0
    known = {1: 1.0} | (BALANCED if is_balanced else UNBALANCED)
    sizes = sorted(known)
    if ep_size >= sizes[-1]:
        return 1 / known[sizes[-1]]
    right = sizes[bisect_left(sizes, ep_size)]
    left = max(size for size in sizes if size <= ep_size)
    if left == right:
        return 1 / known[right]
    share = math.log(ep_size / left) / math.log(right / left)
    return 1 / (known[left] + share * (known[right] - known[left]))
