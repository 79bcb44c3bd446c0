"""Cases for dispatch and combine, and a plain reference: loops over tokens, no exchange.

Every input is a function of the case and the rank, so anyone can recompute what a peer sent.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_ep.dispatch import Dispatched, Dispatcher, DispatchSpec, MaskedLayout, Mode, Pending
from moe_ep.fp8 import FP8, ScaleFormat, dequantize_rows, quantize_rows
from tests.compare import assert_bits_equal, assert_rows_close
from tests.emulators.deep_gemm.layout import unpack

BF16, F32 = torch.bfloat16, torch.float32
# Of rows on the way, and of the results.
DTYPES = [(FP8, BF16), (BF16, BF16), (F32, F32)]
# Beyond the reference's own order of sums only a fused multiply-add may differ: one rounding of
# the out dtype per rank.
RTOL = {BF16: 2**-7, F32: 2**-21}


@dataclass(frozen=True)
class Case:
    """num_tokens: tokens of each rank. routing: see ``_slots``. num_padding: rows of NaN after the
    tokens, on every rank."""

    routing: str
    num_tokens: tuple[int, ...]
    payload_dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.float32
    num_padding: int = 0
    hidden: int = 136  # two scale blocks, the second one short
    num_topk: int = 3
    num_slots_per_rank: int = 4
    row_alignment: int = 1
    scale_format: ScaleFormat = ScaleFormat.FLOAT32

    @property
    def num_ranks(self) -> int:
        return len(self.num_tokens)

    @property
    def spec(self) -> DispatchSpec:
        limit = max(max(self.num_tokens) + self.num_padding, 1)  # the fullest rank is at capacity
        return DispatchSpec(
            hidden=self.hidden,
            num_topk=self.num_topk,
            num_ranks=self.num_ranks,
            num_slots_per_rank=self.num_slots_per_rank,
            max_tokens_per_rank=limit,
            capacity=limit,
            payload_dtype=self.payload_dtype,
            out_dtype=self.out_dtype,
            row_alignment=self.row_alignment,
            scale_format=self.scale_format,
        )


@dataclass(frozen=True)
class Inputs:
    x: torch.Tensor
    topk_slots: torch.Tensor
    topk_weights: torch.Tensor


def cases(num_ranks: int, payload_dtype: torch.dtype, out_dtype: torch.dtype) -> list[Case]:
    """Skewed and ragged routing, empty ranks, padding, one slot that takes everything."""
    ragged = tuple((7, 3, 12, 1)[:num_ranks])
    empty = (0,) * num_ranks
    first_only, last_only = (5, *empty[1:]), (*empty[1:], 5)
    base = Case("skewed", ragged, payload_dtype, out_dtype)
    return [
        base,
        replace(base, routing="uniform", num_padding=3, row_alignment=8),
        replace(base, routing="holes", num_padding=2),
        replace(base, routing="duplicates"),
        replace(base, routing="one slot"),
        replace(base, routing="own rank"),
        replace(base, routing="nothing"),
        replace(base, num_tokens=first_only),
        replace(base, num_tokens=last_only, num_padding=1),
        replace(base, num_tokens=empty),
        replace(base, num_tokens=empty, num_padding=4),
        replace(base, num_topk=1, num_slots_per_rank=1),
    ]


def inputs_of(case: Case, rank: int) -> Inputs:
    """The rank's tokens; padding rows have NaN values and weights, and slot -1."""
    seed = zlib.crc32(f"{case.routing} {case.num_tokens} {rank}".encode())
    generator = torch.Generator().manual_seed(seed)
    num_tokens, num_topk = case.num_tokens[rank], case.num_topk
    x = torch.randn(num_tokens, case.hidden, generator=generator)
    x *= torch.rand(num_tokens, 1, generator=generator) * 10
    weights = torch.rand(num_tokens, num_topk, generator=generator)
    slots = _slots(case, rank, generator)
    weights[slots < 0] = float("nan")
    pad = (0, 0, 0, case.num_padding)
    dtype = torch.float32 if case.payload_dtype == torch.float32 else torch.bfloat16
    return Inputs(
        torch.nn.functional.pad(x, pad, value=float("nan")).to(dtype),
        torch.nn.functional.pad(slots, pad, value=-1),
        torch.nn.functional.pad(weights, pad, value=float("nan")),
    )


def arguments(case: Case, rank: int, mode: Mode) -> dict[str, Any]:
    """Of the rank's ``dispatch``."""
    return {**vars(inputs_of(case, rank)), "mode": mode}


def _slots(case: Case, rank: int, generator: torch.Generator) -> torch.Tensor:
    num_slots, per_rank = case.spec.num_slots, case.num_slots_per_rank
    shape = (case.num_tokens[rank], case.num_topk)
    even = torch.rand(shape[0], num_slots, generator=generator)
    if case.routing == "one slot":
        return torch.full(shape, num_slots - 1)
    if case.routing == "nothing":
        return torch.full(shape, -1)
    if case.routing == "duplicates":
        return torch.randint(num_slots, (shape[0], 1), generator=generator).expand(shape).clone()
    if case.routing == "own rank":
        return even[:, :per_rank].argsort(dim=1)[:, : shape[1]] + rank * per_rank
    if case.routing == "skewed":
        even *= torch.linspace(1, 4, num_slots)  # the first slots are the favourites
    slots = even.argsort(dim=1)[:, : shape[1]]
    if case.routing == "holes":
        slots[torch.rand(shape, generator=generator) < 0.4] = -1
    return slots


Quantizer = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def payload_of(
    case: Case, x: torch.Tensor, quantize: Quantizer = quantize_rows
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows as they travel, and their values after the way, float32."""
    if case.payload_dtype == FP8:
        q, scales = quantize(x)
        return q, dequantize_rows(q, scales, torch.float32)
    rows = x.to(case.payload_dtype)
    return rows, rows.float()


def expert(slot: int, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A stand-in for an expert: element by element, so its bits do not depend on the layout."""
    return (values * (1 + slot) + slot / 8).to(dtype)


def run_experts(case: Case, rank: int, dispatched: Dispatched) -> torch.Tensor:
    """Apply ``expert`` to the rows that the layout covers, and row weights if there are any; the
    rest of the output is NaN."""
    y = torch.full(dispatched.rows.shape, float("nan"), dtype=case.out_dtype)
    for slot, rows in enumerate(slot_rows(dispatched)):
        values = row_values(dispatched)[rows]
        flat = y.view(-1, case.hidden)
        flat[rows] = expert(rank * case.num_slots_per_rank + slot, values, case.out_dtype)
    if dispatched.row_weights is None:
        return y
    assert len(dispatched.row_weights) == len(y)
    return (y.float() * dispatched.row_weights.unsqueeze(1)).to(y.dtype)


def start_combine(
    dispatcher: Dispatcher, case: Case, rank: int, pending: Pending[Dispatched]
) -> Pending[torch.Tensor]:
    """Wait for a dispatch, run the experts, start the way back."""
    dispatched = pending.wait()
    return dispatcher.combine(y=run_experts(case, rank, dispatched), dispatched=dispatched)


def run_in_turns(
    dispatcher: Dispatcher, todo: list[Case], rank: int, mode: Mode
) -> list[torch.Tensor]:
    """Micro-batches of one dispatcher, each step of one between the steps of the others."""
    going = [dispatcher.dispatch(**arguments(case, rank, mode)) for case in todo]
    coming = [
        start_combine(dispatcher, case, rank, pending)
        for case, pending in zip(todo, going, strict=True)
    ]
    return [pending.wait().clone() for pending in coming]


def row_values(dispatched: Dispatched) -> torch.Tensor:
    """Flattened float32 rows ``[M, H]``."""
    rows = dispatched.rows.flatten(0, -2)
    if dispatched.scales is None:
        return rows.float()
    scales = dispatched.scales.flatten(0, -2)
    if scales.dtype is torch.int32:
        scales = unpack(scales, -(-rows.shape[1] // 128))
    return dequantize_rows(rows, scales, torch.float32)


def slot_rows(dispatched: Dispatched) -> list[range]:
    """The rows of each slot in the flattened layout, read from the layout by hand."""
    layout = dispatched.layout
    if isinstance(layout, MaskedLayout):
        size = dispatched.rows.shape[1]
        return [range(i * size, i * size + n) for i, n in enumerate(layout.counts.tolist())]
    starts, previous = [], 0
    for end in layout.psum.tolist():
        starts.append(range(-(-previous // layout.alignment) * layout.alignment, end))
        previous = end
    return starts


def expected_rows(case: Case, rank: int) -> list[list[torch.Tensor]]:
    """What each slot of ``rank`` receives: source ranks in order, tokens in order, once each."""
    received: list[list[torch.Tensor]] = [[] for _ in range(case.num_slots_per_rank)]
    for source in range(case.num_ranks):
        inputs = inputs_of(case, source)
        rows, _ = payload_of(case, inputs.x)
        for token, slots in enumerate(inputs.topk_slots.tolist()):
            for slot in {s for s in slots if s >= 0 and s // case.num_slots_per_rank == rank}:
                received[slot % case.num_slots_per_rank].append(rows[token])
    return received


def expected_output(case: Case, rank: int, quantize: Quantizer = quantize_rows) -> torch.Tensor:
    """``[T, H]``: per token, ranks in order; per rank, its weighted experts in order of k."""
    inputs = inputs_of(case, rank)
    _, values = payload_of(case, inputs.x, quantize)
    out = torch.zeros(len(inputs.x), case.hidden)
    for token, slots in enumerate(inputs.topk_slots.tolist()):
        for peer in range(case.num_ranks):
            partial = torch.zeros(case.hidden)
            for k, slot in enumerate(slots):
                if slot >= 0 and slot // case.num_slots_per_rank == peer:
                    y = expert(slot, values[token], case.out_dtype).float()
                    partial += inputs.topk_weights[token, k] * y
            out[token] += partial.to(case.out_dtype).float()
    return out.to(case.out_dtype)


@dataclass(frozen=True)
class Result:
    """slots: the rows that each slot of the rank received."""

    out: torch.Tensor
    slots: list[torch.Tensor]
    counts: list[int]


def run_case(
    dispatcher: Dispatcher, case: Case, rank: int, mode: Mode, device: torch.device | str = "cpu"
) -> Result:
    """There and back, through experts on the CPU. device: that of the dispatcher's tensors."""
    inputs = {name: value.to(device) for name, value in vars(inputs_of(case, rank)).items()}
    dispatched = dispatcher.dispatch(**inputs, mode=mode).wait()
    here = to_cpu(dispatched)
    y = run_experts(case, rank, here).to(device)
    out = dispatcher.combine(y=y, dispatched=dispatched).wait().cpu()
    flat = here.rows.flatten(0, -2)
    slots = [flat[rows.start : rows.stop].clone() for rows in slot_rows(here)]
    return Result(out, slots, here.layout.counts.tolist())


def to_cpu(dispatched: Dispatched) -> Dispatched:
    layout = dispatched.layout
    if isinstance(layout, MaskedLayout):
        layout = MaskedLayout(layout.counts.cpu())
    else:
        layout = replace(layout, psum=layout.psum.cpu())
    scales = None if dispatched.scales is None else dispatched.scales.cpu()
    return replace(dispatched, rows=dispatched.rows.cpu(), scales=scales, layout=layout)


def check(case: Case, rank: int, results: dict[Mode, Result]) -> None:
    """Every row and sum against the plain reference, and one mode against the other."""
    received = expected_rows(case, rank)
    for result in results.values():
        assert result.counts == [len(rows) for rows in received]
        for rows, expected in zip(result.slots, received, strict=True):
            if expected:
                assert_bits_equal(rows, torch.stack(expected))
        want = expected_output(case, rank)
        assert_rows_close(result.out, want, rtol=RTOL[case.out_dtype], atol=0.0)
    assert_bits_equal(results[Mode.NORMAL].out, results[Mode.LOW_LATENCY].out)
