"""The model's configuration: what is accepted, with which meaning, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from moe_ep.config import ConfigError, ModelConfig, geometry_names
from tests.tiny import CASES, FAMILIES, tiny_checkpoint

V3 = json.loads((Path(__file__).parents[1] / "moe_ep/geometries/deepseek-v3.json").read_text())
FP8 = V3["quantization_config"]
YARN = V3["rope_scaling"]
INT4 = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}}
FP8_BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}


def v3_without(*names: str) -> dict[str, Any]:
    return {key: value for key, value in V3.items() if key not in names}


def refused_fields(config: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(config)
    for problem in caught.value.problems:
        assert problem.field in str(caught.value)
        assert problem.allowed
        assert problem.fix
    return [problem.field for problem in caught.value.problems]


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family: str):
    extra = {"num_experts_per_tok": 6} if family == "deepseek_v2" else {}  # it has no default
    full = FAMILIES[family][0](**extra).to_dict()
    assert ModelConfig.from_dict({"model_type": family} | extra) == ModelConfig.from_dict(full)


@pytest.mark.parametrize("case", CASES)
def test_saved_configs_mean_what_transformers_computes(case: str):
    checkpoint = tiny_checkpoint(case)
    model, reference = ModelConfig.from_path(checkpoint.path), checkpoint.reference
    attention = reference.model.layers[0].self_attn
    rotary = reference.model.rotary_emb
    experts = [hasattr(layer.mlp, "experts") for layer in reference.model.layers]
    assert model.softmax_scale == pytest.approx(attention.scaling, rel=1e-12)
    scale = 1.0 if model.yarn is None else model.yarn.cos_sin_scale
    assert scale == pytest.approx(rotary.attention_scaling, rel=1e-12)
    assert model.first_k_dense_replace == experts.index(True)
    assert model.num_moe_layers == sum(experts)
    assert model.latent_norm_eps == attention.kv_a_layernorm.variance_epsilon
    assert model.rms_norm_eps == reference.model.norm.variance_epsilon
    assert model.tie_word_embeddings == reference.config.tie_word_embeddings
    assert (model.q_lora_rank is None) == (attention.q_a_proj is None)


# Sizes as published: layers with experts, experts, top-k, cached values per token, FP8 or not.
GEOMETRIES = {
    "deepseek-v3": (58, 256, 8, 576, "fp8"),
    "kimi-k2": (60, 384, 8, 576, "fp8"),
    "deepseek-v2-lite": (26, 64, 6, 576, None),
    "moonlight": (26, 64, 6, 576, None),
    "glm-4.7-flash": (46, 64, 4, 576, None),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_built_in_geometries(name: str):
    model = ModelConfig.from_path(name)
    sizes = (model.num_moe_layers, model.num_experts, model.num_experts_per_tok, model.latent_dim)
    assert (*sizes, model.quantization) == GEOMETRIES[name]
    assert geometry_names() == sorted(GEOMETRIES)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama", "num_key_value_heads": 8}, "num_key_value_heads"),  # GQA
    ({"model_type": "gpt2"}, "kv_lora_rank"),
    (V3 | {"kv_lora_rank": None}, "kv_lora_rank"),
    (V3 | {"index_topk": 2048}, "index_topk"),  # DSA
    ({"model_type": "deepseek_v4", "num_key_value_heads": 1, "hc_mult": 4}, "hc_mult"),
    (
        {"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1]}},
        "linear_attn_config",
    ),
    ({"model_type": "qwen3_next", "full_attention_interval": 4}, "full_attention_interval"),
    (V3 | {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    (V3 | {"zero_expert_num": 256}, "zero_expert_num"),
    (V3 | {"hidden_act": "gelu"}, "hidden_act"),
    (V3 | {"mlp_bias": True}, "mlp_bias"),
    (V3 | {"moe_layer_freq": 2}, "moe_layer_freq"),
    (V3 | {"moe_layer_freq": [0, 1, 0, 1]}, "moe_layer_freq"),
    (V3 | {"scoring_func": "sqrtsoftplus"}, "scoring_func"),
    (V3 | {"scoring_func": "softmax"}, "scoring_func"),  # noaux_tc needs sigmoid
    (V3 | {"topk_method": "hash"}, "topk_method"),
    (V3 | {"n_group": 7}, "n_group"),
    (V3 | {"n_group": 256, "topk_group": 8}, "n_group"),  # groups rank by their best two
    (V3 | {"topk_group": 9}, "topk_group"),
    (V3 | {"num_experts_per_tok": 129}, "num_experts_per_tok"),
    (V3 | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type"),
    (V3 | {"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters.rope_type"),
    (V3 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (V3 | {"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
    (V3 | {"first_k_dense_replace": 61}, "first_k_dense_replace"),
    (V3 | {"mlp_layer_types": ["sparse"] * 60 + ["dense"]}, "mlp_layer_types"),
    (V3 | {"mlp_layer_types": ["dense"] + ["sparse"] * 60}, "first_k_dense_replace"),
    (V3 | {"hidden_size": 0}, "hidden_size"),
    (V3 | {"hidden_size": "7168"}, "hidden_size"),
    (V3 | {"norm_topk_prob": 1}, "norm_topk_prob"),
    (V3 | {"rms_norm_eps": None}, "rms_norm_eps"),
    (V3 | {"torch_dtype": "int8"}, "dtype"),
    (V3 | {"eos_token_id": "</s>"}, "eos_token_id"),
    (V3 | {"quantization_config": "fp8"}, "quantization_config"),
    (V3 | {"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method"),
    (V3 | {"quantization_config": FP8 | {"fmt": "e5m2"}}, "quantization_config.fmt"),
    (V3 | {"quantization_config": INT4}, "quantization_config.config_groups"),
    (
        V3 | {"quantization_config": FP8 | {"weight_block_size": [1, 128]}},
        "quantization_config.weight_block_size",
    ),
    (
        V3 | {"quantization_config": FP8 | {"activation_scheme": "static"}},
        "quantization_config.activation_scheme",
    ),
]


@pytest.mark.parametrize(("config", "field"), REFUSED)
def test_a_model_is_refused_by_the_field_that_gives_it_away(config: dict[str, Any], field: str):
    assert refused_fields(config) == [field]


def test_all_problems_of_a_model_come_at_once():
    config = V3 | {"hidden_size": -1, "n_group": 7, "torch_dtype": "int8", "vocab_size": None}
    fields = refused_fields(config | {"rope_scaling": {"type": "dynamic"}})
    assert set(fields) == {
        "hidden_size",
        "vocab_size",
        "n_group",
        "rope_scaling.rope_type",
        "dtype",
    }


def test_fields_decide_and_not_the_name():
    assert ModelConfig.from_dict(V3 | {"model_type": "some_new_name"}).num_experts == 256
    no_defaults = v3_without("num_attention_heads", "norm_topk_prob") | {"model_type": "new"}
    assert set(refused_fields(no_defaults)) == {"num_attention_heads", "norm_topk_prob"}


def test_the_language_model_of_a_multimodal_config():
    text = v3_without("quantization_config", "torch_dtype", "eos_token_id")
    shared = {"dtype": "bfloat16", "eos_token_id": [5, 6], "quantization_config": FP8}
    vision = {"hidden_size": 1152, "index_topk": 1}
    config = {"model_type": "kimi_k25", "text_config": text, "vision_config": vision} | shared
    model = ModelConfig.from_dict(config | {"tie_word_embeddings": True})
    expected = ModelConfig.from_dict(V3)
    assert model == dataclasses.replace(expected, eos_token_ids=(5, 6))


def test_old_and_new_rope_fields_mean_the_same():
    new = YARN | {"rope_type": "yarn", "rope_theta": 10000.0}
    parsed = ModelConfig.from_dict(
        v3_without("rope_scaling", "rope_theta") | {"rope_parameters": new}
    )
    assert parsed == ModelConfig.from_dict(V3)
    assert parsed.yarn is not None
    bare = ModelConfig.from_dict(V3 | {"rope_scaling": {"type": "yarn", "mscale": 0}})
    assert bare.yarn is not None
    assert (bare.yarn.factor, bare.yarn.mscale, bare.yarn.beta_fast) == (1.0, None, 32.0)


@pytest.mark.parametrize(
    "quantization",
    [
        FP8 | {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": FP8_BLOCKS}}},
    ],
)
def test_both_spellings_of_block_fp8_are_taken(quantization: dict[str, Any]):
    assert ModelConfig.from_dict(V3 | {"quantization_config": quantization}).quantization == "fp8"


def test_generation_config_adds_end_of_sequence_ids(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(V3))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    assert ModelConfig.from_path(tmp_path).eos_token_ids == (1, 7)
    assert ModelConfig.from_path(tmp_path / "config.json").eos_token_ids == (1, 7)


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "\xff"])
def test_an_absent_or_broken_config_names_the_file(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_path(tmp_path)
