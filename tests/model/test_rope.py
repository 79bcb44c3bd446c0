"""Rotary embedding and YaRN against transformers' modules, in float32."""

from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as glm

from moe_ep.config import ModelConfig, YarnConfig
from moe_ep.model.rope import RotaryEmbedding

DIM, NUM_HEADS, THETA = 16, 4, 10000.0
POSITIONS = torch.tensor([0, 1, 5, 63, 64, 4095, 2, 199])
YARNS = {
    "none": None,
    "v3": YarnConfig(40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
    "v2_lite": YarnConfig(40.0, 4096, mscale=0.707, mscale_all_dim=0.707),
    "two_mscales": YarnConfig(32.0, 128, 16.0, 2.0, mscale=1.3, mscale_all_dim=0.7),
    "no_mscale": YarnConfig(4.0, 1024),
    "given_factor": YarnConfig(4.0, 1024, attention_factor=1.7),
    "not_truncated": YarnConfig(8.0, 512, truncate=False),
    "narrow_ramp": YarnConfig(8.0, 64, 1.0, 1.0),
}


def rope_parameters(yarn: YarnConfig | None) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": THETA}
    if yarn is not None:
        given = {key: value for key, value in vars(yarn).items() if value is not None}
        parameters |= given | {"rope_type": "yarn"}
    return parameters


def rope(yarn: YarnConfig | None, *, interleave: bool) -> RotaryEmbedding:
    return RotaryEmbedding(
        dim=DIM, theta=THETA, interleave=interleave, yarn=yarn, max_positions=8192
    )


def config_of(kind: type, yarn: YarnConfig | None) -> Any:
    return kind(
        hidden_size=64,
        num_experts_per_tok=2,
        qk_nope_head_dim=24,
        qk_rope_head_dim=DIM,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        max_position_embeddings=8192,
        rope_parameters=rope_parameters(yarn),
    )


def queries_and_keys() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(len(POSITIONS), NUM_HEADS, DIM, generator=generator)
    return queries, torch.randn(len(POSITIONS), DIM, generator=generator)


def rotated(yarn: YarnConfig | None, *, interleave: bool) -> tuple[torch.Tensor, torch.Tensor]:
    queries, keys = queries_and_keys()
    embedding = rope(yarn, interleave=interleave)
    cos, sin = embedding.cos_sin(POSITIONS)
    assert cos.dtype == torch.float32
    assert cos.shape == (len(POSITIONS), DIM // 2)
    return embedding.apply(queries, cos, sin), embedding.apply(keys, cos, sin)


@pytest.mark.parametrize("name", YARNS)
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_v3_and_glm(name: str, interleave: bool, family: str) -> None:
    got_q, got_k = rotated(YARNS[name], interleave=interleave)
    queries, keys = queries_and_keys()
    if family == "deepseek_v3":
        module: Any = v3
        reference = v3.DeepseekV3RotaryEmbedding(config_of(DeepseekV3Config, YARNS[name]))
    else:
        module = glm
        reference = glm.Glm4MoeLiteRotaryEmbedding(config_of(Glm4MoeLiteConfig, YARNS[name]))
    cos, sin = reference(queries, POSITIONS[None])
    rotate = module.apply_rotary_pos_emb_interleave if interleave else module.apply_rotary_pos_emb
    want_q, want_k = rotate(queries.transpose(0, 1)[None], keys[None, None], cos, sin)
    torch.testing.assert_close(got_q, want_q[0].transpose(0, 1), rtol=0.0, atol=2e-6)
    torch.testing.assert_close(got_k, want_k[0, 0], rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("name", YARNS)
def test_v2_scores(name: str) -> None:
    """transformers leaves V2's result interleaved, so dot products are what must agree."""
    got_q, got_k = rotated(YARNS[name], interleave=True)
    queries, keys = queries_and_keys()
    reference = v2.DeepseekV2RotaryEmbedding(config_of(DeepseekV2Config, YARNS[name]))
    frequencies = reference(queries, POSITIONS[None])
    want_q, want_k = v2.apply_rotary_emb(
        queries.transpose(0, 1)[None], keys[None, None], frequencies
    )
    want = torch.einsum("nid,jd->inj", want_q[0], want_k[0, 0])
    got = torch.einsum("ind,jd->inj", got_q, got_k)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", YARNS)
@pytest.mark.parametrize("kind", [DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig])
def test_softmax_scale(name: str, kind: type) -> None:
    config = config_of(kind, YARNS[name])
    if kind is DeepseekV2Config:
        attention: Any = v2.DeepseekV2Attention
    elif kind is DeepseekV3Config:
        attention = v3.DeepseekV3Attention
    else:
        attention = glm.Glm4MoeLiteAttention
    with torch.device("meta"):
        want = attention(config, 0).scaling
    model = ModelConfig.from_dict(config.to_dict())
    assert model.softmax_scale == pytest.approx(want, rel=1e-12)
    assert model.yarn == YARNS[name]


def test_scores_depend_on_distance_only() -> None:
    embedding = rope(None, interleave=True)
    query, key = torch.randn(1, DIM), torch.randn(1, DIM)

    def score(query_position: int, key_position: int) -> float:
        turned = [
            embedding.apply(x, *embedding.cos_sin(torch.tensor([position])))
            for x, position in ((query, query_position), (key, key_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)


def test_bfloat16_is_rounded_once() -> None:
    embedding = rope(YARNS["v3"], interleave=False)
    x = torch.randn(len(POSITIONS), NUM_HEADS, DIM).bfloat16()
    cos, sin = embedding.cos_sin(POSITIONS)
    assert torch.equal(
        embedding.apply(x, cos, sin), embedding.apply(x.float(), cos, sin).bfloat16()
    )


def test_no_tokens() -> None:
    embedding = rope(None, interleave=True)
    cos, sin = embedding.cos_sin(torch.empty(0, dtype=torch.int64))
    assert embedding.apply(torch.empty(0, NUM_HEADS, DIM), cos, sin).shape == (0, NUM_HEADS, DIM)


def test_odd_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="even and positive, got 15"):
        RotaryEmbedding(dim=15, theta=THETA, interleave=True, yarn=None, max_positions=8)


def test_position_past_the_table_is_refused() -> None:
    with pytest.raises(IndexError):
        rope(None, interleave=True).cos_sin(torch.tensor([8192]))
