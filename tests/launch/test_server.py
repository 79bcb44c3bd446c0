"""The HTTP API over two real ranks and the demo model, driven by the ``openai`` client."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import PreTrainedModel

from launch.client import EngineClient
from launch.demo.evaluate import SHIPPED_MODEL
from launch.demo.export import load_dequantized
from launch.launch_config import ServerConfig
from moe_ep.config import EngineConfig
from tests.launch.service_thread import ServiceThread

NAME = "demo"
VERSE = "From fairest creatures we desire increase,\n"
CODE = "def main(argv: list[str]) -> int:\n    "
CONFIG = EngineConfig(
    model=str(SHIPPED_MODEL), served_model_name=NAME, ep_size=2, dtype="float32", num_kv_blocks=64
)
MAX_BODY_BYTES = 100_000
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def service(ray_cluster: None) -> Iterator[ServiceThread]:
    settings = ServerConfig(max_body_bytes=MAX_BODY_BYTES)
    with ServiceThread(EngineClient(CONFIG), settings) as service:
        yield service


@pytest.fixture(scope="module")
def api(service: ServiceThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="-", max_retries=0) as api:
        yield api


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return load_dequantized(SHIPPED_MODEL)


def _greedy(reference: PreTrainedModel, prompt: str, count: int) -> list[int]:
    ids = list(prompt.encode())
    out = reference.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


def test_completions_equal_transformers(api: openai.OpenAI, reference: PreTrainedModel):
    prompts = [VERSE, CODE, "O", VERSE * 3]
    answer = api.completions.create(
        **GREEDY, prompt=prompts, extra_body={"return_token_ids": True, "ignore_eos": True}
    )
    expected = [_greedy(reference, prompt, 12) for prompt in prompts]
    assert [choice.token_ids for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [bytes(ids).decode(errors="replace") for ids in expected]
    assert [choice.text for choice in answer.choices] == texts
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == 48
    by_ids = api.completions.create(**GREEDY, prompt=list(VERSE.encode()))
    assert by_ids.choices[0].text == texts[0]


def test_a_streamed_completion_is_the_same_text(api: openai.OpenAI):
    request = GREEDY | {"prompt": [VERSE, CODE], "temperature": 1.0, "seed": 7, "n": 2}
    whole = api.completions.create(**request)
    texts, finished = [""] * 4, [None] * 4
    stream = api.completions.create(**request, stream=True, stream_options={"include_usage": True})
    *events, last = stream
    for event in events:
        (choice,) = event.choices
        texts[choice.index] += choice.text
        finished[choice.index] = choice.finish_reason
        assert event.usage is None
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) == 4
    assert finished == [choice.finish_reason for choice in whole.choices]
    assert last.choices == []
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_usage_tells_what_the_cache_knew(api: openai.OpenAI):
    prompt = [(11 * i) % 251 for i in range(150)]

    def cached(prompt: list[int], **more: Any) -> tuple[int, str]:
        answer = api.completions.create(**GREEDY | {"prompt": prompt} | more)
        assert answer.usage.prompt_tokens == len(prompt)
        return answer.usage.prompt_tokens_details.cached_tokens, answer.choices[0].text

    first, again = cached(prompt), cached(prompt)
    assert (first[0], again[0], first[1]) == (0, 128, again[1])
    assert cached([*prompt, *range(60)])[0] == 128
    assert cached([*prompt, *range(60)], n=2)[0] == 192  # counted for the first choice
    assert cached([0, *prompt])[0] == 0


def test_chat_is_a_completion_of_the_formatted_messages(service: ServiceThread, api: openai.OpenAI):
    messages: Any = [{"role": "system", "content": "Verse."}, {"role": "user", "content": VERSE}]
    ids = service.client.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    completion = api.completions.create(**GREEDY, prompt=ids)
    chat = api.chat.completions.create(**GREEDY, messages=messages)
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].message.content == completion.choices[0].text
    assert chat.usage.total_tokens == completion.usage.total_tokens
    stream = api.chat.completions.create(**GREEDY, messages=messages, stream=True)
    deltas = [event.choices[0].delta for event in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content for delta in deltas) == completion.choices[0].text


def test_stop_strings_and_ids(api: openai.OpenAI):
    whole = api.completions.create(**GREEDY, prompt=VERSE).choices[0].text
    stop = whole[5:7]
    choice = api.completions.create(**GREEDY, prompt=VERSE, stop=[stop]).choices[0]
    assert choice.text == whole[: whole.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    stop_id = whole.encode()[6]
    choice = api.completions.create(
        **GREEDY, prompt=VERSE, extra_body={"stop_token_ids": [stop_id]}
    ).choices[0]
    assert choice.text == whole[: whole.index(chr(stop_id))]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop_id)


def test_echo_and_logprobs_equal_transformers(api: openai.OpenAI, reference: PreTrainedModel):
    choice = api.completions.create(**GREEDY, prompt=VERSE, echo=True, logprobs=2).choices[0]
    assert choice.text.startswith(VERSE)
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == list(range(len(choice.text)))
    ids = torch.tensor([list(choice.text.encode())])
    with torch.inference_mode():
        logprobs = reference(ids).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    given = choice.logprobs.token_logprobs
    assert given[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    torch.testing.assert_close(torch.tensor(given[1:]), expected, atol=1e-3, rtol=0)
    for row, top in zip(logprobs, choice.logprobs.top_logprobs[1:], strict=False):
        best = row.topk(2)
        assert max(top.values()) == pytest.approx(best.values[0].item(), abs=1e-3)
        assert _shown(best.indices[0].item()) in top
        assert 2 <= len(top) <= 3  # two, and the token itself where it is not among them


def _shown(token_id: int) -> str:
    """A byte's text; those beyond ASCII are no text by themselves."""
    return chr(token_id) if token_id < 128 else f"token_id:{token_id}"


def test_chat_logprobs_and_prompt_logprobs(api: openai.OpenAI):
    messages: Any = [{"role": "user", "content": VERSE}]
    chat = api.chat.completions.create(
        **GREEDY, messages=messages, logprobs=True, top_logprobs=3,
        extra_body={"prompt_logprobs": 1},
    )  # fmt: skip
    content = chat.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == chat.choices[0].message.content
    for entry in content:
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy
        assert entry.bytes == list(entry.token.encode())
    first, *others = chat.choices[0].prompt_logprobs
    assert first is None
    assert len(others) == chat.usage.prompt_tokens - 1
    assert all(str(byte) in entry for byte, entry in zip(VERSE.encode()[1:], others, strict=True))


def test_models_health_and_metrics(service: ServiceThread, api: openai.OpenAI):
    (card,) = api.models.list().data
    assert (card.id, card.max_model_len) == (NAME, service.client.info.max_model_len)
    assert api.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("other")
    assert httpx.get(f"{service.url}/health").json() == {"status": "ok"}
    before = _metrics(service)
    api.completions.create(**GREEDY, prompt=VERSE)
    after = _metrics(service)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["moe_ep_prompt_tokens_total"] == len(VERSE)
    assert grown["moe_ep_generation_tokens_total"] == 12
    assert grown["moe_ep_time_to_first_token_seconds_count"] == 1
    assert grown["moe_ep_time_per_output_token_seconds_count"] == 1
    assert grown['moe_ep_requests_total{endpoint="/v1/completions",status="200"}'] == 1
    for rank in "01":
        assert after[f'moe_ep_kv_blocks_total{{rank="{rank}"}}'] == 64
        assert after[f'moe_ep_num_requests_running{{rank="{rank}"}}'] == 0


def _metrics(service: ServiceThread) -> dict[str, float]:
    text = httpx.get(f"{service.url}/metrics").text
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


BAD_REQUESTS: list[tuple[Any, int, str | None]] = [
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": 5}, 400, "prompt"),
    ({"prompt": {"text": "x"}}, 400, "prompt"),
    ({"prompt": [1, "x"]}, 400, "prompt"),
    ({"prompt": [True]}, 400, "prompt"),
    ({"prompt": [1.5]}, 400, "prompt"),
    ({"prompt": [5, -1]}, 400, "prompt[1]"),
    ({"prompt": [264]}, 400, "prompt[0]"),
    ({"prompt": "x" * 5000}, 400, "prompt"),
    ({"prompt": "x" * MAX_BODY_BYTES}, 413, None),
    ({"model": "other"}, 404, "model"),
    ({"model": 5}, 400, "model"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": "5"}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"max_tokens": True}, 400, "max_tokens"),
    ({"min_tokens": 17}, 400, "min_tokens"),
    ({"n": 0}, 400, "n"),
    ({"n": 129}, 400, "n"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_p": 1.1}, 400, "top_p"),
    ({"top_k": -2}, 400, "top_k"),
    ({"min_p": 2}, 400, "min_p"),
    ({"seed": 2**63}, 400, "seed"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"logprobs": True}, 400, "logprobs"),
    ({"prompt_logprobs": -1}, 400, "prompt_logprobs"),
    ({"stop": ""}, 400, "stop"),
    ({"stop": ["a", 5]}, 400, "stop[1]"),
    ({"stop": ["a"] * 65}, 400, "stop"),
    ({"stop_token_ids": [264]}, 400, "stop_token_ids"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, 400, "stream_options.usage"),
    ({"frequency_penalty": 0.5}, 400, "frequency_penalty"),
    ({"suffix": "x"}, 400, "suffix"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
    ({"best_of": 2}, 400, "best_of"),
    ({"tools": [{}]}, 400, "tools"),
    ({"colour": "red"}, 400, "colour"),
    (b"", 400, None),
    (b"{", 400, None),
    (b"[]", 400, None),
    (b"null", 400, None),
    (b'{"prompt": "\xff"}', 400, None),
    (b'{"prompt": "\\ud800"}', 400, "prompt"),
    (b'{"prompt": "x", "\\udfff": 1}', 400, "\\udfff"),
    (b'{"prompt": "x", "temperature": NaN}', 400, None),
    (b'{"prompt": "x", "temperature": 1e999}', 400, "temperature"),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400, None),
    (b"[" * 90_000, 400, None),
]


@pytest.mark.parametrize(("body", "status", "param"), BAD_REQUESTS)
def test_bad_requests(service: ServiceThread, body: Any, status: int, param: str | None):
    if isinstance(body, dict):
        body = json.dumps({"prompt": "x"} | body).encode()
    with httpx.Client(base_url=service.url, timeout=30) as http:
        response = http.post("/v1/completions", content=body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["param"] == param
        assert param is None or re.split(r"\W", param.strip("\\"))[0] in error["message"]
        good = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert good.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/completions", 405), ("POST", "/v1/x", 404)]
)
def test_wrong_paths_and_methods(service: ServiceThread, method: str, path: str, status: int):
    response = httpx.request(method, service.url + path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_aborted(service: ServiceThread, stream: bool):
    body = {"prompt": [VERSE, CODE], "max_tokens": 900, "stream": stream, "ignore_eos": True}
    with httpx.Client(base_url=service.url) as http:
        if stream:
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: {")
                assert _num_running(service) == 2
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=body, timeout=0.5)
    deadline = time.monotonic() + 20
    while _num_running(service) and time.monotonic() < deadline:
        time.sleep(0.05)
    statuses = service.call(service.client.status())
    assert [s.num_running + s.num_waiting for s in statuses] == [0, 0]
    assert [s.kv_blocks_used for s in statuses] == [0, 0]


def _num_running(service: ServiceThread) -> int:
    return sum(status.num_running for status in service.call(service.client.status()))
