"""Value types of a request: what a user asks for, what the engine keeps, what it streams back."""

from array import array
from dataclasses import dataclass, field
from enum import Enum

from moe_ep.engine.prefix import Name


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt; names and defaults are vLLM's.

    n: completions per prompt. temperature: 0 is greedy. top_k: None or the k most likely tokens.
    top_p, min_p: nucleus mass and smallest share of the top probability. seed: same seed, same
    text, whatever else runs. stop: strings that end the text (not included in it).
    stop_token_ids: ids that end it. min_tokens: no end before this many. max_tokens: None means up
    to the model length. ignore_eos: go on past the end-of-sequence id. logprobs: how many top
    entries to report per generated token (0: the sampled token only), None for none;
    prompt_logprobs: the same for prompt tokens.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class FinishReason(Enum):
    STOP = "stop"  # end-of-sequence id, stop id or stop string
    LENGTH = "length"  # max_tokens or the model length
    ABORT = "abort"  # the client went away or asked for it, or the engine cannot go on with it


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token itself, its rank (1 is the most likely), and
    the most likely tokens in falling order."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class SampledToken:
    """What one step found for one request.

    token_id: the next token; None when the step computed only a part of the known tokens.
    logprobs: of that token, when the request asked for it. prompt_logprobs: of the prompt tokens
    that this step's chunk gives, in order (``PrefillChunk.prompt_logprob_rows``). error: why the
    request must end here, whatever else was found; None when it goes on.
    """

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class StepOutput:
    """What one step adds to one request, streamed from the rank to the front end.

    prompt_logprobs: sent once, with the first token; entry 0 is None (nothing precedes it).
    num_cached_tokens: prompt tokens that were not computed, as the cache knew them; with the first
    token, else None.
    stop_reason: the stop id that ended it, None for end-of-sequence or length.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass(frozen=True)
class EngineRequest:
    """What the front end sends to a rank: one prompt, one continuation; it fans out ``n`` itself.

    params.seed is never None here: the front end draws one, so that a replay gives the same text.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(eq=False)
class Request:
    """The engine's state of one request. ``token_ids`` is the prompt followed by the output.

    block_names: of the first blocks of token_ids, as far as anyone asked. num_cached_tokens: found
    in the cache when it started. prompt_logprobs: entries of prompt tokens computed so far, entry 0
    is None; None when not asked for. Two requests are equal only when they are the same object.
    """

    request_id: str
    params: SamplingParams
    prompt_len: int
    arrival: int  # position in the order of arrival on this rank
    max_len: int  # prompt plus the most output tokens it may produce
    token_ids: list[int]
    num_computed_tokens: int = 0  # tokens whose latents are in the cache
    block_table: "array[int]" = field(default_factory=lambda: array("i"))
    block_names: list[Name] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_preemptions: int = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_missing_tokens(self) -> int:
        """Known tokens that still have to be computed before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decode(self) -> bool:
        """Whether it has sampled before and only its last token is missing from the cache."""
        return self.num_output_tokens > 0 and self.num_missing_tokens == 1
