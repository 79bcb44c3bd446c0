"""What all ranks must agree on before a step, as a pure function of all ranks' votes.

Knows nothing of how votes travel. Every rank calls ``derive`` on the same gathered votes and so
gets the same shape; each field is a sum, a minimum or a maximum over ranks, never a majority, so
that one rank is enough to keep all of them from a mode that it cannot take.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from enum import Enum

from moe_ep.config.overlap import OverlapRules
from moe_ep.dispatch.base import Mode

DEEPEP_MODES = ("auto", "normal", "low_latency")
LARGEST_SHARE = 0.75


@dataclass(frozen=True)
class Vote:
    """What one rank brings to a step.

    step: steps this rank has run; equal on all ranks. num_largest_part: tokens of the larger one of
    the two micro-batches that its tokens would be split into. is_draining: takes no new requests
    and wants to stop once nobody has work. wants_stop: wants no further step at all. eplb_done,
    eplb_failed: the job of ``eplb.manager`` has ended, and did so with an error.
    """

    step: int
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_largest_part: int = 0
    is_draining: bool = False
    wants_stop: bool = False
    eplb_done: bool = False
    eplb_failed: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + self.num_prefill_tokens

    def encode(self) -> list[int]:
        """The fields in order, as integers: a vector of the same length on every rank."""
        return [int(value) for value in astuple(self)]

    @classmethod
    def decode(cls, vector: Sequence[int]) -> "Vote":
        if len(vector) != len(fields(cls)):
            raise ValueError(f"vote: {len(vector)} numbers given; {len(fields(cls))} are needed")
        step, num_decode_tokens, num_prefill_tokens, num_largest_part, *flags = vector
        return cls(step, num_decode_tokens, num_prefill_tokens, num_largest_part, *map(bool, flags))


@dataclass(frozen=True)
class StepRules:
    """The configuration that shapes depend on; the same on all ranks.

    deepep_mode: "auto", "normal" or "low_latency". capacity: most tokens that a rank may bring to a
    low-latency step. buckets: rising padded token counts of decode steps; empty for no padding.
    overlap: when a step is two micro-batches; None for never.
    """

    deepep_mode: str
    capacity: int
    buckets: tuple[int, ...] = ()
    overlap: OverlapRules | None = None

    def __post_init__(self) -> None:
        if self.deepep_mode not in DEEPEP_MODES:
            raise ValueError(f"deepep_mode: {self.deepep_mode!r} given; allowed: {DEEPEP_MODES}")
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"buckets: {self.buckets} given; they must rise")

    def token_budget(self, max_num_batched_tokens: int) -> int:
        """Most tokens the scheduler may put into a step.

        When low latency is forced, prefill goes through it too, in chunks of at most the capacity:
        so no admitted request can ever bring more tokens to a step than the exchange can hold.
        """
        if self.deepep_mode == "low_latency":
            return min(max_num_batched_tokens, self.capacity)
        return max_num_batched_tokens


class StepKind(Enum):
    RUN = "run"  # a forward pass; ranks without tokens take part with none
    IDLE = "idle"  # nobody has tokens: sleep until somebody gets work
    STOP = "stop"  # leave the loop


@dataclass(frozen=True)
class StepShape:
    """The agreed shape; equal on all ranks.

    max_tokens: most tokens of any rank. padded_tokens: what every rank pads its tokens to; None
    when each keeps its own number. overlap: two micro-batches take turns. is_draining: some rank
    drains, so none should take new requests.
    eplb_done, eplb_failed: the jobs of all ranks have ended, that of some rank with an error.
    """

    kind: StepKind
    mode: Mode = Mode.NORMAL
    max_tokens: int = 0
    padded_tokens: int | None = None
    overlap: bool = False
    is_draining: bool = False
    eplb_done: bool = False
    eplb_failed: bool = False

    @property
    def micro_batch_rows(self) -> int | None:
        """What every rank pads each micro-batch to; None when each keeps its own number."""
        if self.padded_tokens is None or not self.overlap:
            return self.padded_tokens
        return -(-self.padded_tokens // 2)


class StepMismatch(RuntimeError):
    """Ranks stand at different steps: their collectives would no longer match."""


def derive(votes: Sequence[Vote], rules: StepRules) -> StepShape:
    """The shape of the next step from all ranks' votes, in rank order.

    - Any rank that wants to stop stops all, before the step.
    - No tokens anywhere: stop if any rank drains, else idle.
    - Low latency if no rank prefills and every rank's tokens fit the capacity, unless forced.
    - A decode step is padded to the smallest bucket that holds every rank's tokens.
    - Two micro-batches if the fullest rank has tokens enough, and no rank has a part that holds
      more than LARGEST_SHARE of as many: nothing would be left to hide its exchanges behind.

    Raises StepMismatch when step counters differ; ValueError when low latency is forced and a rank
    brings more than the capacity (it has ignored ``StepRules.token_budget``).
    """
    _check_same_step(votes)
    max_tokens = max(vote.num_tokens for vote in votes)
    is_draining = any(vote.is_draining for vote in votes)
    if any(vote.wants_stop for vote in votes) or (is_draining and max_tokens == 0):
        return StepShape(StepKind.STOP, is_draining=is_draining)
    if max_tokens == 0:
        return StepShape(StepKind.IDLE)
    is_decode = all(vote.num_prefill_tokens == 0 for vote in votes)
    mode = _mode(votes, rules, is_decode, max_tokens)
    limit = rules.capacity if mode is Mode.LOW_LATENCY else None
    return StepShape(
        kind=StepKind.RUN,
        mode=mode,
        max_tokens=max_tokens,
        padded_tokens=_bucket(rules.buckets, max_tokens, limit) if is_decode else None,
        overlap=_overlaps(votes, rules, is_decode, max_tokens),
        is_draining=is_draining,
        eplb_done=all(vote.eplb_done for vote in votes),
        eplb_failed=any(vote.eplb_failed for vote in votes),
    )


def _check_same_step(votes: Sequence[Vote]) -> None:
    if len({vote.step for vote in votes}) > 1:
        where = ", ".join(f"rank {rank} at {vote.step}" for rank, vote in enumerate(votes))
        raise StepMismatch(f"ranks stand at different steps: {where}")


def _mode(votes: Sequence[Vote], rules: StepRules, is_decode: bool, max_tokens: int) -> Mode:
    fits = max_tokens <= rules.capacity
    if rules.deepep_mode == "low_latency" and not fits:
        counts = [vote.num_tokens for vote in votes]
        raise ValueError(
            f"low-latency step: {counts} tokens per rank given; at most {rules.capacity} each"
        )
    if rules.deepep_mode == "auto":
        return Mode.LOW_LATENCY if is_decode and fits else Mode.NORMAL
    return Mode(rules.deepep_mode)


def _overlaps(votes: Sequence[Vote], rules: StepRules, is_decode: bool, max_tokens: int) -> bool:
    if rules.overlap is None:
        return False
    fewest = rules.overlap.decode if is_decode else rules.overlap.prefill
    largest = max(vote.num_largest_part for vote in votes)
    return max_tokens >= fewest and largest <= LARGEST_SHARE * max_tokens


def _bucket(buckets: Sequence[int], num_tokens: int, limit: int | None) -> int | None:
    """The smallest bucket that holds the tokens, None without one within the limit."""
    bucket = next((size for size in buckets if size >= num_tokens), None)
    return None if bucket is not None and limit is not None and bucket > limit else bucket
