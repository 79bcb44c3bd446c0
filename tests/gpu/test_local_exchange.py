"""The exchange of one rank on one GPU: the contract's cases, and a captured one with new routings.

``pytest tests/gpu``. ``tests/dispatch/test_exchange.py`` runs the same cases on a CPU, with the
kernels in their interpreter.
"""

import pytest
import torch

from moe_ep import kernels
from moe_ep.dispatch import Mode, create_dispatcher
from moe_ep.fp8 import FP8, dequantize_rows
from tests.compare import assert_bits_equal
from tests.dispatch.cases import BF16, DTYPES, Case, cases, check, inputs_of, run_case

pytestmark = pytest.mark.timeout(600, method="thread")  # kernels are compiled when first used


@pytest.fixture(autouse=True)
def _kernels(one_gpu: torch.device) -> None:
    if not kernels.are_used(one_gpu):
        pytest.skip(str(kernels.device_problem(one_gpu, needs_fp8=True)))


@pytest.mark.parametrize(("payload_dtype", "out_dtype"), DTYPES)
def test_equals_the_reference(one_gpu: torch.device, payload_dtype, out_dtype):
    for case in cases(1, payload_dtype, out_dtype):
        dispatcher = create_dispatcher("local", case.spec, None)
        results = {mode: run_case(dispatcher, case, 0, mode, one_gpu) for mode in Mode}
        check(case, 0, results)


def test_a_captured_step_serves_other_routings(one_gpu: torch.device):
    """Nothing in it waits for the host, or the capture would fail."""
    routings = [Case(name, (24,), FP8, BF16) for name in ("uniform", "one slot", "nothing")]
    given = [vars(inputs_of(case, 0)) for case in routings]
    dispatcher = create_dispatcher("local", routings[0].spec, None)
    fixed = {name: value.to(one_gpu) for name, value in given[0].items()}

    def step() -> torch.Tensor:
        dispatched = dispatcher.dispatch(**fixed, mode=Mode.LOW_LATENCY).wait()
        y = dequantize_rows(dispatched.rows, dispatched.scales, BF16)
        return dispatcher.combine(y=y, dispatched=dispatched).wait()

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for inputs in given:
        for name, value in inputs.items():
            fixed[name].copy_(value)
        graph.replay()
        assert_bits_equal(captured.cpu(), step().cpu())
