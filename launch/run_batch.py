"""``moe-ep run-batch``: a file of requests in OpenAI's batch format, answered in the same order.

Each line of the input is ``{"custom_id", "method": "POST", "url", "body"}``. Each line of the
output has the ``custom_id``, a ``response`` with status and body, and an ``error`` that is null
when all went well; a bad line fails alone. Duplicate ids are refused before anything is loaded,
because their answers could not be told apart. The output file appears when it is complete.
"""

import argparse
import asyncio
import json
import os
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.api_error import ApiError, bad_request, parse_json
from launch.completions import Completions
from launch.flags import from_args
from launch.launch_config import ClusterConfig
from launch.lifetime import StopSignals, running_engine
from launch.metrics import Metrics
from launch.openai_api import ChatRequest, CompletionRequest, GenerationRequest, parse_request
from moe_ep.config import EngineConfig

KINDS: dict[str, type[GenerationRequest]] = {
    kind.url: kind for kind in (CompletionRequest, ChatRequest)
}
FIELDS = ("custom_id", "method", "url", "body")

# Requests of the file that are open at a time, in multiples of what can run: enough that no rank
# waits for work while one of its requests ends.
OPEN_PER_PLACE = 2

Json = dict[str, Any]


class BatchError(ValueError):
    """The file as a whole cannot be run; the message has all reasons."""


@dataclass(frozen=True)
class BatchLine:
    """One line of the input; custom_id is None when it has no usable one."""

    custom_id: str | None
    request: GenerationRequest | ApiError


def run(args: argparse.Namespace) -> int:
    """0 when every line was answered, 1 when some failed, 2 when the file cannot be run."""
    try:
        lines = read_batch(args.input_file)
    except (BatchError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    config, cluster = from_args(EngineConfig, args), from_args(ClusterConfig, args)
    with atomic_output(args.output_file) as write:
        answers = asyncio.run(_run(config, cluster, lines))
        write(answers)
    num_failed = sum(answer["error"] is not None for answer in answers)
    print(f"{len(answers)} requests, {num_failed} failed: {args.output_file}", file=sys.stderr)
    return 1 if num_failed else 0


def read_batch(path: Path) -> list[BatchLine]:
    """The lines of a batch file, blank ones left out. Raises BatchError for duplicate ids."""
    rows = path.read_bytes().splitlines()
    lines: list[BatchLine] = []
    places: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows, start=1):
        if row.strip():
            line = parse_line(row)
            lines.append(line)
            if line.custom_id is not None:
                places[line.custom_id].append(number)
    twice = [f"  {name!r}: lines {at}" for name, at in places.items() if len(at) > 1]
    if twice:
        raise BatchError("\n".join([f"{path}: every custom_id may occur once:", *twice]))
    return lines


def parse_line(row: bytes) -> BatchLine:
    custom_id = None
    try:
        data = parse_json(row)
        if not isinstance(data, dict):
            raise bad_request(None, f"a line must be a JSON object, not {type(data).__name__}")
        if isinstance(data.get("custom_id"), str):
            custom_id = data["custom_id"]
        return BatchLine(custom_id, _parse_request(data))
    except ApiError as error:
        return BatchLine(custom_id, error)


def _parse_request(data: Json) -> GenerationRequest:
    for name in FIELDS:
        if name not in data:
            raise bad_request(name, "missing")
    for name in sorted(data.keys() - set(FIELDS)):
        raise bad_request(name, "unknown field")
    if not isinstance(data["custom_id"], str):
        raise bad_request("custom_id", "must be a string")
    if data["method"] != "POST":
        raise bad_request("method", f"is {data['method']!r}; only 'POST' is supported")
    if not isinstance(data["url"], str) or data["url"] not in KINDS:
        raise bad_request("url", f"is {data['url']!r}; one of {', '.join(KINDS)} is supported")
    request = parse_request(KINDS[data["url"]], data["body"])
    if request.stream:
        raise bad_request("stream", "is not possible in a batch")
    return request


async def _run(config: EngineConfig, cluster: ClusterConfig, lines: list[BatchLine]) -> list[Json]:
    with StopSignals():
        async with running_engine(config, cluster) as client:
            num_places = client.config.max_num_seqs * client.config.ep_size
            service = Completions(client, Metrics())
            return await answer_batch(service, lines, max_open=OPEN_PER_PLACE * num_places)


async def answer_batch(
    service: Completions, lines: Sequence[BatchLine], *, max_open: int
) -> list[Json]:
    """One output entry per line, in order. At most ``max_open`` requests run at a time."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    open_requests = asyncio.Semaphore(max_open)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("requests", total=len(lines))

        async def answer(line: BatchLine) -> Json:
            async with open_requests:
                entry = await _answer(service, line)
            progress.advance(bar)
            return entry

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(line)) for line in lines]
    return [task.result() for task in tasks]


async def _answer(service: Completions, line: BatchLine) -> Json:
    try:
        if isinstance(line.request, ApiError):
            raise line.request
        with closing(await service.prepare(line.request)) as job:
            return _entry(line.custom_id, 200, await job.answer(), error=None)
    except ApiError as failure:
        error = {"code": failure.error["code"] or str(failure.status), "message": str(failure)}
        return _entry(line.custom_id, failure.status, failure.body(), error=error)


def _entry(custom_id: str | None, status: int, body: Json, *, error: Json | None) -> Json:
    request_id = f"req-{uuid.uuid4().hex}"
    response = {"status_code": status, "request_id": request_id, "body": body}
    entry_id = f"batch_req_{uuid.uuid4().hex}"
    return {"id": entry_id, "custom_id": custom_id, "response": response, "error": error}


@contextmanager
def atomic_output(path: Path) -> Iterator[Callable[[list[Json]], None]]:
    """Opened before the work, so that a place that cannot be written costs no time; the file takes
    its name only once everything is in it."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("x", encoding="utf-8") as file:
            yield lambda entries: file.writelines(
                json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries
            )
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
