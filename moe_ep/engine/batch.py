"""What one rank computes in one step, as the scheduler picks it and the runner runs it."""

from dataclasses import dataclass, field

from moe_ep.engine.request import Request


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens ``[start, start + length)`` of a request; the last known token is in it if is_last."""

    request: Request
    start: int
    length: int
    is_last: bool

    @property
    def prompt_logprob_rows(self) -> range:
        """Rows of this chunk whose logits give prompt log-probabilities that are still unknown.

        Row i of the chunk is about prompt token ``start + i + 1``. Empty unless asked for.
        """
        known = self.request.prompt_logprobs
        if known is None:
            return range(0)
        first = len(known) - 1 - self.start
        end = min(self.length, self.request.prompt_len - 1 - self.start)
        return range(first, max(first, end))


@dataclass(frozen=True)
class ScheduledBatch:
    """The requests of one step in token order: decodes (one token each), then prefill chunks."""

    decodes: list[Request] = field(default_factory=list)
    prefills: list[PrefillChunk] = field(default_factory=list)

    @property
    def num_decode_tokens(self) -> int:
        return len(self.decodes)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.length for chunk in self.prefills)

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + self.num_prefill_tokens

    @property
    def sampling_requests(self) -> list[Request]:
        """Requests whose last known token is computed in this step, in token order."""
        return self.decodes + [chunk.request for chunk in self.prefills if chunk.is_last]
