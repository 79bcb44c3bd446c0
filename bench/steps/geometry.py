"""A model's sizes made smaller, with its structure kept: what a laptop can run of a 600B model.

Widths shrink: hidden, intermediate sizes, number of heads, query rank, vocabulary. The structure
stays: experts, choices per token, groups, the kinds of layers. Head and latent sizes stay too,
because kernels are made for them.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from moe_ep.config import ModelConfig

# What a width must be a multiple of: FP8 scales cover 128 columns of a token, vectors 64 values.
_HIDDEN_STEP, _STEP = 128, 64

_HF_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "eos_token_ids": "eos_token_id",
    "yarn": "rope_scaling",
    "quantization": "quantization_config",
}
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def scaled(model: ModelConfig, scale: float, num_layers: int | None) -> ModelConfig:
    """The model with its widths times ``scale``, and with ``num_layers`` layers.

    Fewer layers keep the share of dense ones, and at least one of each kind that there was and
    that there is room for.
    """
    if not 0 < scale <= 1:
        raise ValueError(f"scale: {scale} given; above 0 and at most 1 is allowed")
    layers = model.num_layers if num_layers is None else num_layers
    if not 1 <= layers <= model.num_layers:
        raise ValueError(f"num_layers: {layers} given; 1 to {model.num_layers} are allowed")
    if scale == 1:
        return _with_layers(model, layers)
    smaller = replace(
        model,
        hidden_size=_round(model.hidden_size * scale, _HIDDEN_STEP),
        intermediate_size=_round(model.intermediate_size * scale, _STEP),
        moe_intermediate_size=_round(model.moe_intermediate_size * scale, _STEP),
        num_heads=_round(model.num_heads * scale, 1),
        q_lora_rank=None if model.q_lora_rank is None else _round(model.q_lora_rank * scale, _STEP),
        vocab_size=_round(model.vocab_size * scale, _STEP),
        eos_token_ids=(),  # ids of the whole vocabulary
        bos_token_id=None,
    )
    return _with_layers(smaller, layers)


def write_config(model: ModelConfig, directory: Path) -> Path:
    """The model as a config.json, from which ``ModelConfig.from_path`` reads the same again."""
    path = directory / "config.json"
    path.write_text(json.dumps(config_json(model)), encoding="utf-8")
    if (again := ModelConfig.from_path(path)) != model:
        raise AssertionError(f"{again} was read back; {model} was written")
    return path


def config_json(model: ModelConfig) -> dict[str, Any]:
    """The object that ``ModelConfig.from_dict`` makes this model of."""
    fields = {_HF_NAMES.get(name, name): value for name, value in asdict(model).items()}
    yarn = model.yarn
    fields["rope_scaling"] = None if yarn is None else {"type": "yarn"} | asdict(yarn)
    fields["quantization_config"] = None if model.quantization is None else _FP8
    fields["eos_token_id"] = list(model.eos_token_ids)
    return fields


def _with_layers(model: ModelConfig, layers: int) -> ModelConfig:
    dense = model.first_k_dense_replace
    if layers != model.num_layers and dense:
        dense = min(max(1, round(dense * layers / model.num_layers)), layers - 1)
    return replace(model, num_layers=layers, first_k_dense_replace=dense)


def _round(size: float, step: int) -> int:
    return max(1, round(size / step)) * step
