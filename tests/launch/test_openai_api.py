"""Parsing of requests: what is accepted, what it becomes, and which field a refusal names."""

import json
from typing import Any

import pytest

from launch.api_error import ApiError
from launch.openai_api import UNSUPPORTED, ChatRequest, CompletionRequest, parse_request
from moe_ep.engine.request import SamplingParams

HELLO = [{"role": "user", "content": "hello"}]


def _completion(**fields: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, json.dumps({"prompt": "a"} | fields).encode())


def _chat(**fields: Any) -> ChatRequest:
    return parse_request(ChatRequest, json.dumps({"messages": HELLO} | fields).encode())


def test_defaults_are_those_of_the_sampling_parameters_and_of_openai():
    assert _completion().sampling_params() == SamplingParams(max_tokens=16)
    assert _chat().sampling_params() == SamplingParams(max_tokens=None)


def test_every_sampling_field_arrives():
    fields: dict[str, Any] = {
        "n": 3,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "seed": -5,
        "stop": ["x", "yy"],
        "stop_token_ids": [1, 2],
        "min_tokens": 2,
        "max_tokens": 9,
        "ignore_eos": True,
        "logprobs": 4,
        "prompt_logprobs": 2,
    }
    params = _completion(**fields).sampling_params()
    fields |= {"stop": ("x", "yy"), "stop_token_ids": (1, 2)}
    assert params == SamplingParams(**fields)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("text", ["text"]),
        ([5, 6], [[5, 6]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_the_four_forms_of_a_prompt(given: Any, prompts: list):
    assert _completion(prompt=given).prompt == prompts


def test_null_and_values_that_ask_for_nothing_change_nothing():
    nothing = {name: values[0] for name, values in UNSUPPORTED.items() if values}
    nulls = dict.fromkeys(["max_tokens", "stop", "seed", "logprobs", "stream_options", "tools"])
    assert _completion(**(nothing | nulls)) == _completion()
    assert _chat(**(nothing | nulls)) == _chat()


@pytest.mark.parametrize("value", [0, -1])
def test_top_k_of_all_tokens(value: int):
    assert _completion(top_k=value).sampling_params().top_k is None


def test_echo_with_logprobs_asks_for_those_of_the_prompt():
    assert _completion(echo=True, logprobs=2).sampling_params().prompt_logprobs == 2
    assert _completion(echo=True).sampling_params().prompt_logprobs is None


def test_chat_limits_and_logprobs():
    assert _chat(max_completion_tokens=5).sampling_params().max_tokens == 5
    assert _chat(max_tokens=5, max_completion_tokens=5).sampling_params().max_tokens == 5
    assert _chat(logprobs=True).sampling_params().logprobs == 0
    assert _chat(logprobs=True, top_logprobs=3).sampling_params().logprobs == 3


def test_parts_of_a_message_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = _chat(messages=[{"role": "user", "content": parts, "refusal": None}])
    assert request.messages[0].content == "ab"


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_known_but_unsupported_fields_are_refused_by_name(name: str):
    with pytest.raises(ApiError, match=f"^{name}: this field is not supported") as caught:
        _chat(**{name: {"some": "thing"}})
    assert caught.value.status == 400
    assert caught.value.error["param"] == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"prompt": "x"}, "prompt"),
    ],
)  # fmt: skip
def test_bad_chat_requests(fields: dict[str, Any], param: str):
    with pytest.raises(ApiError) as caught:
        _chat(**fields)
    assert caught.value.status == 400
    assert caught.value.error["param"] == param
    assert str(caught.value).startswith(f"{param}: ")


def test_all_problems_are_in_one_message():
    with pytest.raises(ApiError, match=r"n: .*; colour: unknown field"):
        _completion(n="x", colour="red")
