"""``moe-ep demo``: the shipped model on two CPU ranks behind the HTTP API, and what it did.

Everything goes the way a user's request goes: Ray, two ranks, the HTTP service, server-sent events.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.demo.report import Answer, Load, report
from launch.flags import from_args
from launch.launch_config import ClusterConfig, ServerConfig
from launch.lifetime import StopSignals, running_engine
from moe_ep.config import EngineConfig

if TYPE_CHECKING:
    import httpx
    from rich.console import RenderableType

    from launch.client import EngineClient

HERE = Path(__file__).parent
MODEL_NAME = "moe-ep-demo"
CONFIG = EngineConfig(
    model=str(HERE / "model"), served_model_name=MODEL_NAME, ep_size=2, max_num_seqs=32
)
MAX_TOKENS = 96
REQUEST_TIMEOUT_S = 120.0
STATUS_INTERVAL_S = 0.25


def run(args: argparse.Namespace) -> int:
    """0 when every request was answered."""
    answers, load = asyncio.run(_demo(from_args(ClusterConfig, args), read_prompts()))
    return report(answers, load)


def read_prompts() -> list[dict[str, str]]:
    """The shipped prompts, each with its ``kind`` and ``prompt``; they are in no training text."""
    return json.loads((HERE / "prompts.json").read_text(encoding="utf-8"))


async def _demo(
    cluster: ClusterConfig, prompts: Sequence[dict[str, str]]
) -> tuple[list[Answer], Load]:
    from launch.server import listen, make_server, serving

    with StopSignals(), listen("127.0.0.1", 0) as sock:
        async with running_engine(CONFIG, cluster) as client:
            server = make_server(client, ServerConfig())
            async with serving(server, sock) as (url, _):
                print(f"serving {MODEL_NAME} on {url}; sending {len(prompts)} prompts at once")
                load = Load()
                watch = asyncio.create_task(_watch(client, load))
                answers = await _ask_all(url, prompts)
                watch.cancel()
                load.add(await client.status())
                load.slot_tokens = await client.ask_all("slot_tokens")
    return answers, load


async def _ask_all(url: str, prompts: Sequence[dict[str, str]]) -> list[Answer]:
    """All prompts at once; the first of each kind is shown while it streams."""
    import httpx
    from rich.live import Live

    answers = [Answer(prompt["kind"], prompt["prompt"]) for prompt in prompts]
    shown = [next(a for a in answers if a.kind == kind) for kind in ("verse", "code")]
    limits = httpx.Limits(max_connections=len(prompts))
    options: dict[str, Any] = {"timeout": REQUEST_TIMEOUT_S, "trust_env": False}
    with Live(get_renderable=lambda: _panels(shown), refresh_per_second=10):
        async with httpx.AsyncClient(base_url=url, limits=limits, **options) as http:
            await asyncio.gather(*(_ask(http, answer, seed) for seed, answer in enumerate(answers)))
    return answers


async def _ask(http: "httpx.AsyncClient", answer: Answer, seed: int) -> None:
    """Stream one completion into ``answer``."""
    body = {
        "model": MODEL_NAME,
        "prompt": answer.prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0.7,
        "seed": seed,
        "stream": True,
        "return_token_ids": True,
    }
    answer.sent_s = time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            answer.error = (await response.aread()).decode()
            return
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                answer.take(json.loads(line.removeprefix("data: ")), time.perf_counter())


async def _watch(client: "EngineClient", load: Load) -> None:
    while True:
        load.add(await client.status())
        await asyncio.sleep(STATUS_INTERVAL_S)


def _panels(answers: Sequence[Answer]) -> "RenderableType":
    from rich.columns import Columns
    from rich.panel import Panel
    from rich.text import Text

    panels = [
        Panel(
            Text.assemble((answer.prompt, "dim"), answer.text, overflow="fold"),
            title=answer.kind,
            expand=True,
        )
        for answer in answers
    ]
    return Columns(panels, equal=True, expand=True)
