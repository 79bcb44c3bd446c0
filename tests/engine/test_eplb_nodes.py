"""Machines in live placements: who is where, what traffic between them costs, what is chosen."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from eplb.cost import traffic
from eplb.placement import Placement
from moe_ep.config import EngineConfig, ModelConfig
from moe_ep.engine.eplb import cost_model, count_nodes, next_placement
from tests.eplb.placements import slots_of

DEEPSEEK = ModelConfig.from_path("deepseek-v3")


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["a"], 1),
        (["a", "a", "b", "b"], 2),
        (["b", "b", "a", "a"], 2),
        (["a", "b", "c"], 3),
        (["a", "b", "a", "b"], 1),
        (["a", "a", "a", "b"], 1),
        (["a", "a", "b"], 1),
    ],
)
def test_machines_count_where_ranks_are_numbered_one_by_one(hosts: list[str], expected: int):
    assert count_nodes(hosts) == expected


def test_the_routers_groups_count_where_it_has_them():
    config = EngineConfig(model="", eplb_node_traffic_price=3.0)
    grouped = cost_model(config, DEEPSEEK, 4)
    assert (grouped.num_nodes, grouped.num_groups, grouped.topk_group) == (4, 8, 4)
    assert (grouped.num_experts_per_tok, grouped.price_per_crossing) == (8, 3.0)
    plain = cost_model(config, replace(DEEPSEEK, topk_method="greedy"), 4)
    assert (plain.num_groups, plain.topk_group) == (1, 1)


def test_a_price_keeps_tokens_on_their_machine():
    """Experts lie across the machines; with a price they come back to their groups' ones."""
    model = replace(DEEPSEEK, num_experts=16, n_group=4, topk_group=1, num_experts_per_tok=4)
    generator = torch.Generator().manual_seed(0)
    table = torch.arange(16).view(4, 4).t().flatten().expand(4, -1)  # a rank has one of each group
    current = Placement(table.clone(), num_experts=16, num_ranks=4)
    loads = torch.randint(900, 1100, (4, 16), generator=generator)

    def crossings(price: float) -> np.ndarray:
        cost = cost_model(EngineConfig(model="", eplb_node_traffic_price=price), model, 2)
        slots = slots_of(next_placement(loads, current, cost))
        return traffic(loads.double().numpy(), slots, cost).crossings

    # By hand: a token chooses each group with 1/4, and 4 experts of it; half of the tokens that a
    # machine needs come from the other. A machine with half of each group is needed by a token of
    # a group with 15/16; one that has two groups, by all of theirs.
    num_tokens = loads.sum(1).double().numpy() / 4
    spread, whole = 1 - (1 - 15 / 64) ** 4, 1 - (1 - 1 / 4) ** 2
    assert crossings(0.0) == pytest.approx(num_tokens / 4 * spread, rel=0.1)
    assert crossings(20.0) == pytest.approx(num_tokens / 4 * whole, rel=0.03)
