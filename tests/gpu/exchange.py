"""One exchange between ranks, and what must come of it, computed in plain torch from the inputs of
all ranks. Runs on any device; ``tests/test_gpu_rehearsal.py`` runs it on CPUs.

Values are such that 1x128 quantisation keeps them exactly, whatever formula a library has for its
scales, and gate weights are powers of two, so that weighting is exact and a fused multiply-add is
none. What is left to round are the experts and the sums, in an order that most backends fix.
"""

import zlib
from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from eplb.placement import Placement
from moe_ep.dispatch import Dispatched, Dispatcher, DispatchSpec, Mode
from moe_ep.fp8 import BLOCK, FP8, FP8_MAX
from tests.compare import assert_bits_equal, assert_rows_close
from tests.dispatch.cases import expert, row_values, slot_rows
from tests.gpu.machine import NUM_RANKS

BF16, NAN = torch.bfloat16, float("nan")
HIDDEN = 2048  # the smallest that DeepEP V1 has low-latency kernels for
NUM_EXPERTS, NUM_REDUNDANT, NUM_TOPK = 14, 2, 4
CAPACITY = 64
RTOL = 2**-7  # of the largest value of a block: sums that are rounded once instead of per rank
POISON_BYTES = 8 << 20

# Experts 0 and 1 have a replica on each rank.
PLACEMENT = Placement.trivial(
    num_layers=1, num_experts=NUM_EXPERTS, num_ranks=NUM_RANKS, num_redundant=NUM_REDUNDANT
)
NUM_SLOTS = PLACEMENT.num_slots_per_rank  # of a rank


@dataclass(frozen=True)
class Case:
    """num_tokens: of each rank. routing: see ``_choose``. num_padding: rows of NaN after them."""

    routing: str
    num_tokens: tuple[int, int]
    num_padding: int = 0

    def __str__(self) -> str:
        sizes = "-".join(map(str, self.num_tokens))
        return f"{self.routing}-{sizes}-pad{self.num_padding}".replace(" ", "_")


CASES = (
    Case("uniform", (57, 20), num_padding=7),  # at capacity
    Case("skewed", (64, 9)),
    Case("holes", (31, 17), num_padding=3),
    Case("one expert", (40, 11)),
    Case("last rank", (40, 11)),
    Case("skewed", (0, 33)),
    Case("uniform", (12, 0), num_padding=5),
    Case("nothing", (8, 8)),
    Case("uniform", (0, 0)),
)


@dataclass(frozen=True)
class Inputs:
    """Of one rank. topk_idx: logical experts ``[T, K]``, from which topk_slots follow."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_slots: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True)
class Outcome:
    """slots: the restored rows that each slot of the rank received, ``[n, H]`` float32."""

    out: torch.Tensor
    slots: list[torch.Tensor]


def make_spec(payload_dtype: torch.dtype) -> DispatchSpec:
    return DispatchSpec(
        hidden=HIDDEN,
        num_topk=NUM_TOPK,
        num_ranks=NUM_RANKS,
        num_slots_per_rank=NUM_SLOTS,
        max_tokens_per_rank=CAPACITY,
        capacity=CAPACITY,
        payload_dtype=payload_dtype,
        out_dtype=BF16,
        row_alignment=128,
    )


def make_inputs(case: Case, rank: int) -> Inputs:
    """On the CPU. Padding is NaN with choice -1; so are weights of choice -1."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case} {rank}".encode()))
    num = case.num_tokens[rank]
    topk_idx = _choose(case.routing, num, generator)
    topk_slots = PLACEMENT.slot_table(rank)[0][topk_idx].masked_fill(topk_idx < 0, -1)
    weights = torch.exp2(torch.randint(-5, 1, (num, NUM_TOPK), generator=generator).float())
    pad = (0, 0, 0, case.num_padding)
    return Inputs(
        F.pad(_lossless_rows(num, generator), pad, value=NAN),
        F.pad(topk_idx, pad, value=-1),
        F.pad(topk_slots, pad, value=-1),
        F.pad(weights.masked_fill(topk_idx < 0, NAN), pad, value=NAN),
    )


def exchange(dispatcher: Dispatcher, case: Case, rank: int, mode: Mode, device: str) -> Outcome:
    """Dispatch, experts and combine, over memory that holds NaN where nothing was written."""
    inputs = make_inputs(case, rank)
    _poison(device)
    dispatched = dispatcher.dispatch(**arguments(inputs, mode, device)).wait()
    values = row_values(dispatched)
    slots = [values[rows.start : rows.stop].cpu() for rows in slot_rows(dispatched)]
    y = outputs(dispatched, rank)
    out = dispatcher.combine(y=y, dispatched=dispatched).wait()
    return Outcome(out.clone().cpu(), slots)


def exchange_two(
    dispatcher: Dispatcher, cases: tuple[Case, Case], rank: int, mode: Mode, device: str
) -> list[torch.Tensor]:
    """The outputs of two micro-batches, each step of one between the steps of the other."""
    going = [
        dispatcher.dispatch(**arguments(make_inputs(case, rank), mode, device)) for case in cases
    ]
    coming = []
    for pending in going:
        dispatched = pending.wait()
        coming.append(dispatcher.combine(y=outputs(dispatched, rank), dispatched=dispatched))
    return [pending.wait().clone().cpu() for pending in coming]


def arguments(inputs: Inputs, mode: Mode, device: str) -> dict:
    return {
        "x": inputs.x.to(device),
        "topk_slots": inputs.topk_slots.to(device),
        "topk_weights": inputs.topk_weights.to(device),
        "mode": mode,
    }


def outputs(dispatched: Dispatched, rank: int) -> torch.Tensor:
    """Every slot's expert on its rows, weighted where the backend asks for it; the rest is NaN."""
    values = row_values(dispatched)
    y = torch.full(values.shape, NAN, dtype=BF16, device=values.device)
    experts = PLACEMENT.local_experts(0, rank)
    for logical, rows in zip(experts, slot_rows(dispatched), strict=True):
        place = slice(rows.start, rows.stop)
        y[place] = expert(logical, values[place], BF16)
    if dispatched.row_weights is not None:
        y = (y.float() * dispatched.row_weights.unsqueeze(1)).to(BF16)
    return y.view(dispatched.rows.shape)


def check(outcome: Outcome, all_inputs: list[Inputs], rank: int, *, is_exact: bool) -> None:
    """is_exact: the backend's sums have the reference's order, so the bits are the same."""
    names = {
        _key(row): (source, token)
        for source, inputs in enumerate(all_inputs)
        for token, row in enumerate(inputs.x)
    }
    for slot, rows in enumerate(outcome.slots):
        got: Counter[object] = Counter(names.get(_key(row), "a row of nobody") for row in rows)
        want: Counter[object] = Counter(_senders(all_inputs, rank * NUM_SLOTS + slot))
        assert got == want, f"slot {slot}: wrong {got - want}, missing {want - got}"
    check_output(outcome.out, all_inputs[rank], is_exact=is_exact)


def check_output(out: torch.Tensor, inputs: Inputs, *, is_exact: bool) -> None:
    want = expected_output(inputs)
    if is_exact:
        assert_bits_equal(out, want)
    # Blocks differ in magnitude, so each is held to its own.
    shape = (-1, BLOCK)
    assert_rows_close(out.reshape(shape), want.reshape(shape), rtol=RTOL, atol=0.0)


def expected_output(inputs: Inputs) -> torch.Tensor:
    """BF16 ``[T, H]``: per rank its weighted experts in order of k, added in float32 and rounded;
    then the ranks in order, added in float32 and rounded."""
    total = torch.zeros(inputs.x.shape)
    for peer in range(NUM_RANKS):
        partial = torch.zeros(inputs.x.shape)
        is_peer = inputs.topk_slots.div(NUM_SLOTS, rounding_mode="floor") == peer
        for k in range(NUM_TOPK):
            for token in is_peer[:, k].nonzero().flatten().tolist():
                y = expert(int(inputs.topk_idx[token, k]), inputs.x[token].float(), BF16)
                partial[token] += inputs.topk_weights[token, k] * y.float()
        total += partial.to(BF16).float()
    return total.to(BF16)


def _senders(all_inputs: list[Inputs], slot: int) -> list[tuple[int, int]]:
    """(rank, token) of everyone who chose this slot, numbered over all ranks."""
    return [
        (source, token)
        for source, inputs in enumerate(all_inputs)
        for token in (inputs.topk_slots == slot).any(1).nonzero().flatten().tolist()
    ]


def _choose(routing: str, num: int, generator: torch.Generator) -> torch.Tensor:
    """Logical experts int64 ``[T, K]``, none twice in a row; -1 for none."""
    even = torch.rand(num, NUM_EXPERTS, generator=generator)
    if routing == "skewed":
        even *= torch.linspace(1, 4, NUM_EXPERTS)  # the first, which have replicas, are favourites
    chosen = even.argsort(dim=1)[:, :NUM_TOPK]
    if routing == "holes":
        chosen[torch.rand(chosen.shape, generator=generator) < 0.4] = -1
    elif routing == "one expert":
        chosen[:] = torch.tensor([NUM_EXPERTS - 1, -1, -1, -1])
    elif routing == "last rank":
        chosen = NUM_EXPERTS - 1 - even[:, : NUM_SLOTS - NUM_REDUNDANT].argsort(dim=1)[:, :NUM_TOPK]
    elif routing == "nothing":
        chosen[:] = -1
    return chosen


def _lossless_rows(num: int, generator: torch.Generator) -> torch.Tensor:
    """BF16 ``[num, H]``: e4m3 values times a power of two per block, whose scale that then is,
    because every block holds the largest e4m3 value."""
    shape = (num, HIDDEN // BLOCK, BLOCK)
    codes = (100 * torch.randn(shape, generator=generator)).clamp_(-FP8_MAX, FP8_MAX)
    codes[..., 0] = FP8_MAX
    power = torch.randint(-12, -4, (*shape[:2], 1), generator=generator)
    return (codes.to(FP8).float() * torch.exp2(power.float())).flatten(1).to(BF16)


def _poison(device: str) -> None:
    """Leave NaN in the memory that the next tensors get."""
    torch.full((POISON_BYTES // 4,), NAN, device=device)


def _key(row: torch.Tensor) -> bytes:
    return bytes(row.float().contiguous().view(torch.uint8).numpy())
