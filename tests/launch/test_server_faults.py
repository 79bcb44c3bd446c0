"""The HTTP service over an engine that dies, hangs, is full or has no tokenizer."""

import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from launch.demo.tokenizer import save_tokenizer
from launch.launch_config import ServerConfig
from tests.launch.fake_client import FakeClient
from tests.launch.service_thread import ServiceThread

IDS = [1, 2, 3]


def _openai(service: ServiceThread) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="-", max_retries=0, timeout=30)


def _post(service: ServiceThread, **fields: Any) -> httpx.Response:
    body = {"prompt": IDS, "max_tokens": 4, "return_token_ids": True} | fields
    return httpx.post(f"{service.url}/v1/completions", json=body, timeout=30)


def _error(response: httpx.Response) -> dict[str, Any]:
    return response.json()["error"]


@pytest.fixture(scope="module")
def plain() -> Iterator[ServiceThread]:
    """A healthy service without a tokenizer."""
    with ServiceThread(FakeClient()) as service:
        yield service


def test_token_ids_without_a_tokenizer(plain: ServiceThread):
    choice = _post(plain).json()["choices"][0]
    assert choice["token_ids"] == [4, 5, 6, 7]
    assert choice["text"] == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt": "text"}, "prompt"), ({"stop": "x"}, "stop"), ({"echo": True}, "echo")],
)
def test_text_without_a_tokenizer_is_refused(plain: ServiceThread, fields: dict, param: str):
    response = _post(plain, **fields)
    assert response.status_code == 400
    assert _error(response)["param"] == param
    assert "no tokenizer" in _error(response)["message"]


def test_chat_without_a_tokenizer_is_refused(plain: ServiceThread):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    response = httpx.post(f"{plain.url}/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert _error(response)["param"] == "messages"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory, max_length=64)
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize(
    ("template", "variables", "param", "reason"),
    [
        (None, {}, "messages", "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", {}, "messages", "roles must alternate"),
        ("{{ messages", {}, "messages", "refused by the chat template"),
        ("x", {"chat_template": "y"}, "chat_template_kwargs.chat_template", "not a variable"),
    ],
)
def test_chat_templates_that_fail(
    tokenizer: PreTrainedTokenizerBase, template: str, variables: dict, param: str, reason: str
):
    tokenizer.chat_template = template
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": variables}
    with ServiceThread(FakeClient(tokenizer=tokenizer)) as service:
        response = httpx.post(f"{service.url}/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert _error(response)["param"] == param
    assert reason in _error(response)["message"]


def test_variables_of_the_chat_template(tokenizer: PreTrainedTokenizerBase):
    tokenizer.chat_template = "{{ word }}{% if add_generation_prompt %}!{% endif %}"
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    body |= {"chat_template_kwargs": {"word": "abc"}}
    with ServiceThread(FakeClient(tokenizer=tokenizer)) as service:
        answer = httpx.post(f"{service.url}/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["choices"][0]["message"]["content"] == chr(ord("!") + 1)


def test_the_engine_dies_in_the_middle_of_an_answer():
    with ServiceThread(FakeClient(dies_after=2)) as service:
        assert httpx.get(f"{service.url}/health").status_code == 200
        response = _post(service)
        assert response.status_code == 503
        assert _error(response)["message"] == "rank 1 died"
        health = httpx.get(f"{service.url}/health")
        assert health.status_code == 503
        assert "rank 1 died" in health.text
        assert _post(service).status_code == 503
        assert httpx.get(f"{service.url}/metrics").status_code == 200


def test_the_engine_dies_in_the_middle_of_a_stream():
    with ServiceThread(FakeClient(dies_after=2)) as service:
        stream = _openai(service).completions.create(
            model="fake", prompt=IDS, stream=True, extra_body={"return_token_ids": True}
        )
        received = [next(stream).choices[0].token_ids for _ in range(2)]
        assert received == [[4], [5]]
        with pytest.raises(openai.APIError, match="rank 1 died"):
            next(stream)


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_ours_is_reported_without_its_details(stream: bool):
    with ServiceThread(FakeClient(fails_after=1)) as service:
        response = _post(service, stream=stream)
        assert response.status_code == (200 if stream else 500)
        assert "internal error" in response.text
        assert "a fault of ours" not in response.text
        assert httpx.get(f"{service.url}/health").status_code == 200
    assert service.client.num_open == 0


def test_a_request_that_takes_too_long_is_aborted():
    client = FakeClient(hangs_after=2)
    with ServiceThread(client, ServerConfig(request_timeout_s=0.3)) as service:
        response = _post(service)
        assert response.status_code == 504
        assert "0.3 s" in _error(response)["message"]
        streamed = _post(service, stream=True).text
        assert streamed.count("data: {") == 3  # two tokens and the error
        assert streamed.endswith("data: [DONE]\n\n")
    assert client.num_open == 0


def test_a_full_service_refuses_and_recovers():
    """Four continuations run at most (two ranks of two), one more may wait."""
    client = FakeClient(hangs_after=1)
    with ServiceThread(client, ServerConfig(max_queued_requests=1)) as service:
        with httpx.stream(
            "POST", f"{service.url}/v1/completions", json={"prompt": IDS, "n": 4, "stream": True}
        ) as running:
            chunks = running.iter_bytes()
            next(chunks)
            response = _post(service, n=2)
            assert response.status_code == 429
            assert _error(response)["code"] == "queue_full"
            assert int(response.headers["retry-after"]) > 0
        client._hangs_after = None
        assert _wait_until_accepted(service, n=5) == 200
    assert client.num_open == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 6}, "n"), ({"n": 2, "prompt": [IDS] * 3}, "n"), ({"prompt": [IDS] * 6}, "prompt")],
)
def test_more_choices_than_can_ever_be_open_are_refused_for_good(fields: dict, param: str):
    """To come back later, as a 429 asks for, would never help."""
    with ServiceThread(FakeClient(), ServerConfig(max_queued_requests=1)) as service:
        response = _post(service, **fields)
        assert response.status_code == 400
        assert "retry-after" not in response.headers
        assert _error(response)["param"] == param
        n, num_prompts = fields.get("n", 1), len(fields.get("prompt", [IDS]))
        message = _error(response)["message"]
        assert f"{n} choices (n) of each of {num_prompts} prompts (prompt) given" in message
        assert "at most 5 are allowed" in message
        assert _post(service, n=5).status_code == 200


def _wait_until_accepted(service: ServiceThread, **fields: Any) -> int:
    """The places of a client that left are free once the service has noticed."""
    for _ in range(100):
        status = _post(service, **fields).status_code
        if status != 429:
            break
        time.sleep(0.05)
    return status


def test_a_body_that_is_too_large_is_refused():
    with ServiceThread(FakeClient(), ServerConfig(max_body_bytes=1000)) as service:
        response = _post(service, prompt=[1] * 2000)
        assert response.status_code == 413
        assert "1000 bytes" in _error(response)["message"]
        assert _post(service).status_code == 200


def test_a_body_that_never_comes_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("launch.http_io.BODY_TIMEOUT_S", 0.2)

    with ServiceThread(FakeClient()) as service:
        host, port = service.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 9\r\n\r\n"
            connection.sendall(head.encode() + b"{")
            assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
        assert _post(service).status_code == 200
