"""Permute and unpermute against the numpy layout code of the dispatchers and plain loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_ep import fp8
from moe_ep.dispatch import DispatchSpec, Mode
from moe_ep.dispatch.layout import Entries, place
from moe_ep.kernels import permute as kernels
from tests.compare import assert_bits_equal, assert_rows_close
from tests.kernels.cases import DEVICE, NAN, randn

SLOTS, TOKENS, TOPK = 5, 40, 3


def make_slots(num_tokens: int = TOKENS) -> torch.Tensor:
    """Skewed: slot 3 gets nothing; some tokens go nowhere, some name a slot twice."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.randint(-2, SLOTS, (num_tokens, TOPK), generator=generator).clamp_(min=-1)
    slots[slots == 3] = 0
    slots[::7] = -1
    return slots


def expected(slots: torch.Tensor, alignment: int):
    """Positions ``[T, K]``, counts and first rows, from the code that the CPU backends use."""
    spec = DispatchSpec(
        hidden=1,
        num_topk=TOPK,
        num_ranks=1,
        num_slots_per_rank=SLOTS,
        max_tokens_per_rank=TOKENS,
        capacity=TOKENS,
        payload_dtype=torch.float32,
        out_dtype=torch.float32,
        row_alignment=alignment,
    )
    flat = slots.numpy().reshape(-1)
    chosen = np.flatnonzero(flat >= 0)
    rows = chosen // TOPK
    places = place(Entries(rows, flat[chosen], np.ones(len(chosen), np.float32)), spec, Mode.NORMAL)
    positions = np.full(slots.numel(), -1)
    positions[chosen] = places.positions
    return torch.from_numpy(positions).view(slots.shape), places


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("block_tokens", [16, 256])
def test_contiguous_places(monkeypatch, alignment, block_tokens):
    monkeypatch.setattr(kernels, "BLOCK_TOKENS", block_tokens)
    slots = make_slots()
    got = kernels.place_contiguous(slots.to(DEVICE), num_slots=SLOTS, alignment=alignment)
    positions, want = expected(slots, alignment)
    assert torch.equal(got.positions.cpu().long(), positions)
    assert got.layout.psum.tolist() == (want.starts + want.counts).tolist()
    assert got.layout.counts.tolist() == want.counts.tolist()
    assert want.num_rows <= got.num_rows <= TOKENS * TOPK + SLOTS * alignment


@pytest.mark.parametrize(
    ("num_tokens", "num_topk", "num_slots", "alignment", "most"),
    [
        (3, 2, 2, 1, 6),
        (129, 2, 2, 128, 512),  # every slot one row over a multiple of the alignment
        (1, 2, 8, 16, 32),  # more slots than choices: only two can be in use
        (5, 8, 3, 4, 24),  # more choices than slots: a token has a slot once
        (0, 2, 8, 16, 0),
    ],
)
def test_the_worst_routing_fits_and_no_more(num_tokens, num_topk, num_slots, alignment, most):
    """Tokens take the slots in turn, which starts the most blocks."""
    slots = torch.full((num_tokens, num_topk), -1)
    wide = min(num_topk, num_slots)
    slots[:, :wide] = torch.arange(num_tokens * wide).view(num_tokens, wide) % num_slots
    got = kernels.place_contiguous(slots.to(DEVICE), num_slots=num_slots, alignment=alignment)
    assert got.num_rows == most
    starts = -(-got.layout.psum.cpu() // alignment) * alignment
    assert num_tokens == 0 or int(starts[-1]) == most


@pytest.mark.parametrize("dtype", [torch.bfloat16, fp8.FP8, torch.float32])
def test_rows_arrive_where_they_should(dtype):
    slots = make_slots()
    x = randn(TOKENS, 1030)
    x[slots.amax(dim=1) < 0] = NAN
    x = x.to(dtype)
    places = kernels.place_contiguous(slots.to(DEVICE), num_slots=SLOTS, alignment=8)
    rows = kernels.permute(x.to(DEVICE), places).cpu()
    assert rows.shape == (places.num_rows, 1030)
    positions = places.positions.cpu()
    flat, given = rows.view(torch.uint8), x.view(torch.uint8)
    for token, k in (slots >= 0).nonzero().tolist():
        assert torch.equal(flat[positions[token, k]], given[token])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_scales_arrive_in_columns(dtype):
    slots, scales = make_slots(), randn(TOKENS, 7).view(dtype)
    places = kernels.place_contiguous(slots.to(DEVICE), num_slots=SLOTS, alignment=1)
    places = replace(places, num_rows=places.num_rows + 1)  # not a multiple of 4
    moved = kernels.permute(scales.to(DEVICE), places, is_column_major=True)
    assert moved.stride() == (1, -(-places.num_rows // 4) * 4)
    positions = places.positions.cpu()
    for token, k in (slots >= 0).nonzero().tolist():
        assert torch.equal(moved[positions[token, k]].cpu(), scales[token])


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
    places = kernels.place_contiguous(slots.to(DEVICE), num_slots=SLOTS, alignment=4)
    back = kernels.unpermute(kernels.permute(x.to(DEVICE), places), places, None).cpu()
    assert_rows_close(back, x * torch.tensor([2.0, 1.0, 0.0, 2.0])[:, None])


def test_no_tokens():
    slots = torch.empty(0, TOPK, dtype=torch.int64, device=DEVICE)
    places = kernels.place_contiguous(slots, num_slots=SLOTS, alignment=16)
    assert places.layout.counts.tolist() == [0] * SLOTS
    rows = kernels.permute(torch.empty(0, 32, device=DEVICE), places)
    assert kernels.unpermute(rows, places, None).shape == (0, 32)
