"""Checks of sampling parameters, the same for Python, HTTP and batch files.

Knows nothing of HTTP: every refusal is a ``ValueError`` whose text starts with the field's name.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from moe_ep.engine.request import SamplingParams

# The caps of the OpenAI API and of vLLM; each reported entry costs a top-k row per token.
MAX_LOGPROBS = 20
MAX_COMPLETIONS = 128

# torch.Generator takes a signed 64-bit seed.
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1


def check_params(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """The parameters in their canonical form (lists become tuples, one stop string a tuple of one).

    Raises ``ValueError`` naming the first field that is wrong, what it was and what is allowed.
    """
    params = _canonical(params)
    _check_int("n", params.n, 1, MAX_COMPLETIONS)
    _check_float("temperature", params.temperature, 0.0, math.inf)
    _check_float("top_p", params.top_p, 0.0, 1.0, open_low=True)
    _check_optional_int("top_k", params.top_k, 1, None)
    _check_float("min_p", params.min_p, 0.0, 1.0)
    _check_optional_int("seed", params.seed, MIN_SEED, MAX_SEED)
    _check_optional_int("max_tokens", params.max_tokens, 1, None)
    _check_int("min_tokens", params.min_tokens, 0, params.max_tokens)
    _check_optional_int("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    _check_optional_int("prompt_logprobs", params.prompt_logprobs, 0, MAX_LOGPROBS)
    if not isinstance(params.ignore_eos, bool):
        raise ValueError(f"ignore_eos: {params.ignore_eos!r} given; true or false is needed")
    for text in params.stop:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop: {text!r} given; non-empty strings are needed")
    for token_id in params.stop_token_ids:
        _check_int("stop_token_ids", token_id, 0, vocab_size - 1)
    return params


def completion_params(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of completion ``index`` of the ``params.n`` of a prompt; a given seed gives each
    one its own."""
    if params.seed is None:
        return replace(params, n=1)
    seed = (params.seed + index - MIN_SEED) % 2**64 + MIN_SEED
    return replace(params, n=1, seed=seed)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, field: str = "prompt") -> None:
    """Raise ``ValueError`` naming ``field`` unless all, at least one, are of the vocabulary.

    Runs on the event loop over prompts of any length: no Python code per token of a good one.
    """
    if not token_ids:
        raise ValueError(f"{field}: empty; at least one token is needed")
    has_only_ints = set(map(type, token_ids)) == {int}
    if has_only_ints and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    for position, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            _check_int(f"{field}[{position}]", token_id, 0, vocab_size - 1)


def _canonical(params: SamplingParams) -> SamplingParams:
    stop = (params.stop,) if isinstance(params.stop, str) else _as_tuple("stop", params.stop)
    ids = _as_tuple("stop_token_ids", params.stop_token_ids)
    return replace(params, stop=stop, stop_token_ids=ids)


def _as_tuple(field: str, value: object) -> tuple:
    if value is None:
        return ()
    if not isinstance(value, list | tuple | set | frozenset):
        raise ValueError(f"{field}: {value!r} given; a list is needed")
    return tuple(value)


def _check_optional_int(field: str, value: object, low: int, high: int | None) -> None:
    if value is not None:
        _check_int(field, value, low, high)


def _check_int(field: str, value: object, low: int, high: int | None) -> None:
    allowed = f"at least {low}" if high is None else f"{low} to {high}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{field}: {value!r} given; an integer ({allowed}) is needed")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{field}: {value} given; {allowed} is allowed")


def _check_float(
    field: str, value: object, low: float, high: float, *, open_low: bool = False
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):  # type: ignore[arg-type]
        raise ValueError(f"{field}: {value!r} given; a finite number is needed")
    if value < low or value > high or (open_low and value == low):  # type: ignore[operator]
        bound = f"above {low:g}" if open_low else f"at least {low:g}"
        upper = "" if math.isinf(high) else f" and at most {high:g}"
        raise ValueError(f"{field}: {value} given; {bound}{upper} is allowed")
