"""The DeepEP adapters over the stand-in, on 2 and 4 ranks, in both modes, against the reference."""

import pytest
import torch

from moe_ep.dispatch import Dispatcher, Mode, create_dispatcher
from moe_ep.fp8 import FP8, quantize_rows
from tests.compare import assert_bits_equal
from tests.dispatch.cases import expected_output
from tests.dispatch.deep_ep_cases import (
    arguments,
    case,
    cases,
    check,
    is_masked,
    on_stand_in,
    run_cases,
    start_combine,
)
from tests.emulators.deep_ep.low_latency import quantize_in_kernel
from tests.emulators.install import emulated
from tests.ranks import RankInfo, RankPool

BACKENDS = ["deepep", "deepep_v2"]


@pytest.mark.parametrize("payload_dtype", [FP8, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_adapter_equals_the_reference(rank_pool: RankPool, backend, num_ranks, payload_dtype):
    todo = cases(num_ranks, payload_dtype)
    by_rank = rank_pool.run(run_cases, num_ranks, backend, todo)
    for rank, results in enumerate(by_rank):
        for one, by_mode in zip(todo, results, strict=True):
            for mode, result in by_mode.items():
                is_kernel = backend == "deepep" and mode is Mode.LOW_LATENCY
                check(one, rank, result, quantize_in_kernel if is_kernel else quantize_rows)
                assert is_masked(result) == is_kernel
                assert result.has_row_weights == (backend == "deepep_v2")
                if backend == "deepep" and mode is Mode.NORMAL:  # sums in the reference's order
                    assert_bits_equal(result.out, expected_output(one, rank))


def _again_and_again(info: RankInfo, backend: str) -> dict[Mode, list[torch.Tensor]]:
    one = case("uniform", (6,) * info.num_ranks, num_topk=6)

    def work(dispatcher: Dispatcher) -> dict[Mode, list[torch.Tensor]]:
        outs: dict[Mode, list[torch.Tensor]] = {mode: [] for mode in Mode}
        for mode in [*Mode] * 4:
            pending = dispatcher.dispatch(**arguments(one, info.rank, mode))
            outs[mode].append(start_combine(dispatcher, one, info.rank, pending).wait().clone())
        return outs

    return on_stand_in(info, backend, one.spec, work)


@pytest.mark.parametrize("backend", BACKENDS)
def test_arrival_order_never_changes_a_bit(rank_pool: RankPool, backend):
    for outs in rank_pool.run(_again_and_again, 4, backend):
        for first, *others in outs.values():
            for other in others:
                assert_bits_equal(other, first)


def _refuse(info: RankInfo, backend: str) -> str:
    one = case("uniform", (4, 4))
    with emulated("deep_ep"), pytest.raises(ValueError, match="group: None given"):
        create_dispatcher(backend, one.spec, None)

    def work(dispatcher: Dispatcher) -> str:
        given = arguments(one, info.rank, Mode.LOW_LATENCY)
        with pytest.raises(ValueError, match="capacity = 4 allowed"):
            dispatcher.dispatch(
                **{n: v if n == "mode" else v.repeat(2, 1) for n, v in given.items()}
            )
        pending = dispatcher.dispatch(**given)
        start_combine(dispatcher, one, info.rank, pending).wait()
        dispatcher.destroy()  # again by the caller
        return "done"

    return on_stand_in(info, backend, one.spec, work)


@pytest.mark.parametrize("backend", BACKENDS)
def test_limits_hold_before_the_exchange_and_destroy_may_be_repeated(rank_pool: RankPool, backend):
    assert rank_pool.run(_refuse, 2, backend) == ["done", "done"]
