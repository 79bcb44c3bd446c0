"""Permute and unpermute against the numpy layout code of the dispatchers and plain loops."""

import numpy as np
import pytest
import torch

from moe_ep import fp8
from moe_ep.dispatch import ContiguousLayout, DispatchSpec, MaskedLayout, Mode
from moe_ep.dispatch.layout import Entries, place
from moe_ep.kernels import permute as kernels
from tests.compare import assert_bits_equal, assert_rows_close
from tests.kernels.cases import DEVICE, NAN, randn

SLOTS, TOKENS, TOPK, CAPACITY = 5, 40, 3, 48


def make_slots(num_tokens: int = TOKENS) -> torch.Tensor:
    """Skewed: slot 3 gets nothing; some tokens go nowhere, some name a slot twice."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.randint(-2, SLOTS, (num_tokens, TOPK), generator=generator).clamp_(min=-1)
    slots[slots == 3] = 0
    slots[::7] = -1
    return slots


def expected(slots: torch.Tensor, mode: Mode, alignment: int):
    """Positions ``[T, K]``, counts and first rows, from the code that the CPU backends use."""
    spec = DispatchSpec(
        hidden=1,
        num_topk=TOPK,
        num_ranks=1,
        num_slots_per_rank=SLOTS,
        max_tokens_per_rank=TOKENS,
        capacity=CAPACITY,
        payload_dtype=torch.float32,
        out_dtype=torch.float32,
        row_alignment=alignment,
    )
    flat = slots.numpy().reshape(-1)
    chosen = np.flatnonzero(flat >= 0)
    rows = chosen // TOPK
    places = place(Entries(rows, flat[chosen], np.ones(len(chosen), np.float32)), spec, mode)
    positions = np.full(slots.numel(), -1)
    positions[chosen] = places.positions
    return torch.from_numpy(positions).view(slots.shape), places


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("block_tokens", [16, 256])
def test_contiguous_places(monkeypatch, alignment, block_tokens):
    monkeypatch.setattr(kernels, "BLOCK_TOKENS", block_tokens)
    slots = make_slots()
    got = kernels.place_contiguous(slots.to(DEVICE), num_slots=SLOTS, alignment=alignment)
    positions, want = expected(slots, Mode.NORMAL, alignment)
    assert torch.equal(got.positions.cpu().long(), positions)
    assert isinstance(got.layout, ContiguousLayout)
    assert got.layout.psum.tolist() == (want.starts + want.counts).tolist()
    assert got.layout.counts.tolist() == want.counts.tolist()
    assert want.num_rows <= got.num_rows <= TOKENS * TOPK + SLOTS * alignment


def test_masked_places():
    slots = make_slots()
    got = kernels.place_masked(slots.to(DEVICE), num_slots=SLOTS, capacity=CAPACITY)
    positions, want = expected(slots, Mode.LOW_LATENCY, 1)
    assert torch.equal(got.positions.cpu().long(), positions)
    assert isinstance(got.layout, MaskedLayout)
    assert got.layout.counts.tolist() == want.counts.tolist()
    with pytest.raises(ValueError, match="40 tokens given, capacity 39"):
        kernels.place_masked(slots.to(DEVICE), num_slots=SLOTS, capacity=39)


@pytest.mark.parametrize("alignment", [1, 128])
def test_the_worst_routing_fits(alignment):
    """Every slot one row over a multiple of the alignment."""
    tokens = alignment + 1 if alignment > 1 else 3
    slots = torch.arange(2).repeat(tokens, 1)
    got = kernels.place_contiguous(slots.to(DEVICE), num_slots=2, alignment=alignment)
    last = int(got.layout.psum[-1])
    assert -(-last // alignment) * alignment <= got.num_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, fp8.FP8, torch.float32])
@pytest.mark.parametrize("is_masked", [True, False])
def test_rows_arrive_where_they_should(dtype, is_masked):
    slots = make_slots()
    x = randn(TOKENS, 1030)
    x[slots.amax(dim=1) < 0] = NAN
    x = x.to(dtype)
    if is_masked:
        places = kernels.place_masked(slots.to(DEVICE), num_slots=SLOTS, capacity=CAPACITY)
    else:
        places = kernels.place_contiguous(slots.to(DEVICE), num_slots=SLOTS, alignment=8)
    rows = kernels.permute(x.to(DEVICE), places).cpu()
    assert rows.shape[:-1] == ((SLOTS, CAPACITY) if is_masked else (places.num_rows,))
    positions = places.positions.cpu()
    flat = rows.flatten(0, -2).view(torch.uint8)
    for token, k in (slots >= 0).nonzero().tolist():
        assert torch.equal(flat[positions[token, k]], x[token].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_outputs_come_back_in_the_order_of_k(dtype, is_weighted):
    """To the bit against float32 sums in that order, one multiplication and one addition each; on a
    GPU the two may be fused into one rounding, so to a few last places there."""
    slots = make_slots()
    weights = randn(TOKENS, TOPK, seed=1).masked_fill(slots < 0, NAN)
    places = kernels.place_contiguous(slots.to(DEVICE), num_slots=SLOTS, alignment=8)
    y = torch.full((places.num_rows, 70), NAN)
    positions = places.positions.cpu()
    real = positions[positions >= 0].unique().long()
    y[real] = randn(len(real), 70, seed=2)
    y = y.to(dtype)
    given = weights.to(DEVICE) if is_weighted else None
    got = kernels.unpermute(y.to(DEVICE), places, given).cpu()
    want = torch.zeros(TOKENS, 70)
    for token, k in (slots >= 0).nonzero().tolist():
        row = y[positions[token, k]].float()
        want[token] += weights[token, k] * row if is_weighted else row
    if DEVICE.type == "cpu":
        assert_bits_equal(got, want.to(dtype))
    assert_rows_close(got, want.to(dtype), rtol=2**-7 if dtype is torch.bfloat16 else 1e-6)


def test_there_and_back_is_the_number_of_slots_times_the_row():
    slots = torch.tensor([[0, 1], [4, -1], [-1, -1], [2, 2]])
    x = randn(4, 32)
    places = kernels.place_masked(slots.to(DEVICE), num_slots=SLOTS, capacity=4)
    back = kernels.unpermute(kernels.permute(x.to(DEVICE), places), places, None).cpu()
    assert_rows_close(back, x * torch.tensor([2.0, 1.0, 0.0, 2.0])[:, None])


def test_no_tokens():
    slots = torch.empty(0, TOPK, dtype=torch.int64, device=DEVICE)
    for places in (
        kernels.place_contiguous(slots, num_slots=SLOTS, alignment=16),
        kernels.place_masked(slots, num_slots=SLOTS, capacity=2),
    ):
        assert places.layout.counts.tolist() == [0] * SLOTS
        rows = kernels.permute(torch.empty(0, 32, device=DEVICE), places)
        assert kernels.unpermute(rows, places, None).shape == (0, 32)
