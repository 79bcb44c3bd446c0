"""When a step is worth two micro-batches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OverlapRules:
    """Fewest tokens of the fullest rank, which the others wait for, that are worth two
    micro-batches: in a step where no rank prefills, and in any other."""

    decode: int
    prefill: int


# Where two micro-batches pay without being told. Halves re-read all weights and run twice as many
# kernels: published decode steps lose a quarter with 32 tokens per GPU, break even between 64 and
# 128, and gain from there on. A prefill's halves of 256 still fill blocks of 128 rows.
DEFAULT_OVERLAP = OverlapRules(decode=128, prefill=512)
