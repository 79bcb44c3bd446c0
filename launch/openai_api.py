"""OpenAI-compatible requests: the accepted fields, their types, and the refusals that name them.

Knows no engine and no tokenizer. Ranges are checked by ``launch.params`` as for every other way in,
what depends on the model (its name, its length, its vocabulary) in ``launch.completions``. Every
field is either honoured or refused by name: those that OpenAI or vLLM define and this service does
not implement pass only with a value that asks for nothing (``frequency_penalty: 0``). A ``null``
means "not given".
"""

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from launch.api_error import bad_request, from_validation, parse_json
from moe_ep.engine.request import SamplingParams

MAX_STOPS = 64  # each is looked for in every piece of text

# Known fields that are not implemented, and the values of them that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


class _Strict(BaseModel):
    """No unknown fields, no conversions (``"1"`` is not 1), no infinities; null is "not given"."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class StreamOptions(_Strict):
    include_usage: bool = False


class GenerationRequest(_Strict):
    """Fields that both endpoints share; those that OpenAI does not have are vLLM's."""

    url: ClassVar[str]

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: all tokens, as in vLLM
    min_p: float = 0.0
    seed: int | None = None
    stop: Annotated[list[str], Field(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] = []
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    user: str | None = None  # an opaque label without any effect

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("stream_options")
    @classmethod
    def _only_when_streaming(cls, value: Any, info: ValidationInfo) -> Any:
        if not info.data.get("stream"):
            raise ValueError("is only allowed with stream: true")
        return value

    @property
    def field_names(self) -> dict[str, str]:
        """Names here of what the checks of ``launch.params`` call otherwise."""
        return {}

    @property
    def max_new_tokens(self) -> int | None:
        """Most tokens to generate; None: up to the model's length."""
        return self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """Most likely tokens to report per generated token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Most likely tokens to report per prompt token; None: no log-probabilities."""
        return self.prompt_logprobs

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k in (0, -1) else self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            min_tokens=self.min_tokens,
            max_tokens=self.max_new_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=self.num_top_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
        )


class CompletionRequest(GenerationRequest):
    """``prompt``, once validated, is a list of strings and lists of token ids, none empty."""

    url = "/v1/completions"

    prompt: Any
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False

    @field_validator("prompt")
    @classmethod
    def _normalise_prompt(cls, value: Any) -> list[str | list[int]]:
        if isinstance(value, list) and value and not _is_int(value[0]):
            return [_one_prompt(item) for item in value]
        return [_one_prompt(value)]

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        if self.prompt_logprobs is None and self.echo:
            return self.logprobs
        return self.prompt_logprobs


class Message(_Strict):
    """``content``, given as a string or as a list of text parts, is one string once validated."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if not all(map(_is_text_part, value)):
            raise ValueError('only parts of the form {"type": "text", "text": ...} are supported')
        return "".join(part["text"] for part in value)


class ChatRequest(GenerationRequest):
    url = "/v1/chat/completions"

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        other = info.data.get("max_tokens")
        if other is not None and value != other:
            raise ValueError(f"is {value} but max_tokens is {other}; give one of them")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if not info.data.get("logprobs"):
            raise ValueError("is only allowed with logprobs: true")
        return value

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def field_names(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"prompt": "messages", "logprobs": "top_logprobs", "max_tokens": limit}

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse_request(kind: type[RequestT], body: bytes | dict[str, Any]) -> RequestT:
    """The request in a JSON body; ApiError 400 naming the field when it is not acceptable."""
    data = parse_json(body) if isinstance(body, bytes) else body
    if not isinstance(data, dict):
        raise bad_request(None, f"the body must be a JSON object, not {type(data).__name__}")
    data = {name: value for name, value in data.items() if not _asks_for_nothing(name, value)}
    for name in data.keys() & UNSUPPORTED.keys():
        raise bad_request(name, "this field is not supported by this service")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from None


def _asks_for_nothing(name: str, value: Any) -> bool:
    if value is None:
        return True
    neutral = UNSUPPORTED.get(name, ())
    return any(value == other and _is_bool(value) == _is_bool(other) for other in neutral)


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )


def _one_prompt(value: Any) -> str | list[int]:
    if not isinstance(value, str) and not (isinstance(value, list) and all(map(_is_int, value))):
        raise ValueError("must be a string, a list of token ids, or a list of either")
    if not value:
        raise ValueError("must not be empty")
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)
