"""Grouped top-k against the gate and against hand-worked cases; the map to slots against torch."""

from dataclasses import asdict, dataclass

import pytest
import torch

from moe_ep.gate import Gate
from moe_ep.kernels.routing import map_to_slots, route
from tests.compare import assert_rows_close
from tests.kernels.cases import DEVICE, NAN, randn

HIDDEN, TOKENS = 16, 23


@dataclass(frozen=True)
class Rules:
    num_topk: int = 4
    n_group: int = 8
    topk_group: int = 3
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5


V2 = {"scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 16.0}
CASES = [
    (64, True, Rules()),
    (256, True, Rules(num_topk=8, topk_group=4)),  # DeepSeek-V3
    (384, True, Rules(num_topk=8, n_group=1, topk_group=1)),  # Kimi K2
    (60, True, Rules(n_group=5, topk_group=2, num_topk=6)),  # nothing is a power of two
    (64, False, Rules(norm_topk_prob=False)),
    (8, True, Rules(topk_group=4, num_topk=3)),  # one expert per group
    (64, False, Rules(topk_method="greedy", num_topk=6, n_group=1, topk_group=1, **V2)),
    (160, False, Rules(topk_method="group_limited_greedy", num_topk=6, **V2)),  # DeepSeek-V2
    (64, False, Rules(scoring_func="softmax", topk_method="greedy", n_group=1, topk_group=1)),
]


def make_gate(num_experts: int, has_bias: bool, rules: Rules) -> Gate:
    weight = randn(num_experts, HIDDEN) / HIDDEN**0.5
    bias = 0.1 * randn(num_experts, seed=1) if has_bias else None
    return Gate(weight=weight, bias=bias, **asdict(rules))


def routed(logits: torch.Tensor, gate: Gate) -> tuple[torch.Tensor, torch.Tensor]:
    moved = Gate.__new__(Gate)
    moved.__dict__ = {**gate.__dict__, "bias": None if gate.bias is None else gate.bias.to(DEVICE)}
    idx, weights = route(logits.to(DEVICE), moved)
    assert (idx.dtype, weights.dtype) == (torch.int64, torch.float32)
    return idx.cpu(), weights.cpu()


@pytest.mark.parametrize(("num_experts", "has_bias", "rules"), CASES)
def test_equals_the_gate(num_experts, has_bias, rules):
    gate = make_gate(num_experts, has_bias, rules)
    x = randn(TOKENS, HIDDEN, seed=2)
    idx, weights = routed(gate.logits(x), gate)
    want_idx, want_weights = gate(x)
    order, want_order = idx.argsort(dim=1), want_idx.argsort(dim=1)
    assert torch.equal(idx.gather(1, order), want_idx.gather(1, want_order))
    # The device's exponential and sums differ from torch's in the last places.
    assert_rows_close(weights.gather(1, order), want_weights.gather(1, want_order), rtol=1e-5)


def test_of_equal_experts_the_first_is_taken():
    gate = make_gate(64, False, Rules(num_topk=5))
    idx, weights = routed(torch.zeros(2, 64), gate)
    assert idx.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert_rows_close(weights, torch.full((2, 5), 0.5))


def test_nan_gives_valid_distinct_indices_and_stays_in_its_row():
    gate = make_gate(64, True, Rules())
    logits = randn(6, 64, seed=3)
    clean = routed(logits, gate)
    poisoned = logits.clone()
    poisoned[1] = NAN
    poisoned[4, ::2] = NAN
    idx, weights = routed(poisoned, gate)
    good = [0, 2, 3, 5]
    assert torch.equal(idx[good], clean[0][good])
    assert torch.equal(weights[good], clean[1][good])
    for row in (1, 4):
        assert len(set(idx[row].tolist())) == 4
        assert 0 <= int(idx[row].min()) <= int(idx[row].max()) < 64


def test_no_tokens():
    idx, weights = routed(torch.empty(0, 64), make_gate(64, True, Rules()))
    assert idx.shape == weights.shape == (0, 4)


@pytest.mark.parametrize("num_ways", [1, 2, 64])
@pytest.mark.parametrize("num_real", [0, 3, 300])
def test_slots_of_real_tokens_and_their_loads(num_real: int, num_ways: int):
    topk_idx = torch.randint(0, 10, (300, 3), generator=torch.Generator().manual_seed(0))
    topk_idx[topk_idx == 9] = -1
    real = topk_idx[:num_real].flatten()
    topk_idx[num_real:] = 2**40  # padding is not looked at
    table = torch.randperm(9 * num_ways, generator=torch.Generator().manual_seed(1)).view(9, -1)
    loads = torch.arange(9)
    got_loads = loads.clone().to(DEVICE)
    slots = map_to_slots(
        topk_idx.to(DEVICE),
        table.to(DEVICE),
        is_padding=torch.arange(300, device=DEVICE) >= num_real,
        expert_tokens=got_loads,
    ).cpu()
    want = torch.full((300, 3), -1)
    way = torch.arange(num_real).repeat_interleave(3) % num_ways
    want[:num_real] = torch.where(real < 0, -1, table[real, way]).view(-1, 3)
    assert torch.equal(slots, want)
    assert torch.equal(got_loads.cpu(), loads + real[real >= 0].bincount(minlength=9))


def test_slots_without_loads_and_without_tokens():
    table = torch.tensor([[1], [0]], device=DEVICE)
    idx = torch.tensor([[0, 1], [0, 0], [1, -1]], device=DEVICE)
    is_padding = torch.tensor([False, True, False], device=DEVICE)
    slots = map_to_slots(idx, table, is_padding=is_padding, expert_tokens=None)
    assert slots.tolist() == [[1, 0], [-1, -1], [0, -1]]
    none = map_to_slots(idx[:0], table, is_padding=is_padding[:0], expert_tokens=None)
    assert none.shape == (0, 2)
