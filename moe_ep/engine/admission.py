"""The one rule about what can never run, asked by the front end and by the scheduler alike.

Pure: needs neither torch nor a rank.
"""

from dataclasses import dataclass

from moe_ep.engine.request import SamplingParams


@dataclass(frozen=True)
class AdmissionLimits:
    """What one rank can hold; the front end and the scheduler ask the same rule about it."""

    max_model_len: int
    num_blocks: int
    block_size: int

    @property
    def capacity(self) -> int:
        """Tokens of the whole cache."""
        return self.num_blocks * self.block_size


def max_request_len(prompt_len: int, params: SamplingParams, limits: AdmissionLimits) -> int:
    """Most tokens, prompt included, that a request may reach: ``max_tokens`` is clipped to the
    model's length, and without it also to the cache, which may hold less."""
    if params.max_tokens is None:
        return min(limits.max_model_len, limits.capacity)
    return min(prompt_len + params.max_tokens, limits.max_model_len)


def admission_error(prompt_len: int, params: SamplingParams, limits: AdmissionLimits) -> str | None:
    """Why a request can never run (field, given, allowed), or None when it can."""
    if prompt_len < 1:
        return "prompt: 0 tokens given; at least 1 is needed"
    if params.max_tokens is not None and params.max_tokens < 1:
        return f"max_tokens: {params.max_tokens} given; at least 1 is needed"
    if prompt_len + 1 > limits.max_model_len:
        return (
            f"prompt: {prompt_len} tokens given; at most {limits.max_model_len - 1} are allowed,"
            f" max_model_len ({limits.max_model_len}) less one for the output"
        )
    if prompt_len + 1 > limits.capacity:
        return (
            f"prompt: {prompt_len} tokens given; at most {limits.capacity - 1} are allowed,"
            f" the size of one rank's cache ({limits.capacity}) less one for the output"
        )
    max_len = max_request_len(prompt_len, params, limits)
    if max_len > limits.capacity:
        return (
            f"max_tokens: {prompt_len} prompt and {max_len - prompt_len} output tokens given;"
            f" together at most {limits.capacity} are allowed, the size of one rank's cache"
        )
    return None
