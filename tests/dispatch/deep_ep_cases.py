"""Cases for the DeepEP adapters on the stand-in, and what both of them are held against.

Wider rows and whole blocks, no slot twice in a token. Rows of a slot arrive in any order, so they
are compared sorted; weights are applied where the backend says, so results are compared by row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from moe_ep.dispatch import Dispatcher, DispatchSpec, Mode
from moe_ep.dispatch import create_dispatcher as create
from moe_ep.fp8 import FP8, ScaleFormat, quantize_rows
from tests.compare import assert_rows_close
from tests.dispatch.cases import (
    BF16,
    Case,
    Quantizer,
    arguments,
    expected_output,
    inputs_of,
    run_experts,
    slot_rows,
)
from tests.emulators.deep_ep.low_latency import as_ue8m0, quantize_in_kernel
from tests.emulators.install import emulated
from tests.ranks import RankInfo

BACKENDS = ["deepep", "deepep_v2"]
HIDDEN = 2048  # the smallest with low-latency kernels
ALIGNMENT = 128
# Roundings to bfloat16 on the way: the expert, its weighting in V2, the sum of a rank, of all.
RTOL = 2**-6


@dataclass(frozen=True)
class Result:
    """slots: the rows that each slot of the rank received, each with its scales, as bytes."""

    out: torch.Tensor
    slots: list[torch.Tensor]
    counts: list[int]
    rows_shape: tuple[int, ...]
    has_row_weights: bool


def case(routing: str, num_tokens: tuple[int, ...], **changes: Any) -> Case:
    base = Case(
        routing, num_tokens, FP8, BF16, 0, HIDDEN, num_topk=3, num_slots_per_rank=4, row_alignment=8
    )
    return replace(base, **changes)


def cases(num_ranks: int, payload_dtype: torch.dtype) -> list[Case]:
    """Skewed and ragged, empty ranks, padding, holes, one slot that takes everything."""
    empty = (0,) * num_ranks
    base = case("skewed", (7, 3, 12, 1)[:num_ranks], payload_dtype=payload_dtype)
    return [
        base,
        replace(base, routing="uniform", num_padding=3, row_alignment=ALIGNMENT),
        replace(base, routing="holes", num_padding=2),
        replace(base, routing="one slot", num_topk=1),
        replace(base, routing="own rank"),
        replace(base, routing="nothing"),
        replace(base, num_tokens=(5, *empty[1:])),
        replace(base, num_tokens=(*empty[1:], 5), num_padding=1),
        replace(base, num_tokens=empty),
        replace(base, num_tokens=empty, num_padding=4),
    ]


def quantizer_of(backend: str, mode: Mode, *, use_ue8m0: bool = False) -> Quantizer:
    """Low-latency kernels of V1 quantise by themselves; elsewhere the adapter does it before."""
    if backend == "deepep" and mode is Mode.LOW_LATENCY:
        return partial(quantize_in_kernel, round_scale=use_ue8m0)
    return partial(quantize_rows, use_ue8m0=use_ue8m0)


def run_case(dispatcher: Dispatcher, case: Case, rank: int, mode: Mode) -> Result:
    dispatched = dispatcher.dispatch(**arguments(case, rank, mode)).wait()
    flat = dispatched.rows.flatten(0, -2).view(torch.uint8)
    if dispatched.scales is not None:
        column_major = dispatched.scales.flatten(0, -2)
        scales = torch.empty(column_major.shape, dtype=column_major.dtype).copy_(column_major)
        flat = torch.cat([flat, scales.view(torch.uint8)], dim=1)
    slots = [flat[rows.start : rows.stop].clone() for rows in slot_rows(dispatched)]
    counts = dispatched.layout.counts.tolist()
    y = run_experts(case, rank, dispatched)
    out = dispatcher.combine(y=y, dispatched=dispatched).wait().clone()
    weighted = dispatched.row_weights is not None
    return Result(out, slots, counts, tuple(dispatched.rows.shape), weighted)


def on_stand_in(
    info: RankInfo, backend: str, spec: DispatchSpec, work: Callable[[Dispatcher], Any]
) -> Any:
    """Run ``work`` with a dispatcher of the backend over the stand-in, in a rank process."""
    with emulated("deep_ep"):
        dispatcher = create(backend, spec, info.group)
        result = work(dispatcher)
        dispatcher.destroy()
    return result


def run_cases(info: RankInfo, backend: str, todo: list[Case]) -> list[dict[Mode, Result]]:
    def run_modes(dispatcher: Dispatcher, one: Case) -> dict[Mode, Result]:
        return {mode: run_case(dispatcher, one, info.rank, mode) for mode in Mode}

    return [on_stand_in(info, backend, one.spec, partial(run_modes, one=one)) for one in todo]


def check(case: Case, rank: int, result: Result, quantize: Quantizer) -> None:
    expected = expected_slots(case, rank, quantize)
    assert result.counts == [len(rows) for rows in expected]
    for rows, expected_rows in zip(result.slots, expected, strict=True):
        assert sorted(map(bytes, rows.numpy())) == expected_rows
    assert_rows_close(result.out, expected_output(case, rank, quantize), rtol=RTOL, atol=0.0)


def expected_slots(case: Case, rank: int, quantize: Quantizer) -> list[list[bytes]]:
    """The rows, with scales, that each slot of the rank receives, as sorted bytes."""
    slots: list[list[bytes]] = [[] for _ in range(case.num_slots_per_rank)]
    for source in range(case.num_ranks):
        inputs = inputs_of(case, source)
        payload = _payload(case, inputs.x, quantize).numpy()
        for token, chosen in enumerate(inputs.topk_slots.tolist()):
            for slot in chosen:
                if slot >= 0 and slot // case.num_slots_per_rank == rank:
                    slots[slot % case.num_slots_per_rank].append(bytes(payload[token]))
    return [sorted(rows) for rows in slots]


def _payload(case: Case, x: torch.Tensor, quantize: Quantizer) -> torch.Tensor:
    if case.payload_dtype != FP8:
        return x.to(case.payload_dtype).view(torch.uint8)
    rows, scales = quantize(x)
    if case.scale_format is ScaleFormat.UE8M0:
        scales = as_ue8m0(scales)
    return torch.cat([rows.view(torch.uint8), scales.view(torch.uint8)], dim=1)


def is_masked(result: Result) -> bool:
    return len(result.rows_shape) == 3
