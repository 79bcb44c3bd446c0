"""Grouped top-k, the map to slots, and the permutations of rows; Triton alone has them.

Shape letters: T tokens, K choices per token.
"""

from collections.abc import Callable
from typing import Any

import torch

from bench.gpu import costs
from bench.gpu.case import KernelCase, Sizes
from bench.gpu.costs import Cost
from bench.gpu.parity import BF16_DIFF, assert_placed, assert_routed, assert_rows_agree
from moe_ep.fp8 import FP8
from moe_ep.gate import Gate

BF16 = torch.bfloat16
ALIGNMENT = 128  # of slots in the contiguous layout


def route_case(num_tokens: int, sizes: Sizes, device: torch.device) -> KernelCase:
    from moe_ep.kernels.routing import route

    gate = Gate(
        weight=torch.zeros(sizes.num_experts, 1, device=device),
        bias=0.1 * torch.randn(sizes.num_experts, device=device),
        num_topk=sizes.num_topk,
        n_group=sizes.num_groups,
        topk_group=sizes.num_kept_groups,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    logits = torch.randn(num_tokens, sizes.num_experts, device=device)
    return KernelCase(
        "route",
        {"tokens": num_tokens, "experts": sizes.num_experts, "topk": sizes.num_topk},
        costs.route_cost(num_tokens, sizes.num_experts, sizes.num_topk),
        {"triton": lambda: route(logits, gate)},
        lambda got: assert_routed(got, logits, gate),
    )


def map_to_slots_case(num_tokens: int, sizes: Sizes, device: torch.device) -> KernelCase:
    """The loads go on growing from call to call; what is checked is the map."""
    from moe_ep.kernels.routing import map_to_slots

    topk_idx = _draw_choices(num_tokens, sizes.num_experts, sizes.num_topk, device)
    table = torch.randperm(sizes.num_experts, device=device)
    loads = torch.zeros(sizes.num_experts, dtype=torch.int64, device=device)
    is_padding = torch.zeros(num_tokens, dtype=torch.bool, device=device)

    def check(got: torch.Tensor) -> None:
        assert torch.equal(got, table[topk_idx]), "wrong slots"
        assert (loads > 0).any(), "nothing was counted"

    return KernelCase(
        "map_to_slots",
        {"tokens": num_tokens, "topk": sizes.num_topk},
        costs.map_to_slots_cost(num_tokens, sizes.num_topk, sizes.num_experts),
        {
            "triton": lambda: map_to_slots(
                topk_idx, table.unsqueeze(1), is_padding=is_padding, expert_tokens=loads
            )
        },
        check,
    )


def permute_cases(
    num_tokens: int, num_slots: int, sizes: Sizes, device: torch.device
) -> list[KernelCase]:
    """Placing, the way there with FP8 rows, and the way back with BF16 rows and weights."""
    from moe_ep.kernels import permute as kernels

    topk, hidden = sizes.num_topk, sizes.hidden
    slots = _draw_choices(num_tokens, num_slots, topk, device)
    x = torch.randn(num_tokens, hidden, device=device).to(FP8)
    weights = torch.rand(num_tokens, topk, device=device)

    def place() -> kernels.Places:
        return kernels.place_contiguous(slots, num_slots=num_slots, alignment=ALIGNMENT)

    places = place()
    y = torch.full((places.num_rows, hidden), torch.nan, dtype=BF16, device=device)
    positions = places.positions.long()
    y[positions.flatten()] = torch.randn(positions.numel(), hidden, dtype=BF16, device=device)

    def check_permuted(got: torch.Tensor) -> None:
        for k in range(topk):
            rows = got.view(torch.uint8)[positions[:, k]]
            assert torch.equal(rows, x.view(torch.uint8)), f"rows of choice {k} differ"

    def check_unpermuted(got: torch.Tensor) -> None:
        want = sum(weights[:, k, None].double() * y[positions[:, k]] for k in range(topk))
        assert isinstance(want, torch.Tensor)
        assert_rows_agree(got, want, BF16_DIFF)

    def case(kernel: str, cost: Cost, call: Callable[[], Any], check: Any) -> KernelCase:
        shape = {"tokens": num_tokens, "topk": topk, "slots": num_slots, "hidden": hidden}
        return KernelCase(kernel, shape, cost, {"triton": call}, check)

    return [
        case(
            "place_contiguous",
            costs.place_cost(num_tokens, topk, num_slots),
            place,
            lambda got: assert_placed(got.positions, got.layout, slots),
        ),
        case(
            "permute",
            costs.permute_cost(num_tokens, topk, hidden),
            lambda: kernels.permute(x, places),
            check_permuted,
        ),
        case(
            "unpermute",
            costs.unpermute_cost(num_tokens, topk, hidden),
            lambda: kernels.unpermute(y, places, weights),
            check_unpermuted,
        ),
    ]


def _draw_choices(num_tokens: int, num: int, num_topk: int, device: torch.device) -> torch.Tensor:
    """int64 ``[T, K]``, no number twice in a row."""
    return torch.rand(num_tokens, num, device=device).argsort(dim=1)[:, :num_topk].contiguous()
