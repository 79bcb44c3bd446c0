"""float64 references of the kernels, and when a result agrees with one.

Limits are those of the libraries' own tests. DeepGEMM's measure, ``1 - 2 xy / (xx + yy)``, is taken
per row here, because one wrong row among thousands would hardly move it.
"""

from typing import NamedTuple

import torch

from attention import AttentionSpec
from moe_ep.dispatch import ContiguousLayout, MaskedLayout
from moe_ep.fp8 import BLOCK
from moe_ep.gate import Gate

FP8_DIFF, BF16_DIFF = 1e-3, 1e-5  # DeepGEMM: products of FP8, of BF16
# FlashMLA's dense decode: an element may miss either, the whole by the last.
DECODE_ABS, DECODE_REL, DECODE_DIFF = 8e-4, 2.01 / 128, 5e-6
# Of a query and head: the way of torch rounds scores to BF16, which moves a weight by 2^-8 or so.
PREFILL_DIFF = 1e-4
# Choices that float32 and float64 may decide differently.
CLOSE_CHOICE = 1e-5
NORM_EPS = 1e-6


def restored(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 ``[.., H]``: what e4m3 values and their 1x128 scales are worth."""
    wide = scales.double().repeat_interleave(BLOCK, dim=-1)
    return q.float().double() * wide[..., : q.shape[-1]]


def restored_weight(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 ``[N, K]`` of a weight with 128x128 scales."""
    return restored(weight, scale.repeat_interleave(BLOCK, dim=0)[: len(weight)])


def diffs(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """float64, one per row; 0 where both rows are zero, NaN where one holds NaN."""
    x, y = got.double(), want.double()
    energy = (x * x + y * y).sum(-1)
    diff = 1 - 2 * (x * y).sum(-1) / energy
    return torch.where(energy == 0, 0.0, diff)


def assert_rows_agree(got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    assert got.shape == want.shape, f"shape {list(got.shape)}, expected {list(want.shape)}"
    diff = diffs(got, want)
    wrong = (~(diff <= limit)).nonzero()  # NaN is not within any limit
    assert not len(wrong), (
        f"{len(wrong)} of {diff.numel()} rows differ by more than {limit}, "
        f"first row {wrong[0].tolist()} by {diff[tuple(wrong[0])].item():.2e}"
    )


def swiglu_of(gate_up: torch.Tensor) -> torch.Tensor:
    """``[.., 2 I]`` -> float64 ``[.., I]``."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def decoded(q: torch.Tensor, latents: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """One request: q ``[N, latent_dim]``, its latents ``[t, latent_dim]`` -> float64 ``[N, C]``."""
    wide = latents.double()
    scores = q.double() @ wide.T * spec.softmax_scale
    return scores.softmax(-1) @ wide[:, : spec.kv_lora_rank]


def prefilled(
    q: torch.Tensor, latents: torch.Tensor, w_kv_b: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """One request, head by head: q ``[P, N, nope + rope]``, its latents ``[t, latent_dim]``, of
    which the last P are the queries' own -> float64 ``[P, N, v]``."""
    compressed, rotated = latents.double().split([spec.kv_lora_rank, spec.qk_rope_head_dim], -1)
    first = len(latents) - len(q)
    is_later = torch.ones(len(q), len(latents), dtype=torch.bool, device=q.device).triu_(first + 1)
    outs = []
    for head, weight in enumerate(w_kv_b.double()):
        keys, values = (compressed @ weight.T).split([spec.qk_nope_head_dim, spec.v_head_dim], -1)
        scores = q[:, head].double() @ torch.cat([keys, rotated], -1).T * spec.softmax_scale
        outs.append(scores.masked_fill_(is_later, -torch.inf).softmax(-1) @ values)
    return torch.stack(outs, dim=1)


def assert_decoded(got: torch.Tensor, want: torch.Tensor) -> None:
    """Both ``[N, C]`` of one request."""
    error = (got.double() - want).abs()
    is_near = (error <= DECODE_ABS) | (error <= DECODE_REL * want.abs())
    assert is_near.all(), f"{int((~is_near).sum())} values differ, at most by {error.max():.2e}"
    diff = diffs(got.flatten(), want.flatten()).item()
    assert diff <= DECODE_DIFF, f"the request differs by {diff:.2e}, {DECODE_DIFF} allowed"


class Routed(NamedTuple):
    """choices: int64 ``[T, K]``. margin: by how much the last choice was one, ``[T]``."""

    choices: torch.Tensor
    margin: torch.Tensor


def routed(logits: torch.Tensor, gate: Gate) -> Routed:
    """What a gate with sigmoid scores and groups by their two best chooses, in float64."""
    choice = logits.double().sigmoid()
    if gate.bias is not None:
        choice = choice + gate.bias.double()
    grouped = choice.unflatten(1, (gate.n_group, -1))
    group_scores = grouped.topk(gate.num_best_of_group, dim=-1).values.sum(-1)
    order = group_scores.sort(dim=1, descending=True)
    is_dropped = torch.ones_like(group_scores, dtype=torch.bool)
    is_dropped.scatter_(1, order.indices[:, : gate.topk_group], False)
    best = grouped.masked_fill(is_dropped[..., None], -torch.inf).flatten(1)
    best = best.sort(dim=1, descending=True)
    margin = _gap(best.values, gate.num_topk)
    if gate.topk_group < gate.n_group:
        margin = margin.minimum(_gap(order.values, gate.topk_group))
    return Routed(best.indices[:, : gate.num_topk], margin)


def assert_routed(got: tuple[torch.Tensor, torch.Tensor], logits: torch.Tensor, gate: Gate) -> None:
    """Rows that a rounding can decide are not compared; their weights are."""
    idx, weights = got
    want = routed(logits, gate)
    is_clear = want.margin > CLOSE_CHOICE
    assert is_clear.double().mean() > 0.9, "too many close choices to compare"
    same = idx.sort(dim=1).values == want.choices.sort(dim=1).values
    assert same[is_clear].all(), f"{int((~same[is_clear]).any(1).sum())} rows chose otherwise"
    scores = logits.double().sigmoid().gather(1, idx)
    exact = scores / scores.sum(1, keepdim=True) * gate.routed_scaling_factor
    torch.testing.assert_close(weights.double(), exact, rtol=1e-5, atol=0.0)


def assert_placed(
    positions: torch.Tensor, layout: ContiguousLayout | MaskedLayout, slots: torch.Tensor
) -> None:
    """Every choice has a row of its own among those of its slot."""
    assert isinstance(layout, ContiguousLayout)
    ends, counts = layout.psum.long(), layout.counts.long()
    assert torch.equal(counts, slots.flatten().bincount(minlength=len(ends))), "wrong counts"
    place, end = positions.long(), ends[slots]
    assert (place < end).all(), "a row past the end of its slot"
    assert (place >= end - counts[slots]).all(), "a row before the start of its slot"
    assert len(place.unique()) == place.numel(), "two choices share a row"


def latent_of(
    raw: torch.Tensor, weight: torch.Tensor, angles: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 norm of the first part, and rotation of interleaved pairs of the second."""
    compressed, key = raw.double().split([len(weight), 2 * angles.shape[1]], dim=-1)
    inverse = (compressed.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
    first, second = key[:, 0::2], key[:, 1::2]
    cos, sin = angles.double().cos(), angles.double().sin()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return compressed * inverse * weight.double(), rotated


def _gap(falling: torch.Tensor, num: int) -> torch.Tensor:
    """Between the last that is taken and the first that is not; infinite when all are."""
    if num == falling.shape[1]:
        return torch.full_like(falling[:, 0], torch.inf)
    return falling[:, num - 1] - falling[:, num]
