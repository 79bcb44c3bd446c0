"""The DeepEP adapters over the stand-in, on 2 and 4 ranks, in both modes, against the reference."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from moe_ep import kernels
from moe_ep.dispatch import Dispatcher, Mode, create_dispatcher
from moe_ep.experts.base import ExpertSpec
from moe_ep.experts.torch_experts import TorchExperts
from moe_ep.fp8 import FP8, ScaleFormat
from tests.compare import assert_bits_equal, assert_rows_close
from tests.dispatch.cases import BF16, Case, arguments, expected_output, inputs_of, start_combine
from tests.dispatch.deep_ep_cases import (
    BACKENDS,
    HIDDEN,
    Result,
    case,
    cases,
    check,
    is_masked,
    on_stand_in,
    quantizer_of,
    run_case,
    run_cases,
)
from tests.emulators.install import emulated
from tests.experts.cases import random_weights
from tests.ranks import RankInfo, RankPool


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
                check(one, rank, result, quantizer_of(backend, mode))
                assert is_masked(result) == is_kernel
                assert result.has_row_weights == (backend == "deepep_v2")
                if backend == "deepep" and mode is Mode.NORMAL:  # sums in the reference's order
                    assert_bits_equal(result.out, expected_output(one, rank))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_trap_07_scales_for_sm100_are_powers_of_two_four_to_a_word(
    rank_pool: RankPool, backend, num_ranks
):
    todo = [replace(one, scale_format=ScaleFormat.UE8M0) for one in cases(num_ranks, FP8)[:4]]
    by_rank = rank_pool.run(run_cases, num_ranks, backend, todo)
    for rank, results in enumerate(by_rank):
        for one, by_mode in zip(todo, results, strict=True):
            for mode, result in by_mode.items():
                check(one, rank, result, quantizer_of(backend, mode, use_ue8m0=True))


def _run_with_kernels(info: RankInfo, todo: list[Case]) -> list[Result]:
    def work(dispatcher: Dispatcher, one: Case) -> Result:
        return run_case(dispatcher, one, info.rank, Mode.NORMAL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "are_used", lambda device: True)
        return [on_stand_in(info, "deepep", one.spec, partial(work, one=one)) for one in todo]


def test_rows_expanded_by_kernels_are_the_same(rank_pool: RankPool):
    formats = list(ScaleFormat)
    todo = [replace(one, scale_format=fmt) for one in cases(2, FP8)[:3] for fmt in formats]
    by_rank = rank_pool.run(_run_with_kernels, 2, todo)
    for rank, results in enumerate(by_rank):
        for one, result in zip(todo, results, strict=True):
            is_ue8m0 = one.scale_format is ScaleFormat.UE8M0
            check(one, rank, result, quantizer_of("deepep", Mode.NORMAL, use_ue8m0=is_ue8m0))


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


def _real_experts(info: RankInfo, backend: str) -> dict[Mode, torch.Tensor]:
    """The torch experts, which read strided scales and apply row weights when they are given."""
    one = case("holes", (9, 5), num_padding=2, num_slots_per_rank=2)
    spec = ExpertSpec(num_slots=2, hidden=HIDDEN, intermediate=256, dtype=BF16, is_fp8=True)
    experts = TorchExperts(spec)
    for slot in range(2):
        experts.load_slot(slot, random_weights(spec, seed=2 * info.rank + slot))

    def work(dispatcher: Dispatcher) -> dict[Mode, torch.Tensor]:
        outs = {}
        for mode in Mode:
            dispatched = dispatcher.dispatch(**arguments(one, info.rank, mode)).wait()
            y = experts(dispatched)
            outs[mode] = dispatcher.combine(y=y, dispatched=dispatched).wait().clone()
        return outs

    return on_stand_in(info, backend, one.spec, work)


# Requantised activations: one unit of e4m3 in some of the terms of a sum.
EXPERT_RTOL = 2**-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_give_what_they_give_over_the_collective_backend(rank_pool: RankPool, backend):
    expected = rank_pool.run(_real_experts, 2, "collective")
    for rank, outs in enumerate(rank_pool.run(_real_experts, 2, backend)):
        for mode, out in outs.items():
            assert_rows_close(out, expected[rank][mode], rtol=EXPERT_RTOL, atol=1e-3)


def _refuse(info: RankInfo, backend: str) -> str:
    one = case("uniform", (4, 4))
    with emulated("deep_ep"), pytest.raises(ValueError, match="group: None given"):
        create_dispatcher(backend, one.spec, None)

    def work(dispatcher: Dispatcher) -> str:
        given = vars(inputs_of(one, info.rank))
        twice = {name: value.repeat(2, 1) for name, value in given.items()}
        with pytest.raises(ValueError, match="capacity = 4 allowed"):
            dispatcher.dispatch(**twice, mode=Mode.LOW_LATENCY)
        pending = dispatcher.dispatch(**given, mode=Mode.LOW_LATENCY)
        start_combine(dispatcher, one, info.rank, pending).wait()
        dispatcher.destroy()  # again by the caller
        return "done"

    return on_stand_in(info, backend, one.spec, work)


@pytest.mark.parametrize("backend", BACKENDS)
def test_limits_hold_before_the_exchange_and_destroy_may_be_repeated(rank_pool: RankPool, backend):
    assert rank_pool.run(_refuse, 2, backend) == ["done", "done"]
