"""From hidden states to slots, by torch and by the kernels in their interpreter."""

import pytest
import torch

from moe_ep.gate import Gate
from moe_ep.router import Router
from tests.compare import assert_rows_close
from tests.kernels.cases import DEVICE, NAN, randn

pytestmark = pytest.mark.usefixtures("kernels_or_torch")

NUM_EXPERTS, HIDDEN, TOKENS, TOPK = 16, 24, 9, 4


def make_router(num_ways: int = 1) -> Router:
    gate = Gate(
        weight=randn(NUM_EXPERTS, HIDDEN).to(DEVICE) / HIDDEN**0.5,
        bias=0.1 * randn(NUM_EXPERTS, seed=1).to(DEVICE),
        num_topk=TOPK,
        n_group=4,
        topk_group=2,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    ways = torch.arange(num_ways, device=DEVICE)
    return Router(gate, torch.arange(NUM_EXPERTS, device=DEVICE).flip(0).unsqueeze(1) * 8 + ways)


@pytest.mark.parametrize("num_ways", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_are_those_of_the_gates_experts(dtype, num_ways: int):
    router = make_router(num_ways)
    x = randn(TOKENS, HIDDEN, seed=2).to(dtype)
    is_padding = torch.tensor([False, False, True, False, False, False, True, True, True])
    x[is_padding] = NAN
    slots, weights = (t.cpu() for t in router(x.to(DEVICE), is_padding.to(DEVICE)))
    assert (slots.dtype, weights.dtype) == (torch.int64, torch.float32)
    assert (slots[is_padding] == -1).all()
    idx, want = (t.cpu() for t in router.gate(x[~is_padding].to(DEVICE)))
    way = torch.arange(TOKENS)[~is_padding].unsqueeze(1) % num_ways
    want_slots = router.slot_table.cpu()[idx, way]
    order, want_order = slots[~is_padding].argsort(1), want_slots.argsort(1)
    assert torch.equal(slots[~is_padding].gather(1, order), want_slots.gather(1, want_order))
    got = weights[~is_padding].gather(1, order)
    assert_rows_close(got, want.gather(1, want_order), rtol=1e-5)


def test_the_table_may_be_replaced():
    router = make_router()
    x, is_padding = randn(3, HIDDEN).to(DEVICE), torch.zeros(3, dtype=torch.bool, device=DEVICE)
    before, _ = router(x, is_padding)
    router.slot_table = router.slot_table + 100
    after, _ = router(x, is_padding)
    assert torch.equal(after, before + 100)


def test_no_tokens():
    slots, weights = make_router()(
        torch.empty(0, HIDDEN, device=DEVICE), torch.empty(0, dtype=torch.bool, device=DEVICE)
    )
    assert slots.shape == weights.shape == (0, TOPK)
