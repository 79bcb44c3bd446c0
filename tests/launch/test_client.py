"""The front end over real ranks: what comes back, what is refused, what a failure looks like."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from launch.client import EngineClient
from launch.completions import Completions
from launch.failure import EngineDeadError
from launch.metrics import Metrics
from launch.openai_api import CompletionRequest, parse_request
from launch.params import check_token_ids
from launch.ray_cluster import ClusterError, place_ranks
from moe_ep.config import EngineConfig
from moe_ep.engine.request import FinishReason, SamplingParams, StepOutput
from tests.launch.faulty_engines import BrokenLoad, BrokenStep, StuckStep, path
from tests.launch.python_calls import PythonCalls
from tests.tiny import tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=400)
RUNNER_TIMEOUT_S = 170.0


def _config(**flags: Any) -> EngineConfig:
    model = str(tiny_checkpoint("v3").path)
    defaults: dict[str, Any] = {"model": model, "ep_size": 2, "num_kv_blocks": 64}
    return EngineConfig(**defaults | flags)


class Bench:
    """A client and the loop it lives on; both rest between calls of ``run``."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self.client = self.run(EngineClient.start(_config()))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(asyncio.wait_for(work, RUNNER_TIMEOUT_S))

    def close(self) -> None:
        self.run(self.client.shutdown())
        self._runner.close()


@pytest.fixture(scope="module")
def bench(ray_cluster: None) -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


async def _collect(stream: AsyncGenerator[StepOutput, None]) -> list[StepOutput]:
    async with aclosing(stream):
        return [output async for output in stream]


async def _tokens(client: EngineClient, prompt: list[int], params: SamplingParams, name: str):
    outputs = await _collect(client.generate(prompt, params, name))
    return [token for output in outputs for token in output.token_ids]


def _reference(prompt: list[int], count: int) -> list[int]:
    reference = tiny_checkpoint("v3").reference
    out = reference.generate(  # type: ignore[operator]
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def test_many_requests_at_once_get_their_own_text(bench: Bench):
    client = bench.client
    prompts = [[2 + (7 * i + j) % 150 for j in range(1 + 11 * i)] for i in range(6)]

    async def scenario() -> list[list[int]]:
        return await asyncio.gather(
            *(_tokens(client, prompt, GREEDY, f"own{i}") for i, prompt in enumerate(prompts))
        )

    assert bench.run(scenario()) == [_reference(prompt, 8) for prompt in prompts]
    assert client.loads == (0, 0)


def test_requests_go_to_the_rank_with_the_fewest_tokens(bench: Bench):
    client = bench.client

    async def scenario() -> None:
        streams = [
            client.generate([5] * length, LONG, f"load{length}") for length in (40, 10, 20, 30)
        ]
        loads = []
        for stream in streams:
            await anext(stream)
            loads.append(client.loads)
        # 40 | 10, then 20 and 30 join the lighter one; the tokens made meanwhile count too.
        assert loads[0][0] >= 41
        assert loads[0][1] == 0
        assert loads[1][1] >= 11
        assert loads[2][1] >= 32
        assert loads[3][0 if loads[2][0] < loads[2][1] else 1] >= 31
        for stream in streams:
            await stream.aclose()

    bench.run(scenario())
    assert client.loads == (0, 0)


async def _until_idle(client: EngineClient) -> None:
    async with asyncio.timeout(60):
        while any(s.num_running or s.num_waiting or s.kv_tokens for s in await client.status()):
            await asyncio.sleep(0.05)


def test_leaving_early_frees_the_rank(bench: Bench):
    async def scenario() -> None:
        stream = bench.client.generate([3, 4, 5], LONG, "left")
        await anext(stream)
        await stream.aclose()
        await _until_idle(bench.client)
        statuses = await bench.client.status()
        assert [status.rank for status in statuses] == [0, 1]
        assert [status.kv_blocks_used for status in statuses] == [0, 0]
        assert all(status.kv_blocks_total == 64 for status in statuses)

    bench.run(scenario())


def test_abort_ends_the_stream_with_its_reason(bench: Bench):
    async def scenario() -> None:
        stream = bench.client.generate([3, 4, 5], LONG, "aborted")
        await anext(stream)
        bench.client.abort("aborted")
        bench.client.abort("never heard of")
        rest = await _collect(stream)
        assert rest[-1].finish_reason is FinishReason.ABORT
        assert sum(len(output.token_ids) for output in rest) < 390
        await _until_idle(bench.client)

    bench.run(scenario())


def test_seeds_are_drawn_for_those_who_bring_none(bench: Bench):
    client = bench.client
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)

    async def scenario() -> None:
        drawn = [await _tokens(client, [9, 8], params, f"drawn{i}") for i in range(3)]
        assert len({tuple(tokens) for tokens in drawn}) == 3
        given = replace(params, seed=17)
        alone = await _tokens(client, [9, 8], given, "alone")
        mates = (_tokens(client, [9, 8, i], params, f"mate{i}") for i in range(4))
        among, *_ = await asyncio.gather(_tokens(client, [9, 8], given, "among"), *mates)
        assert among == alone

    bench.run(scenario())


@pytest.mark.parametrize(
    ("prompt", "change", "message"),
    [
        ([], {}, "prompt: 0 tokens"),
        ([1] * 512, {}, "prompt: 512 tokens"),
        ([1], {"temperature": -1.0}, "temperature: -1.0"),
        ([1], {"n": 2}, "n: 2"),
        ([1], {"stop_token_ids": (160,)}, "stop_token_ids: 160"),
    ],
)
def test_what_can_never_run_is_refused_at_once(bench: Bench, prompt: list, change: dict, message):
    with pytest.raises(ValueError, match=message):
        bench.client.generate(prompt, replace(GREEDY, **change), "refused")
    assert bench.client.loads == (0, 0)


def test_one_id_is_one_request(bench: Bench):
    async def scenario() -> None:
        first = bench.client.generate([3], LONG, "twice")
        await anext(first)
        with pytest.raises(ValueError, match="'twice' is already open"):
            await anext(bench.client.generate([3], LONG, "twice"))
        assert (await anext(first)).finish_reason is None
        await first.aclose()

    bench.run(scenario())


def test_a_prompt_is_checked_once_for_all_its_choices(bench: Bench):
    body = {"prompt": [[3, 4], [5]], "n": 4, "max_tokens": 1, "stop": None}

    async def scenario() -> int:
        service = Completions(bench.client, Metrics())
        request = parse_request(CompletionRequest, body)
        with PythonCalls() as calls, closing(await service.prepare(request)) as job:
            answer = await job.answer()
        assert len(answer["choices"]) == 8
        return calls.of(check_token_ids)

    assert bench.run(scenario()) == 2


def test_no_room_in_the_cluster_says_what_is_missing(ray_cluster: None):
    with pytest.raises(
        ClusterError, match="100 bundles of 1 CPU were asked; the cluster has 8 CPU"
    ):
        place_ranks(num_ranks=100, num_slots_per_rank=1, address=None, timeout_s=1.0)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def _until_dead(pids: list[int]) -> None:
    async with asyncio.timeout(60):
        while any(_is_alive(pid) for pid in pids):
            await asyncio.sleep(0.1)


async def _fail_while_running(client: EngineClient, hurt: Any = None) -> list[str]:
    """The errors that two open requests end with, one on each rank if there are two."""
    streams = [client.generate([3 + i] * 5, LONG, f"doomed{i}") for i in range(2)]
    if hurt is not None:
        for stream in streams:
            await anext(stream)
        hurt()
    ends = await asyncio.gather(*(_collect(s) for s in streams), return_exceptions=True)
    assert all(isinstance(end, EngineDeadError) for end in ends), ends
    assert client.error is not None
    with pytest.raises(EngineDeadError):
        client.generate([1], GREEDY, "too late")
    with pytest.raises(EngineDeadError):
        await client.status()
    return [str(end) for end in ends]


def test_a_rank_that_raises_is_named_with_its_reason(ray_cluster: None):
    async def scenario() -> list[str]:
        client = await EngineClient.start(_config(ep_size=1), engine=path(BrokenStep))
        try:
            return await _fail_while_running(client)
        finally:
            await client.shutdown()

    for message in asyncio.run(asyncio.wait_for(scenario(), RUNNER_TIMEOUT_S)):
        assert message.startswith("rank 0 (")
        assert "a step went wrong" in message
        assert "rank 0: step 2" in message


def test_a_rank_that_stands_still_is_noticed(ray_cluster: None):
    async def scenario() -> list[str]:
        config = _config(ep_size=1, watchdog_timeout_s=3.0)
        client = await EngineClient.start(config, engine=path(StuckStep))
        pids = [row.placed.pid for row in client.rows]
        try:
            messages = await _fail_while_running(client)
            await _until_dead(pids)
            return messages
        finally:
            await client.shutdown()

    for message in asyncio.run(asyncio.wait_for(scenario(), RUNNER_TIMEOUT_S)):
        assert "no progress for 3 s" in message
        assert "rank 0: step 2" in message
        assert "stage stuck here" in message


def test_a_rank_that_cannot_start_is_named_and_nothing_stays(ray_cluster: None):
    async def scenario() -> None:
        client = EngineClient(_config(), engine=path(BrokenLoad))
        pids = [row.placed.pid for row in client.rows]
        with pytest.raises(EngineDeadError, match="rank 1: shard 3 is unreadable"):
            await client.load()
        await _until_dead(pids)

    asyncio.run(asyncio.wait_for(scenario(), RUNNER_TIMEOUT_S))


def test_a_killed_rank_ends_all_requests_with_its_name(bench: Bench):
    """The last test: it ends the engine of the others."""
    client = bench.client
    pids = [row.placed.pid for row in client.rows]

    async def scenario() -> list[str]:
        try:
            messages = await _fail_while_running(client, lambda: os.kill(pids[1], signal.SIGKILL))
            await _until_dead(pids)
            return messages
        finally:
            await client.shutdown()
            await client.shutdown()

    for message in bench.run(scenario()):
        assert message.startswith("rank 1 (")
        assert f"pid {pids[1]}) died" in message
        assert "rank 0: step " in message
        assert ", stage " in message
