"""Recorded steps of a serving engine, from the ranks to /metrics."""

import asyncio
import re

from launch.client import EngineClient
from launch.metrics import Metrics
from moe_ep.config import EngineConfig
from moe_ep.engine.request import SamplingParams
from moe_ep.engine.step_times import RankTimes
from tests.tiny import tiny_checkpoint

INTERVAL = 4
TIMEOUT_S = 60.0


def test_every_nth_step_of_all_ranks_is_counted(ray_cluster: None):
    steps: list[list[RankTimes]] = []
    metrics = Metrics()
    asyncio.run(asyncio.wait_for(_serve(steps, metrics), TIMEOUT_S))
    assert all((times.record.step + 1) % INTERVAL == 0 for step in steps for times in step)
    assert all(len(step) == 2 for step in steps)
    text = metrics.render([]).decode()
    count = 2 * len(steps)  # one for each rank
    assert f"moe_ep_step_seconds_count {count}.0" in text
    assert f"moe_ep_step_exposed_communication_ratio_count {count}.0" in text
    counts = dict(re.findall(r"moe_ep_step_stage_seconds_count\{(.*?)\} (\S+)", text))
    assert counts['kind="work",stage="expert_GEMMs"'] == f"{count}.0"
    assert counts['kind="transfer",stage="combine_wait"'] == f"{count}.0"
    summed = re.findall(r"moe_ep_step_stage_seconds_sum\{.*?\} (\S+)", text)
    (total,) = re.findall(r"moe_ep_step_seconds_sum (\S+)", text)
    assert abs(sum(map(float, summed)) - float(total)) < 1e-6


async def _serve(steps: list[list[RankTimes]], metrics: Metrics) -> None:
    """Answer requests on both ranks until some steps have been recorded."""
    config = EngineConfig(
        model=str(tiny_checkpoint("v3").path),
        ep_size=2,
        num_kv_blocks=64,
        step_time_interval=INTERVAL,
    )
    client = await EngineClient.start(config)

    def take(times: list[RankTimes]) -> None:
        steps.append(times)
        metrics.observe_step(times)

    client.on_step = take
    try:
        while len(steps) < 2:
            await asyncio.gather(*(_answer(client, f"{len(steps)}-{i}") for i in range(2)))
    finally:
        await client.shutdown()


async def _answer(client: EngineClient, request_id: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    async for _ in client.generate([5, 6, 7], params, request_id):
        pass
