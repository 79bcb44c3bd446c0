"""What ``tests/gpu`` does on two GPUs, rehearsed on two CPU ranks: over gloo and the stand-in of
DeepEP. So the cases, the reference and the checks are known to be right before a GPU sees them."""

from dataclasses import replace

import pytest
import torch

from bench.gpu.case import Sizes
from bench.gpu.decode import mla_decode_case
from bench.gpu.experts import grouped_gemm_case
from bench.gpu.prefill import mla_prefill_case
from moe_ep.dispatch import Dispatcher, Mode
from moe_ep.fp8 import FP8, dequantize_rows, quantize_rows
from tests.compare import assert_bits_equal
from tests.dispatch.deep_ep_cases import on_stand_in
from tests.emulators.deep_ep.low_latency import quantize_in_kernel
from tests.emulators.device import emulated_kernels
from tests.gpu.exchange import (
    CASES,
    NAN,
    NUM_SLOTS,
    Inputs,
    Outcome,
    check,
    check_output,
    exchange,
    exchange_two,
    expected_output,
    make_inputs,
    make_spec,
)
from tests.gpu.machine import Ranks, ranks_problem
from tests.gpu.test_dispatch_combine import is_exact
from tests.gpu.test_kernels import (
    check_case,
    check_experts,
    check_linear,
    check_ragged_queries,
    ragged_query_spec,
)
from tests.ranks import RankInfo, RankPool

CPU = "cpu"
Key = tuple[int, Mode]


def _is_exact(backend: str, mode: Mode) -> bool:
    """As on a GPU, but that on a CPU torch rounds the sums of the collective backend upwards when
    they lie between two BF16 values, and these inputs make many that do."""
    return is_exact(backend, mode) and backend != "collective"


def _run_cases(
    info: RankInfo, backend: str, payload_dtype: torch.dtype
) -> tuple[dict[Key, Outcome], dict[Mode, list[torch.Tensor]]]:
    def work(dispatcher: Dispatcher):
        outcomes = {
            (number, mode): exchange(dispatcher, case, info.rank, mode, CPU)
            for number, case in enumerate(CASES)
            for mode in Mode
        }
        pairs = {mode: exchange_two(dispatcher, CASES[:2], info.rank, mode, CPU) for mode in Mode}
        return outcomes, pairs

    return on_stand_in(info, backend, make_spec(payload_dtype), work)


@pytest.mark.parametrize("payload_dtype", [FP8, torch.bfloat16])
@pytest.mark.parametrize("backend", ["collective", "deepep_v2", "deepep"])
def test_the_exchange_tests_pass_on_cpu_ranks(rank_pool: RankPool, backend, payload_dtype):
    for rank, (outcomes, pairs) in enumerate(rank_pool.run(_run_cases, 2, backend, payload_dtype)):
        for (number, mode), outcome in outcomes.items():
            all_inputs = [make_inputs(CASES[number], source) for source in range(2)]
            check(outcome, all_inputs, rank, is_exact=_is_exact(backend, mode))
        for mode, outs in pairs.items():
            for case, out in zip(CASES, outs, strict=False):
                inputs = make_inputs(case, rank)
                check_output(out, inputs, is_exact=_is_exact(backend, mode))


def _right_outcome(rank: int, all_inputs: list[Inputs]) -> Outcome:
    """Made without any exchange."""
    rows = [
        [
            inputs.x[token].float()
            for inputs in all_inputs
            for token in (inputs.topk_slots == rank * NUM_SLOTS + slot).any(1).nonzero().flatten()
        ]
        for slot in range(NUM_SLOTS)
    ]
    return Outcome(expected_output(all_inputs[rank]), [torch.stack(some) for some in rows])


def test_a_wrong_exchange_is_noticed():
    all_inputs = [make_inputs(CASES[0], source) for source in range(2)]
    good = _right_outcome(0, all_inputs)
    check(good, all_inputs, 0, is_exact=True)
    for slot, rows in enumerate(good.slots):
        changed, lost = rows.clone(), rows[1:]
        changed[0, 5] += 1
        for wrong, message in ((changed, "a row of nobody"), (lost, r"missing Counter\(.\(")):
            slots = [*good.slots[:slot], wrong, *good.slots[slot + 1 :]]
            with pytest.raises(AssertionError, match=rf"slot {slot}: wrong .*{message}"):
                check(replace(good, slots=slots), all_inputs, 0, is_exact=False)
    for factor in (0.0, 1.02, NAN):
        out = good.out.clone()
        out[3] *= factor
        with pytest.raises(AssertionError, match=r"rows differ|NaN at"):
            check(replace(good, out=out), all_inputs, 0, is_exact=False)
    out = good.out.clone()
    out.view(torch.int16)[3, 7] ^= 1
    with pytest.raises(AssertionError, match=r"1 of .* differ"):
        check(replace(good, out=out), all_inputs, 0, is_exact=True)


def test_values_keep_their_bits_through_any_quantisation():
    x = make_inputs(CASES[1], 0).x
    for quantize in (quantize_rows, quantize_in_kernel):
        assert_bits_equal(dequantize_rows(*quantize(x), torch.float32), x.float())


def test_the_cases_hold_what_they_promise():
    inputs = {str(case): [make_inputs(case, rank) for rank in range(2)] for case in CASES}
    replicas = [{0, 14}, {1, 15}]  # experts 0 and 1 have slots on both ranks
    for both in inputs.values():
        for rank, one in enumerate(both):
            real = one.topk_slots >= 0
            assert torch.equal(real, one.topk_idx >= 0)
            assert torch.equal(real, ~one.topk_weights.isnan())
            for expert, slots in enumerate(replicas):
                used = set(one.topk_slots[one.topk_idx == expert].tolist())
                assert used <= {s for s in slots if s // NUM_SLOTS == rank}
    assert any((one.topk_slots == 14).any() for both in inputs.values() for one in both)
    assert all((one.topk_slots < 8).sum() == 0 for one in (inputs["last_rank-40-11-pad0"][1],))
    assert (inputs["holes-31-17-pad3"][0].topk_slots == -1).any()
    assert [len(one.x) for one in inputs["skewed-0-33-pad0"]] == [0, 33]


def _fail_on_rank_1(info: RankInfo) -> str:
    ranks = Ranks(info.rank, info.num_ranks, torch.device(CPU), info.group)
    assert ranks.gather(info.rank) == [0, 1]
    assert ranks.together(lambda: "fine") == "fine"

    def work() -> None:
        assert info.rank == 0, "only this one fails"

    with pytest.raises(AssertionError, match=r"\[rank 1\](.|\n)*only this one fails"):
        ranks.together(work)
    return "noticed"


def test_a_failure_on_one_rank_is_one_on_all(rank_pool: RankPool):
    assert rank_pool.run(_fail_on_rank_1, 2) == ["noticed", "noticed"]


def test_why_there_are_no_ranks():
    started = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert ranks_problem(started, 2) is None
    assert "run torchrun --nproc-per-node 2 -m pytest tests/gpu" in str(ranks_problem({}, 8))
    assert "torch sees 1" in str(ranks_problem(started, 1))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        assert "2 ranks on one machine" in str(ranks_problem({**started, name: "4"}, 8))


SMALL = Sizes(hidden=256, intermediate=128, num_experts=32, num_topk=4, rank=512, rope=64)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@NO_GPU
@pytest.mark.parametrize("backend", ["triton", "deep_gemm", "deep_gemm_sm100"])
def test_the_checks_of_experts_pass_without_a_gpu(backend: str):
    major = 10 if backend == "deep_gemm_sm100" else 9
    with emulated_kernels(major=major):
        check_experts(backend.removesuffix("_sm100"), torch.device(CPU), SMALL, [3, 0, 17])
        if backend != "triton":
            check_linear(torch.device(CPU), 5, 136, 256)
            case = grouped_gemm_case([3, 0, 17], 128, 256, torch.device(CPU), is_masked=True)
            check_case(case, "deep_gemm", torch.device(CPU))


@NO_GPU
@pytest.mark.parametrize("way", ["triton", "torch"])
def test_the_checks_of_prefills_pass_without_a_gpu(way: str):
    case = mla_prefill_case([(100, 30), (0, 5)], 2, SMALL, torch.device(CPU))
    check_case(case, way, torch.device(CPU))


@NO_GPU
@pytest.mark.parametrize("backend", ["triton", "flash_mla"])
def test_the_checks_of_decodes_pass_without_a_gpu(backend: str):
    with emulated_kernels():
        case = mla_decode_case([1, 65], 2, SMALL, torch.device(CPU))
        check_case(case, backend, torch.device(CPU))
        check_ragged_queries(backend, torch.device(CPU), ragged_query_spec(2))
