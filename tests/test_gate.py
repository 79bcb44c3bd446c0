"""The router against transformers' own routers, for every family and rule."""

from typing import Any

import pytest
import torch

from moe_ep.gate import Gate
from tests.compare import assert_bits_equal, assert_rows_close

HIDDEN, NUM_EXPERTS, NUM_TOKENS = 48, 16, 64


def _sizes(**changes) -> dict[str, Any]:
    sizes = {
        "num_topk": 4,
        "n_group": 4,
        "topk_group": 2,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
    return {**sizes, **changes}


def _weight_and_bias(scale: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(NUM_EXPERTS, HIDDEN, generator=generator) * scale
    return weight, torch.randn(NUM_EXPERTS, generator=generator) * 0.5


def _sorted_by_expert(
    idx: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    order = idx.argsort(dim=1)
    return idx.gather(1, order), weights.gather(1, order)


def _their_router(
    family: str, sizes: dict[str, Any], weight: torch.Tensor, bias: torch.Tensor | None
) -> Any:
    common = {
        "hidden_size": HIDDEN,
        "num_experts_per_tok": sizes["num_topk"],
        "n_routed_experts": NUM_EXPERTS,
        "n_group": sizes["n_group"],
        "topk_group": sizes["topk_group"],
        "norm_topk_prob": sizes["norm_topk_prob"],
        "routed_scaling_factor": sizes["routed_scaling_factor"],
    }
    if family == "deepseek_v2":
        from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2

        config = v2.DeepseekV2Config(
            **common, topk_method=sizes["topk_method"], num_attention_heads=4
        )
        router: Any = v2.DeepseekV2TopkRouter(config)
    elif family == "deepseek_v3":
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

        router = v3.DeepseekV3TopkRouter(v3.DeepseekV3Config(**common, num_attention_heads=4))
    else:
        from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as glm

        router = glm.Glm4MoeLiteTopkRouter(glm.Glm4MoeLiteConfig(**common, num_attention_heads=4))
    router.weight.data.copy_(weight)
    if bias is not None:
        router.e_score_correction_bias.copy_(bias)
    return router


V2 = {"scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 16.0}
FAMILIES = [
    ("deepseek_v3", _sizes()),
    ("deepseek_v3", _sizes(norm_topk_prob=False)),
    ("deepseek_v3", _sizes(n_group=1, topk_group=1)),  # Moonlight, Kimi K2
    ("deepseek_v3", _sizes(n_group=8, topk_group=4, num_topk=8)),
    ("deepseek_v3", _sizes(n_group=2, topk_group=2, num_topk=1)),
    ("glm4_moe_lite", _sizes(n_group=1, topk_group=1, routed_scaling_factor=1.8)),
    ("deepseek_v2", _sizes(topk_method="greedy", n_group=1, topk_group=1, **V2)),
    ("deepseek_v2", _sizes(topk_method="group_limited_greedy", **V2)),
]


@pytest.mark.parametrize(("family", "sizes"), FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(family, sizes, dtype):
    weight, bias = _weight_and_bias()
    used_bias = bias if sizes["topk_method"] == "noaux_tc" else None
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = Gate(weight=weight, bias=used_bias, **sizes)(x)
    with torch.no_grad():
        _, their_weights, their_idx = _their_router(family, sizes, weight, used_bias)(x)
    assert ours[0].dtype == torch.int64
    assert ours[1].dtype == torch.float32
    idx, weights = _sorted_by_expert(*ours)
    expected_idx, expected_weights = _sorted_by_expert(their_idx, their_weights)
    assert torch.equal(idx, expected_idx)
    assert_rows_close(weights, expected_weights)


@pytest.mark.parametrize(("family", "sizes"), FAMILIES)
def test_ties_are_broken_as_transformers_breaks_them(family, sizes):
    weight, _ = _weight_and_bias()
    weight = weight[:4].repeat(NUM_EXPERTS // 4, 1)  # every score occurs in each group of four
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))
    idx, _ = Gate(weight=weight, bias=None, **sizes)(x)
    with torch.no_grad():
        _, _, their_idx = _their_router(family, sizes, weight, None)(x)
    assert torch.equal(idx.sort(dim=1).values, their_idx.sort(dim=1).values)


def test_bias_picks_but_never_weighs():
    # One token, scores sigmoid(0) = 0.5 for all four experts; the bias decides alone.
    gate = Gate(
        weight=torch.zeros(4, 2),
        bias=torch.tensor([0.0, 3.0, -1.0, 2.0]),
        **_sizes(num_topk=2, n_group=1, topk_group=1, norm_topk_prob=False),
    )
    idx, weights = gate(torch.ones(1, 2))
    assert sorted(idx[0].tolist()) == [1, 3]
    assert weights.tolist() == [[1.25, 1.25]]


def test_group_score_is_the_two_best_or_the_best():
    # Groups {0, 1} with logits (3, -9) and {2, 3} with (2, 1).
    weight = torch.tensor([[3.0], [-9.0], [2.0], [1.0]])
    changes = {"num_topk": 1, "n_group": 2, "topk_group": 1}
    two_best = Gate(weight=weight, bias=None, **_sizes(**changes))
    best = Gate(weight=weight, bias=None, **_sizes(topk_method="group_limited_greedy", **changes))
    assert two_best(torch.ones(1, 1))[0].tolist() == [[2]]
    assert best(torch.ones(1, 1))[0].tolist() == [[0]]


def test_softmax_weights_are_normalised_when_the_config_says_so():
    weight, _ = _weight_and_bias()
    sizes = _sizes(**{**V2, "norm_topk_prob": True}, topk_method="greedy")
    _, weights = Gate(weight=weight, bias=None, **sizes)(torch.randn(8, HIDDEN))
    assert_rows_close(weights.sum(dim=1, keepdim=True), torch.full((8, 1), 16.0))


def test_nan_rows_do_no_harm():
    weight, bias = _weight_and_bias()
    x = torch.randn(6, HIDDEN)
    gate = Gate(weight=weight, bias=bias, **_sizes())
    x[2] = float("nan")
    idx, weights = gate(x)
    clean_idx, clean_weights = gate(torch.where(x.isnan(), 0.0, x))
    good = torch.tensor([0, 1, 3, 4, 5])
    assert_bits_equal(weights[good], clean_weights[good])
    assert torch.equal(idx[good], clean_idx[good])
    assert bool(((idx >= 0) & (idx < NUM_EXPERTS)).all())


def test_no_tokens():
    weight, bias = _weight_and_bias()
    idx, weights = Gate(weight=weight, bias=bias, **_sizes())(torch.empty(0, HIDDEN))
    assert idx.shape == weights.shape == (0, 4)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"scoring_func": "tanh"}, "scoring_func"),
        ({"topk_method": "best"}, "topk_method"),
        ({"n_group": 3}, "n_group"),
        ({"topk_group": 5}, "topk_group"),
        ({"topk_group": 1, "num_topk": 5}, "num_topk"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, field):
    with pytest.raises(ValueError, match=f"^{field}: "):
        Gate(weight=torch.zeros(NUM_EXPERTS, HIDDEN), bias=None, **_sizes(**changes))
