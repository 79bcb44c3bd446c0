"""A rank takes the calls about requests in the order in which the front end makes them."""

import asyncio
from collections.abc import AsyncGenerator

from launch.client import EngineClient
from moe_ep.config import EngineConfig
from moe_ep.engine.request import SamplingParams, StepOutput
from tests.launch.faulty_engines import CallJournal, SlowText, path
from tests.tiny import tiny_checkpoint

TIMEOUT_S = 120.0
TEXTS = {
    "slow to unpickle": SlowText("slow"),
    # Ray sends arguments above 100 KB by way of its object store.
    "in the object store": "x" * 2_000_000,
}


def test_no_abort_overtakes_its_submit(ray_cluster: None):
    """It would be ignored, and the request that follows it would run for nobody."""
    config = EngineConfig(model=str(tiny_checkpoint("v3").path), num_kv_blocks=64)
    names = [f"{kind} {i}" for kind in TEXTS for i in range(10)]

    async def scenario() -> list[str]:
        client = await EngineClient.start(config, engine=path(CallJournal))
        try:
            for name in names:
                text = TEXTS[name.rsplit(" ", 1)[0]]
                params = SamplingParams(max_tokens=400, ignore_eos=True, stop=(text,))
                await _leave_at_once(client.generate([3], params, name))
            calls: list[str] = []
            while len(calls) < 2 * len(names):
                (calls,) = await client.ask_all("load_records")
            return calls
        finally:
            await client.shutdown()

    calls = asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
    assert calls == [f"{call} {name}" for name in names for call in ("submit", "abort")]


async def _leave_at_once(stream: AsyncGenerator[StepOutput, None]) -> None:
    """Close the stream while its submit is on its way."""
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await stream.aclose()
