"""Dispatch, experts and combine between two GPUs, on every backend that talks to other ranks.

``torchrun --nproc-per-node 2 -m pytest tests/gpu``. A device-side assertion or time-out of a
library ends the process; ``-k`` then runs the backends apart. Each one's dispatcher serves all its
tests, in both modes in turn, as in an engine.
"""

from collections.abc import Iterator

import pytest
import torch

from moe_ep.dispatch import BACKENDS, Dispatcher, Mode, create_dispatcher
from moe_ep.fp8 import FP8
from tests.compare import assert_bits_equal
from tests.gpu.exchange import (
    CASES,
    Case,
    check,
    check_output,
    exchange,
    exchange_two,
    make_inputs,
    make_spec,
)
from tests.gpu.machine import Ranks

# A rank that waits for a lost peer holds the interpreter, so the limit must end the process.
pytestmark = pytest.mark.timeout(600, method="thread")

# The one that needs most of the machine comes last.
KINDS = [
    pytest.param((backend, payload), id=f"{backend}-{name}")
    for backend in ("collective", "deepep_v2", "deepep")
    for payload, name in ((FP8, "fp8"), (torch.bfloat16, "bf16"))
]
NUM_RUNS = 3


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    return request.param


@pytest.fixture(scope="module")
def dispatcher(kind: tuple[str, torch.dtype], ranks: Ranks) -> Iterator[Dispatcher]:
    backend, payload_dtype = kind
    spec = make_spec(payload_dtype)
    if (problem := BACKENDS[backend]().supports(spec)) is not None:
        pytest.skip(f"{backend}: {problem}")
    dispatcher = create_dispatcher(backend, spec, ranks.group)
    yield dispatcher
    dispatcher.destroy()


def is_exact(backend: str, mode: Mode) -> bool:
    """All round each rank's part to BF16 and then add the ranks; but DeepEP V1 in low-latency mode
    adds all experts of a token at once."""
    return backend != "deepep" or mode is Mode.NORMAL


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference_and_itself(kind, dispatcher, ranks: Ranks, case: Case, mode: Mode):
    device = str(ranks.device)
    all_inputs = ranks.gather(make_inputs(case, ranks.rank))

    def work() -> None:
        runs = [exchange(dispatcher, case, ranks.rank, mode, device) for _ in range(NUM_RUNS)]
        for run in runs:
            check(run, all_inputs, ranks.rank, is_exact=is_exact(kind[0], mode))
            assert_bits_equal(run.out, runs[0].out)

    ranks.together(work)


@pytest.mark.parametrize("mode", Mode)
def test_two_micro_batches_in_flight_do_not_mix(kind, dispatcher, ranks: Ranks, mode: Mode):
    cases = CASES[0], CASES[1]

    def work() -> None:
        outs = exchange_two(dispatcher, cases, ranks.rank, mode, str(ranks.device))
        for case, out in zip(cases, outs, strict=True):
            check_output(out, make_inputs(case, ranks.rank), is_exact=is_exact(kind[0], mode))

    ranks.together(work)
