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


def max_request_len(prompt_len: int, params: SamplingParams, max_model_len: int) -> int:
    """Most tokens, prompt included, that a request may reach; ``max_tokens`` is clipped to fit."""
    if params.max_tokens is None:
        return max_model_len
    return min(prompt_len + params.max_tokens, max_model_len)


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
    max_len = max_request_len(prompt_len, params, limits.max_model_len)
    capacity = limits.num_blocks * limits.block_size
    if max_len > capacity:
        return (
            f"max_tokens: {prompt_len} prompt and {max_len - prompt_len} output tokens given;"
            f" together at most {capacity} are allowed, the size of one rank's cache"
        )
    return None
