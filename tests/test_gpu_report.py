"""The GPU report without a GPU: its arithmetic by hand, every case at small sizes under the
interpreter and over the stand-ins, and the table and the JSON of made-up samples."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from rich.console import Console

from attention import AttentionSpec
from bench import gpu_report
from bench.gpu import clock, costs, decode, experts, parity, prefill, routing
from bench.gpu.case import KernelCase, Sizes
from bench.gpu.costs import Ceilings, Cost
from bench.measure import Samples
from tests.emulators.device import emulated_kernels
from tests.kernels.cases import DEVICE

SMALL = Sizes(
    hidden=256, intermediate=128, num_experts=32, num_topk=4, rank=32, nope=32, rope=16, value=48
)
# 1 byte/s, 2 FLOP/s in BF16, 4 in FP8
UNIT = Ceilings(1.0, 2.0, 4.0, 0.0)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def small_cases() -> list[KernelCase]:
    counts = [3, 0, 17, 1]
    return [
        experts.quantize_case(9, SMALL, DEVICE),
        experts.swiglu_case(counts, SMALL, DEVICE, is_masked=True),
        experts.swiglu_case(counts, SMALL, DEVICE, is_masked=False),
        experts.grouped_gemm_case(counts, 256, 384, DEVICE, is_masked=True),
        experts.grouped_gemm_case(counts, 256, 384, DEVICE, is_masked=False),
        decode.mla_decode_case([70, 64, 1], 4, SMALL, DEVICE),
        decode.write_latent_case(7, SMALL, DEVICE),
        prefill.mla_prefill_case([(70, 5), (0, 3)], 2, SMALL, DEVICE),
        routing.route_case(40, SMALL, DEVICE),
        routing.map_to_slots_case(40, SMALL, DEVICE),
        *routing.permute_cases(11, 6, SMALL, DEVICE),
    ]


def once(call) -> Samples:
    """A clock that always shows the same."""
    call()
    return Samples((2e-6, 1e-6, 3e-6))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_costs_by_hand():
    assert costs.quantize_cost(2, 256) == Cost(2 * (512 + 256 + 8))
    assert costs.swiglu_cost(3, 128) == Cost(3 * (512 + 128 + 4))
    # Two slots of three are used: 2 weights of 256 x 384 with 2 x 3 scales, and 5 rows.
    rows = 5 * (384 + 12 + 512)
    flops = 2 * 5 * 256 * 384
    assert costs.grouped_gemm_cost([4, 0, 1], 256, 384) == Cost(
        2 * (98304 + 24) + rows, flops, "fp8"
    )
    # 5 latents of 12 values; per request and head 12 values in and 8 out, multiplied with 20.
    assert costs.mla_decode_cost([2, 3], 4, 8, 4) == Cost(
        2 * (5 * 12 + 2 * 4 * 20), 2 * 4 * 5 * 20, "bfloat16"
    )
    # Requests of 2 + 1 and 0 + 2 tokens: 5 latents of 12 values, weights of 2 heads of 3 + 5 rows
    # of 8; 3 queries of 2 heads of 3 + 4 and 5 values, and 3 + 1 + 2 pairs, of as many products.
    spec = AttentionSpec(2, 8, 3, 4, 5, 1.0, torch.bfloat16)
    assert costs.mla_prefill_cost([(2, 1), (0, 2)], spec) == Cost(
        2 * (5 * 12 + 16 * 8 + 3 * 24), 2 * (5 * 16 * 8 + 6 * 24), "bfloat16"
    )
    assert costs.route_cost(3, 16, 2) == Cost(4 * 16 * 4 + 3 * 2 * 12)
    assert costs.map_to_slots_cost(3, 2, 16) == Cost(6 * 16 + 16 * 24)
    assert costs.place_cost(3, 2, 5) == Cost(6 * 12 + 20)
    assert costs.permute_cost(3, 2, 64) == Cost(9 * 64 + 24)
    assert costs.unpermute_cost(3, 2, 64) == Cost(9 * 128 + 48)
    assert costs.write_latent_cost(3, 8, 4) == Cost(3 * 72 + 3 * (16 + 8) + 16)


def test_the_higher_floor_is_the_limit():
    assert UNIT.floor(Cost(10)) == (10.0, "copy")
    assert UNIT.floor(Cost(10, 30, "bfloat16")) == (15.0, "matrix")
    assert UNIT.floor(Cost(10, 30, "fp8")) == (10.0, "copy")


def test_costs_of_the_cases_are_those_of_their_shapes():
    """DeepSeek-V3's sizes, where a slip of a factor would be the easiest to make."""
    gate_up = costs.grouped_gemm_cost([8] * 32, 4096, 7168)
    assert gate_up.num_bytes == pytest.approx(32 * 4096 * 7168, rel=0.02)  # weights, nearly all
    hopper = Ceilings(4e12, 8e14, 1.6e15, 0.0)
    assert hopper.floor(gate_up)[1] == "copy"
    assert hopper.floor(costs.grouped_gemm_cost([1024] * 32, 4096, 7168))[1] == "matrix"
    long = costs.mla_decode_cost([16384] * 128, 16, 512, 64)
    assert long.num_bytes == pytest.approx(128 * 16384 * 1152, rel=0.01)
    assert long.num_flops / long.num_bytes == pytest.approx(16 * 1088 / 576, rel=0.01)


def test_every_case_agrees_with_its_reference():
    for case in small_cases():
        for backend, call in case.calls.items():
            case.check(call())
            assert backend in ("triton", "torch")
        assert case.cost.num_bytes > 0


@NO_GPU
def test_the_libraries_take_part_where_they_are_installed():
    full = replace(SMALL, rank=512, rope=64)
    with emulated_kernels():
        cases = [
            experts.grouped_gemm_case([3, 0, 17, 1], 256, 384, DEVICE, is_masked=True),
            experts.grouped_gemm_case([3, 0, 17, 1], 256, 384, DEVICE, is_masked=False),
            decode.mla_decode_case([70, 64, 1], 4, full, DEVICE),
        ]
        for case, library in zip(cases, ("deep_gemm", "deep_gemm", "flash_mla"), strict=True):
            assert case.baseline == library
            rows = gpu_report.measure_case(case, once)
            assert [(row.backend, row.problem, row.ratio) for row in rows] == [
                ("triton", None, 1.0),
                (library, None, 1.0),
            ]


def _broken(got: Any, change: Callable[[torch.Tensor], object]) -> Any:
    """The result with the first row of its first part changed."""
    if isinstance(got, torch.Tensor):
        wrong = got.clone() if got.dtype.itemsize > 1 else got.view(torch.uint8).clone()
        change(wrong.flatten(0, -2)[0])
        return wrong.view(got.dtype)
    if hasattr(got, "positions"):
        return replace(got, positions=_broken(got.positions, change))
    first, *others = got
    return (_broken(first, change), *others)


def test_a_wrong_row_is_noticed_in_every_case():
    for case in small_cases():
        got = case.calls["triton"]()
        with pytest.raises(AssertionError):
            case.check(_broken(got, lambda row: row.copy_(row.flip(0) + 1)))


def test_nan_never_agrees():
    x = torch.randn(4, 32)
    wrong = x.clone()
    wrong[2, 3] = torch.nan
    parity.assert_rows_agree(x, x, 1e-9)
    parity.assert_rows_agree(torch.zeros(2, 8), torch.zeros(2, 8), 1e-9)
    with pytest.raises(AssertionError, match=r"1 of 4 rows .* first row \[2\] by nan"):
        parity.assert_rows_agree(wrong, x, 1e9)
    with pytest.raises(AssertionError, match="values differ"):
        parity.assert_decoded(wrong, x)


def test_failures_are_rows_and_the_others_are_measured():
    def wrong() -> None:
        raise RuntimeError("no kernel image")

    def check(got: int) -> None:
        assert got == 1, "differs"

    calls = {"right": lambda: 1, "wrong": lambda: 2, "failing": wrong, "library": lambda: 1}
    case = KernelCase("k", {"rows": 2}, Cost(10), calls, check, "library")
    rows = {row.backend: row for row in gpu_report.measure_case(case, once)}
    assert rows["right"].ratio == rows["library"].ratio == 1.0
    assert rows["wrong"].samples is None
    assert str(rows["wrong"].problem).startswith("AssertionError: differs")
    assert rows["failing"].problem == "RuntimeError: no kernel image"
    assert rows["failing"].ratio is None


def test_table_and_json():
    cost = Cost(3_000_000, 12_000_000, "fp8")
    ceilings = Ceilings(6e12, 1e15, 2e15, 1e-6)
    rows = [
        gpu_report.Row("gemm", "triton", {"rows": 8}, cost, Samples((2e-6, 1e-6, 3e-6)), ratio=0.5),
        gpu_report.Row("gemm", "deep_gemm", {"rows": 8}, cost, problem="RuntimeError: x"),
    ]
    console = Console(width=160, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(gpu_report.table_of(rows, ceilings))
    line = next(line for line in capture.get().splitlines() if "triton" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        *("gemm", "rows=8", "triton", "2.0", "1.5-2.5", "1500", "6.0", "25%", "copy", "0.50")
    ]
    assert "RuntimeError: x" in capture.get()
    report = json.loads(json.dumps(gpu_report.report_of(rows, ceilings, {"device": "card"})))
    assert report["bench"] == "gpu_report"
    assert report["ceilings"]["copy_bytes_per_s"] == 6e12
    good, bad = report["rows"]
    assert good["samples"]["seconds"] == [2e-6, 1e-6, 3e-6]
    assert good["share_of_ceiling"] == 0.25
    assert (good["bytes_per_s"], good["limit"]) == (1.5e12, "copy")
    assert bad["samples"] is None
    assert set(bad) <= set(good)


def test_ceilings_come_from_the_fastest_sample():
    ceilings = clock.measure_ceilings(
        once, torch.device("cpu"), copy_bytes=1 << 10, matrix_size=128
    )
    assert ceilings.copy_bytes_per_s == pytest.approx(2 * 1024 / 1e-6)
    assert ceilings.bfloat16_flops_per_s == pytest.approx(2 * 128**3 / 1e-6)
    assert ceilings.empty_call == 2e-6


def test_every_group_of_the_report_makes_cases(monkeypatch):
    """The shapes it asks for, without making their tensors."""
    asked: list[tuple] = []

    def note(name: str, *args: object, **options: object) -> list[str]:
        asked.append((name, *args))
        return [name]

    for module, name in (
        (experts, "quantize_case"),
        (experts, "swiglu_case"),
        (experts, "grouped_gemm_case"),
        (decode, "mla_decode_case"),
        (decode, "write_latent_case"),
        (prefill, "mla_prefill_case"),
        (routing, "route_case"),
        (routing, "map_to_slots_case"),
        (routing, "permute_cases"),
    ):
        monkeypatch.setattr(module, name, partial(note, name))
    for group in gpu_report.makers(torch.device("cpu")).values():
        assert list(group())
    products = [args for name, *args in asked if name == "grouped_gemm_case"]
    assert {(len(counts), counts[0]) for counts, *_ in products} >= {
        (slots, rows) for slots in (8, 16, 32) for rows in (8, 256)
    }
    assert {(n, k) for _, n, k, _ in products} == {(4096, 7168), (7168, 2048)}
    decodes = [(len(a[0]), a[0][0], a[1]) for name, *a in asked if name == "mla_decode_case"]
    assert (1, 1024, 16) in decodes
    assert (128, 16384, 128) in decodes


@NO_GPU
def test_without_a_gpu_it_says_so_and_exits_with_2(capsys):
    assert gpu_report.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "bench.gpu_report needs a GPU: no CUDA device is visible to torch\n"


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield
