"""Which tensors a model of this config consists of, by their checkpoint names.

``model.layers.3.mlp.experts.7.up_proj.weight``: names are those of the published checkpoints. A
multimodal checkpoint keeps them under a prefix, which ``canonical`` takes off.
"""

import re

from moe_ep.config import ModelConfig

LANGUAGE_PREFIX = "language_model."
SCALE_SUFFIXES = ("_scale_inv", "_scale")  # after "weight"; both mean: value = weight * scale
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.")

Shape = tuple[int, ...]


def expected_tensors(model: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every tensor of the model, all experts included, scales not."""
    hidden = model.hidden_size
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (model.vocab_size, hidden)}
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = (hidden,)
        tensors |= _attention(model, prefix + "self_attn.")
        tensors[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if layer < model.first_k_dense_replace:
            tensors |= _mlp(prefix + "mlp.", hidden, model.intermediate_size)
        else:
            tensors |= _moe(model, layer, prefix + "mlp.")
    tensors["model.norm.weight"] = (hidden,)
    if not model.tie_word_embeddings:
        tensors["lm_head.weight"] = (model.vocab_size, hidden)
    return tensors


def expert_tensors(model: ModelConfig, layer: int, expert: int) -> dict[str, Shape]:
    """The three matrices of one routed expert; layer counts from the first decoder layer."""
    prefix = f"model.layers.{layer}.mlp.experts.{expert}."
    return _mlp(prefix, model.hidden_size, model.moe_intermediate_size)


def expert_of(name: str) -> tuple[int, int] | None:
    """(layer, expert) of a routed expert's tensor, None for any other."""
    match = _EXPERT.match(name)
    return None if match is None else (int(match[1]), int(match[2]))


def canonical(names: set[str]) -> dict[str, str]:
    """Each name without the prefix of a multimodal checkpoint -> the name as the files have it.

    Tensors outside the language model keep their names, which no decoder asks for.
    """
    return {name.removeprefix(LANGUAGE_PREFIX): name for name in sorted(names)}


def ignored_because(name: str, stored_name: str, model: ModelConfig, is_multimodal: bool) -> str:
    """Why a tensor of the checkpoint plays no part here, or "" when there is no such reason."""
    layer = _LAYER.match(name)
    if layer is not None and int(layer[1]) >= model.num_layers:
        return "multi-token prediction"
    if name.endswith("rotary_emb.inv_freq"):
        return "computed from the config"
    if name == "lm_head.weight" and model.tie_word_embeddings:
        return "tied to the embedding"
    if is_multimodal and not stored_name.startswith(LANGUAGE_PREFIX):
        return "not of the language model"
    return ""


def _attention(model: ModelConfig, prefix: str) -> dict[str, Shape]:
    hidden, heads = model.hidden_size, model.num_heads
    q_out = heads * model.qk_head_dim
    kv_out = heads * (model.qk_nope_head_dim + model.v_head_dim)
    shapes: dict[str, Shape] = {}
    if model.q_lora_rank is None:
        shapes["q_proj.weight"] = (q_out, hidden)
    else:
        shapes["q_a_proj.weight"] = (model.q_lora_rank, hidden)
        shapes["q_a_layernorm.weight"] = (model.q_lora_rank,)
        shapes["q_b_proj.weight"] = (q_out, model.q_lora_rank)
    shapes["kv_a_proj_with_mqa.weight"] = (model.latent_dim, hidden)
    shapes["kv_a_layernorm.weight"] = (model.kv_lora_rank,)
    shapes["kv_b_proj.weight"] = (kv_out, model.kv_lora_rank)
    shapes["o_proj.weight"] = (hidden, heads * model.v_head_dim)
    if model.attention_bias:
        biased = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
        for projection in biased if model.q_lora_rank is not None else biased[1:]:
            shapes[projection + ".bias"] = shapes[projection + ".weight"][:1]
    return {prefix + name: shape for name, shape in shapes.items()}


def _moe(model: ModelConfig, layer: int, prefix: str) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {prefix + "gate.weight": (model.num_experts, model.hidden_size)}
    if model.topk_method == "noaux_tc":
        tensors[prefix + "gate.e_score_correction_bias"] = (model.num_experts,)
    for expert in range(model.num_experts):
        tensors |= expert_tensors(model, layer, expert)
    if model.num_shared_experts:
        width = model.num_shared_experts * model.moe_intermediate_size
        tensors |= _mlp(prefix + "shared_experts.", model.hidden_size, width)
    return tensors


def _mlp(prefix: str, hidden: int, width: int) -> dict[str, Shape]:
    return {
        prefix + "gate_proj.weight": (width, hidden),
        prefix + "up_proj.weight": (width, hidden),
        prefix + "down_proj.weight": (hidden, width),
    }
