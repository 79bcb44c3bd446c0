"""Dispatch, experts and combine on 1, 2 and 4 ranks against a plain reference, in both modes."""

import random
import time

import pytest
import torch

from moe_ep.dispatch import Mode, create_dispatcher
from moe_ep.fp8 import FP8
from tests.compare import assert_bits_equal, assert_rows_close
from tests.dispatch.cases import (
    BF16,
    DTYPES,
    F32,
    RTOL,
    Case,
    Result,
    arguments,
    cases,
    check,
    expected_output,
    inputs_of,
    run_case,
    run_experts,
    run_in_turns,
    start_combine,
)
from tests.ranks import RankInfo, RankPool


def _run_cases(info: RankInfo, backend: str, todo: list[Case]) -> list[dict[Mode, Result]]:
    results = []
    for case in todo:
        dispatcher = create_dispatcher(backend, case.spec, info.group)
        results.append({mode: run_case(dispatcher, case, info.rank, mode) for mode in Mode})
        dispatcher.destroy()
    return results


@pytest.mark.parametrize(("payload_dtype", "out_dtype"), DTYPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_collective_equals_the_reference(rank_pool: RankPool, num_ranks, payload_dtype, out_dtype):
    todo = cases(num_ranks, payload_dtype, out_dtype)
    by_rank = rank_pool.run(_run_cases, num_ranks, "collective", todo)
    for rank, results in enumerate(by_rank):
        for case, result in zip(todo, results, strict=True):
            check(case, rank, result)


@pytest.mark.usefixtures("kernels_or_torch")
@pytest.mark.parametrize(("payload_dtype", "out_dtype"), DTYPES)
def test_local_equals_the_reference(payload_dtype, out_dtype):
    for case in cases(1, payload_dtype, out_dtype):
        dispatcher = create_dispatcher("auto", case.spec, None)
        check(case, 0, {mode: run_case(dispatcher, case, 0, mode) for mode in Mode})


def _run_with_delays(info: RankInfo, case: Case, num_runs: int) -> list[torch.Tensor]:
    """Ranks start each stage at random times, so messages arrive in ever other orders."""
    delays = random.Random(info.rank)
    dispatcher = create_dispatcher("collective", case.spec, info.group)
    given = arguments(case, info.rank, Mode.LOW_LATENCY)
    outs = []
    for _ in range(num_runs):
        time.sleep(delays.random() / 50)
        dispatched = dispatcher.dispatch(**given).wait()
        time.sleep(delays.random() / 50)
        y = run_experts(case, info.rank, dispatched)
        outs.append(dispatcher.combine(y=y, dispatched=dispatched).wait())
    return outs


def test_arrival_order_never_changes_a_bit(rank_pool: RankPool):
    case = Case("uniform", (6, 6, 6, 6), FP8, BF16, num_topk=6)
    for outs in rank_pool.run(_run_with_delays, 4, case, 12):
        for out in outs[1:]:
            assert_bits_equal(out, outs[0])


def _run_alone_and_together(info: RankInfo, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    dispatcher = create_dispatcher("collective", case.spec, info.group)
    given = vars(inputs_of(case, info.rank))
    outs = []
    for keep in (slice(None), slice(2, 3)):
        kept = {name: value[keep] for name, value in given.items()}
        pending = dispatcher.dispatch(**kept, mode=Mode.NORMAL)
        outs.append(start_combine(dispatcher, case, info.rank, pending).wait())
    return outs[0][2:3], outs[1]


def test_batch_mates_never_change_a_bit(rank_pool: RankPool):
    case = Case("uniform", (200, 9), FP8, BF16, num_topk=4)
    for together, alone in rank_pool.run(_run_alone_and_together, 2, case):
        assert_bits_equal(alone, together)


def _run_two_in_flight(info: RankInfo, todo: list[Case]) -> list[torch.Tensor]:
    dispatcher = create_dispatcher("collective", todo[0].spec, info.group)
    return run_in_turns(dispatcher, todo, info.rank, Mode.NORMAL)


def test_two_micro_batches_in_flight_do_not_mix(rank_pool: RankPool):
    todo = [Case("uniform", (5, 5)), Case("skewed", (5, 5))]
    for rank, outs in enumerate(rank_pool.run(_run_two_in_flight, 2, todo)):
        for case, out in zip(todo, outs, strict=True):
            assert_rows_close(out, expected_output(case, rank), rtol=RTOL[F32], atol=0.0)
