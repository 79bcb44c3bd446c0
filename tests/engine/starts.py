"""Workers of ``test_start_and_end``; here, so that rank processes import no transformers."""

import time
from unittest.mock import patch

from moe_ep.config import EngineConfig
from moe_ep.engine import assemble as assembly
from moe_ep.engine.request import EngineRequest, SamplingParams
from tests.engine.driver import RankResult, run_engine, world_of
from tests.ranks import RankInfo

LIMIT_S = 2.0  # of an exchange
PARAMS = SamplingParams(temperature=0.0, seed=0, max_tokens=3, ignore_eos=True)


def late_worker(info: RankInfo, config: EngineConfig) -> RankResult:
    """Rank 1 loads for twice as long as an exchange may take."""
    load = assembly._Assembler._load

    def loaded(*args):
        time.sleep(2 * LIMIT_S * info.rank)
        return load(*args)

    request = EngineRequest(f"{info.rank}", (1, 2, 3), PARAMS)
    with patch.object(assembly._Assembler, "_load", loaded):
        return run_engine(config, world_of(info), [request])


def failing_worker(info: RankInfo) -> tuple[str, float]:
    world, start = world_of(info), time.monotonic()
    try:
        with world.together("loading", 60.0):
            if info.rank == 1:
                raise ValueError("no such file")
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "nothing", 0.0


def late_for_good(info: RankInfo) -> str:
    world = world_of(info)
    if info.rank == 1:
        return "does not come"
    try:
        with world.together("loading", 0.5):
            pass
    except RuntimeError as error:
        return type(error).__name__
    return "waited for nobody"
