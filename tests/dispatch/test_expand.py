"""Rows per rank to rows per slot and back, by torch and by the kernels in their interpreter."""

import pytest
import torch

from moe_ep.dispatch.expand import expand
from moe_ep.fp8 import FP8
from tests.compare import assert_bits_equal
from tests.kernels.cases import DEVICE

pytestmark = pytest.mark.usefixtures("kernels_or_torch")

NAN = float("nan")


def test_rows_are_expanded_and_summed_as_worked_by_hand():
    # 4 rows, 3 slots, alignment 4; -1 is another rank's. Slot 1 has no row.
    slots = torch.tensor([[2, -1], [0, 2], [-1, -1], [2, 0]], device=DEVICE)
    expansion = expand(slots, num_slots=3, num_rows=8, alignment=4)
    assert expansion.layout.psum.tolist() == [2, 4, 7]
    assert expansion.layout.alignment == 4
    places, sources = [0, 1, 4, 5, 6], [1, 3, 0, 1, 3]
    received = torch.randn(4, 256).to(FP8)
    rows = expansion.copy(received.to(DEVICE)).cpu()
    assert rows.shape == (8, 256)
    assert_bits_equal(rows[places].float(), received[sources].float())
    scales = torch.randn(4, 3)
    columns = expansion.copy(scales.to(DEVICE), is_column_major=True)
    assert columns.stride() == (1, 8)
    assert_bits_equal(columns.cpu()[places], scales[sources])
    y = torch.full((8, 2), NAN)
    infinite = float("inf")  # of one token, and stays with it
    y[places] = torch.tensor([infinite, 2.0, 3.0, 4.0, 5.0]).unsqueeze(1)
    weights = torch.tensor([[0.5, 9.0], [2.0, 1.0], [7.0, 7.0], [1.0, 10.0]])
    sums = expansion.weighted_sums(y.to(DEVICE), weights.to(DEVICE))
    assert sums[:, 0].tolist() == [1.5, infinite, 0.0, 25.0]


def test_nothing_received_expands_to_nothing():
    slots = torch.full((3, 2), -1, device=DEVICE)
    for some in (slots, slots[:0]):
        expansion = expand(some, num_slots=2, num_rows=0, alignment=128)
        assert expansion.layout.psum.tolist() == [0, 0]
        empty = torch.empty(len(some), 4, device=DEVICE)
        assert expansion.copy(empty.to(FP8)).shape == (0, 4)
        weights = torch.ones(some.shape, device=DEVICE)
        sums = expansion.weighted_sums(torch.empty(0, 4, device=DEVICE), weights)
        assert_bits_equal(sums.cpu(), torch.zeros(len(some), 4))
