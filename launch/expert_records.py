"""Which experts the tokens go to, over HTTP: SGLang's three endpoints, and what /health tells.

Every rank records its own slots by step; nothing is exchanged between ranks for it. The front end
joins what they bring.
"""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Response

from launch.api_error import ApiError
from launch.http_io import json_response

if TYPE_CHECKING:
    from eplb.loads import SlotRecords
    from launch.client import EngineClient
    from moe_ep.engine.engine import RankStatus


class ExpertRecords:
    """Starts, stops and dumps the recorders of all ranks. directory: where dumps go."""

    def __init__(self, client: "EngineClient", directory: str) -> None:
        self._client = client
        self._directory = Path(directory)

    def add_routes(self, app: FastAPI) -> None:
        for verb in ("start", "stop", "dump"):
            url = f"/{verb}_expert_distribution_record"
            app.add_api_route(url, getattr(self, verb), methods=["GET", "POST"])

    async def start(self) -> Response:
        return await self._record(True)

    async def stop(self) -> Response:
        return await self._record(False)

    async def dump(self) -> Response:
        """Writes what was recorded since the last start; recording goes on."""
        self._check()
        records: list[SlotRecords] = await self._client.ask_all("load_records")
        paths, num_steps = await asyncio.to_thread(self._write, records)  # streams go on
        return json_response({"files": [str(path) for path in paths], "num_steps": num_steps})

    async def _record(self, is_on: bool) -> Response:
        self._check()
        await self._client.ask_all("record_loads", is_on)
        return json_response({"is_recording": is_on})

    def _check(self) -> None:
        if self._client.config.expert_distribution_recorder_mode == "off":
            raise ApiError(400, "start the server with --expert-distribution-recorder-mode")

    def _write(self, records: "list[SlotRecords]") -> tuple[list[Path], int]:
        from eplb.files import write_loads, write_passes
        from eplb.loads import common_steps, last_placement, merge_records

        model = self._client.model
        try:
            num_steps = len(common_steps(records))
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"expert_distribution_recorder_{time.time()}"
        if self._client.config.expert_distribution_recorder_mode != "per_pass":
            path = self._directory / f"{name}.pt"
            loads = merge_records(records, model.num_experts)
            write_loads(path, loads.int(), num_dense=model.first_k_dense_replace)
            return [path], num_steps
        paths = [self._directory / f"{name}_{record.rank}.pt" for record in records]
        placement = last_placement(records, model.num_experts)
        for path, record in zip(paths, records, strict=True):
            write_passes(path, record, placement)
        return paths, num_steps


def eplb_health(ranks: "Sequence[RankStatus]") -> dict[str, Any]:
    """The account of the ranks together: alarms of any, bytes of all, the longest stall."""
    accounts = {rank.rank: rank.eplb for rank in ranks if rank.eplb is not None}
    if not accounts:
        return {}
    each = accounts.values()
    return dataclasses.asdict(accounts[min(accounts)]) | {
        "bytes_moved": sum(account.bytes_moved for account in each),
        "longest_stall_s": max(account.longest_stall_s for account in each),
        "alarm": {rank: a.alarm for rank, a in accounts.items() if a.alarm},
        "last_error": {rank: a.last_error for rank, a in accounts.items() if a.last_error},
    }
