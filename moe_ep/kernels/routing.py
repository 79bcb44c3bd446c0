"""Grouped top-k routing, and the map from experts to slots with load counting.

The rules are ``moe_ep.gate``'s; the product with the router's weight stays a plain matrix product.
One warp routes one token, so that every maximum is found without shared memory.

Shape letters: T tokens, K choices per token, E logical experts, G groups.
"""

import torch
import triton
import triton.language as tl

from moe_ep.gate import NORM_EPS, Gate

BLOCK_CHOICES = 512


def route(logits: torch.Tensor, gate: Gate) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``gate`` chooses from its logits: topk_idx int64 and topk_weights float32, ``[T, K]``.

    logits: contiguous float32 ``[T, E]``. Choices are in falling order of what they were picked by,
    and of equal experts the first is taken. A row with NaN gives valid indices and unspecified
    weights.
    """
    num_tokens, num_experts = logits.shape
    shape = (num_tokens, gate.num_topk)
    topk_idx = torch.empty(shape, dtype=torch.int64, device=logits.device)
    topk_weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route[(num_tokens,)](
            logits,
            gate.bias,
            topk_idx,
            topk_weights,
            gate.routed_scaling_factor,
            NORM_EPS,
            NUM_GROUPS=gate.n_group,
            GROUP_SIZE=num_experts // gate.n_group,
            GROUPS=triton.next_power_of_2(gate.n_group),
            SIZE=triton.next_power_of_2(num_experts // gate.n_group),
            NUM_KEPT=gate.topk_group,
            BEST_OF_GROUP=gate.num_best_of_group,
            NUM_TOPK=gate.num_topk,
            TOPK=triton.next_power_of_2(gate.num_topk),
            IS_SIGMOID=gate.scoring_func == "sigmoid",
            IS_NORMED=gate.norm_topk_prob,
            num_warps=1,
        )
    return topk_idx, topk_weights


def map_to_slots(
    topk_idx: torch.Tensor,
    slot_table: torch.Tensor,
    *,
    is_padding: torch.Tensor,
    expert_tokens: torch.Tensor | None,
) -> torch.Tensor:
    """int64 ``[T, K]``: the slots of real tokens, -1 for padding and for choice -1.

    topk_idx: contiguous int64 ``[T, K]``; padding rows may hold anything.
    slot_table: contiguous int64 ``[E, W]``; row t that chose expert e gets ``[e, t % W]``.
    is_padding: bool ``[T]``, on the device, so that a captured graph serves any number of tokens.
    expert_tokens: int64 ``[E]``, increased by the real tokens' choices of each expert; or None.
    """
    slots = torch.empty_like(topk_idx)
    if topk_idx.numel():
        _map_to_slots[(triton.cdiv(topk_idx.numel(), BLOCK_CHOICES),)](
            topk_idx,
            slot_table,
            is_padding,
            expert_tokens,
            slots,
            topk_idx.numel(),
            topk_idx.shape[1],
            NUM_WAYS=slot_table.shape[1],
            BLOCK=BLOCK_CHOICES,
        )
    return slots


@triton.jit
def _first_best(values, idx):
    """The largest of ``values`` and, of those that equal it, the smallest ``idx``."""
    best = tl.max(values)
    return best, tl.min(tl.where(values == best, idx, 0x7FFFFFFF))


@triton.jit
def _group_scores(choice, BEST_OF_GROUP: tl.constexpr):
    """``[G, E / G]`` -> ``[G]``: the best of each group, or the sum of its two best."""
    best = tl.max(choice, axis=1)
    total = best
    if BEST_OF_GROUP == 2:
        # Strike the best out once, wherever it stands first.
        place = tl.broadcast_to(tl.arange(0, choice.shape[1])[None, :], choice.shape)
        first = tl.min(tl.where(choice == best[:, None], place, choice.shape[1]), axis=1)
        total += tl.max(tl.where(place == first[:, None], float("-inf"), choice), axis=1)
    return total


@triton.jit
def _route(
    logits,
    bias,
    topk_idx,
    topk_weights,
    scaling_factor,
    norm_eps,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    TOPK: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_NORMED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    place = tl.arange(0, SIZE)
    is_expert = (group < NUM_GROUPS)[:, None] & (place < GROUP_SIZE)[None, :]
    expert = group[:, None] * GROUP_SIZE + place[None, :]
    # 1. Scores, and what experts are picked by; NaN picks last, but is still an expert.
    at = logits + token * NUM_GROUPS * GROUP_SIZE + expert
    logit = tl.load(at, mask=is_expert, other=float("-inf"))
    if IS_SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        exponential = tl.exp(logit - tl.max(logit))
        score = exponential / tl.sum(exponential)
    choice = score
    if bias is not None:
        choice += tl.load(bias + expert, mask=is_expert, other=0.0)
    choice = tl.where(choice > -1e38, choice, -1e38)
    choice = tl.where(is_expert, choice, float("-inf"))
    # 2. Keep the best groups.
    if NUM_KEPT < NUM_GROUPS:
        group_score = _group_scores(choice, BEST_OF_GROUP)
        group_score = tl.where(group < NUM_GROUPS, group_score, float("-inf"))
        is_kept = tl.zeros((GROUPS,), dtype=tl.int32)
        for _ in tl.static_range(NUM_KEPT):
            _, best = _first_best(tl.where(is_kept == 0, group_score, float("-inf")), group)
            is_kept = tl.where(group == best, 1, is_kept)
        choice = tl.where(is_kept[:, None] == 1, choice, float("-inf"))
    # 3. Take the best experts one after the other.
    nth = tl.arange(0, TOPK)
    idx = tl.zeros((TOPK,), dtype=tl.int32)
    weights = tl.zeros((TOPK,), dtype=tl.float32)
    for k in tl.static_range(NUM_TOPK):
        _, best = _first_best(choice, expert)
        weight = tl.sum(tl.where(expert == best, score, 0.0))
        idx = tl.where(nth == k, best, idx)
        weights = tl.where(nth == k, weight, weights)
        choice = tl.where(expert == best, float("-inf"), choice)
    if IS_NORMED:
        weights = weights / (tl.sum(weights) + norm_eps)
    target = token * NUM_TOPK + nth
    tl.store(topk_idx + target, idx.to(tl.int64), mask=nth < NUM_TOPK)
    tl.store(topk_weights + target, weights * scaling_factor, mask=nth < NUM_TOPK)


@triton.jit
def _map_to_slots(
    topk_idx,
    slot_table,
    is_padding,
    expert_tokens,
    slots,
    num_choices,
    num_topk,
    NUM_WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = at < num_choices
    token = at // num_topk
    is_real = is_inside & (tl.load(is_padding + token, mask=is_inside, other=1) == 0)
    expert = tl.load(topk_idx + at, mask=is_real, other=-1)
    is_choice = expert >= 0
    way = expert * NUM_WAYS + token % NUM_WAYS
    slot = tl.load(slot_table + way, mask=is_choice, other=-1)
    tl.store(slots + at, slot, mask=is_inside)
    if expert_tokens is not None:
        tl.atomic_add(expert_tokens + expert, 1, mask=is_choice, sem="relaxed")
