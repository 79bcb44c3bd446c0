"""The batch runner: parsing of lines, answers in order, and files that are whole or not there."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from launch.api_error import ApiError
from launch.cli import main
from launch.completions import Completions
from launch.demo.evaluate import SHIPPED_MODEL
from launch.metrics import Metrics
from launch.run_batch import BatchError, answer_batch, atomic_output, parse_line, read_batch
from tests.launch.fake_client import FakeClient


def _line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def _write(path: Path, lines: list[Any]) -> Path:
    texts = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    path.write_bytes(b"\n".join(texts) + b"\n\n")
    return path


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"custom_id": 5}, "custom_id"),
        ({"method": "GET"}, "method"),
        ({"url": "/v1/embeddings"}, "url"),
        ({"url": ["x"]}, "url"),
        ({"body": "x"}, None),
        ({"body": {"prompt": ""}}, "prompt"),
        ({"body": {"prompt": "x", "stream": True}}, "stream"),
        ({"priority": 1}, "priority"),
    ],
)
def test_a_bad_line_names_the_field(changes: dict[str, Any], param: str | None):
    line = parse_line(json.dumps(_line("a", prompt="x") | changes).encode())
    assert isinstance(line.request, ApiError)
    assert line.request.status == 400
    assert line.request.error["param"] == param
    assert line.custom_id == (None if "custom_id" in changes else "a")


@pytest.mark.parametrize("field", ["custom_id", "method", "url", "body"])
def test_a_missing_field_is_named(field: str):
    data = _line("a", prompt="x")
    del data[field]
    line = parse_line(json.dumps(data).encode())
    assert isinstance(line.request, ApiError)
    assert line.request.error["param"] == field


def test_duplicate_ids_are_refused_with_their_lines(tmp_path: Path):
    path = _write(tmp_path / "in.jsonl", [_line("a"), _line("b"), b"", _line("a"), _line("b")])
    with pytest.raises(BatchError, match=r"'a': lines \[1, 4\]\n.*'b': lines \[2, 5\]"):
        read_batch(path)


def test_an_engine_that_dies_fails_the_lines_that_are_left(tmp_path: Path):
    lines = read_batch(
        _write(tmp_path / "in.jsonl", [_line(str(i), prompt=[i], max_tokens=4) for i in range(5)])
    )
    service = Completions(FakeClient(dies_after=3), Metrics())  # type: ignore[arg-type]
    answers = asyncio.run(answer_batch(service, lines, max_open=2))
    assert [answer["custom_id"] for answer in answers] == ["0", "1", "2", "3", "4"]
    assert {answer["response"]["status_code"] for answer in answers} == {503}
    assert {answer["error"]["message"] for answer in answers} == {"rank 1 died"}


def test_an_output_that_breaks_off_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    path.write_text("old")

    def break_off() -> None:
        with atomic_output(path) as write:
            write([{"new": 1}])
            raise KeyError

    with pytest.raises(KeyError):
        break_off()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_through_a_real_engine(tmp_path: Path, ray_cluster: None):
    """Good lines of both endpoints and bad ones between them, answered in the order given."""
    messages = [{"role": "user", "content": "def main("}]
    lines = [
        _line("long", prompt="From fairest creatures", max_tokens=24, temperature=0),
        _line("chat", "/v1/chat/completions", messages=messages, max_tokens=3, temperature=0),
        b"{not json",
        _line("colour", prompt="x", colour="red"),
        _line("several", prompt=["a", [98, 99]], n=2, max_tokens=2),
        _line("big", prompt="x" * 2000),
        _line("same", prompt="From fairest creatures", max_tokens=24, temperature=0),
    ]
    output = tmp_path / "out.jsonl"
    code = main(
        ["run-batch", "-i", str(_write(tmp_path / "in.jsonl", lines)), "-o", str(output),
         "--model", str(SHIPPED_MODEL), "--dtype", "float32", "--num-kv-blocks", "32"]
    )  # fmt: skip
    assert code == 1  # some lines failed
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    ids = ["long", "chat", None, "colour", "several", "big", "same"]
    assert [answer["custom_id"] for answer in answers] == ids
    statuses = [answer["response"]["status_code"] for answer in answers]
    assert statuses == [200, 200, 400, 400, 200, 400, 200]
    bodies = [answer["response"]["body"] for answer in answers]
    assert bodies[0]["choices"] == bodies[6]["choices"]
    assert len(bodies[0]["choices"][0]["text"]) == bodies[0]["usage"]["completion_tokens"] == 24
    assert bodies[1]["object"] == "chat.completion"
    assert [body["error"]["param"] for body in bodies[2:4]] == [None, "colour"]
    assert [choice["index"] for choice in bodies[4]["choices"]] == [0, 1, 2, 3]
    assert bodies[4]["usage"]["prompt_tokens"] == 3
    assert bodies[5]["error"]["param"] == "prompt"
    assert [answer["error"] is None for answer in answers] == [s == 200 for s in statuses]
