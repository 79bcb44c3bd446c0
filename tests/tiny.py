"""Tiny random models of every family, made by ``transformers``, and their checkpoints on disk.

A checkpoint comes with its reference: the same model in float32 on the values as they are stored
(rounded to BF16 or FP8 and restored), so that a tolerance measures our code and not the rounding.
Built once per session; neither files nor models may be modified (copy the directory to break it).
"""

import atexit
import json
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging

from moe_ep.fp8 import dequantize_blocks, quantize_blocks

FAMILIES: dict[str, tuple[Any, Any]] = {
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
}
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}

# name -> family and what differs from SIZES; together they take every value of every model field.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "moonlight": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        },
    ),
    "v3-half-split": (
        "deepseek_v3",
        {
            "rope_interleave": False,
            "attention_bias": True,
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
            "v_head_dim": 24,
            "rope_parameters": YARN | {"beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "v3-tied": (
        "deepseek_v3",
        {"tie_word_embeddings": True, "first_k_dense_replace": 0, "rope_parameters": YARN},
    ),
    "v2": (
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "v2-lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "glm": (
        "glm4_moe_lite",
        {
            "n_group": 1,
            "topk_group": 1,
            "qk_nope_head_dim": 24,
            "v_head_dim": 32,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    # Several FP8 blocks in each direction, the last of them short.
    "v3-blocks": ("deepseek_v3", {"hidden_size": 320, "moe_intermediate_size": 160}),
}
# For the GPU kernels: sizes that the libraries accept, and a small one for Triton's interpreter.
GPU_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v3-wide": (
        "deepseek_v3",
        {
            "hidden_size": 2048,
            "intermediate_size": 256,
            "moe_intermediate_size": 128,
            "num_hidden_layers": 2,
            "q_lora_rank": 128,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "v3-steady": CASES["v3"],
}
_ALL_CASES = CASES | GPU_CASES
# Where every projection rounds its input to FP8, what the layers add to the stream is so noisy that
# near ties in the router would fall either way (in transformers too, when its inputs are rounded).
# An embedding that is the larger part of the stream steadies them.
_GPU_EMBEDDING_STD = 2.0


@dataclass(frozen=True)
class TinyCheckpoint:
    """path: directory in Hugging Face form. reference: float32, in eval mode."""

    path: Path
    reference: PreTrainedModel


def tiny_checkpoint(
    case: str, *, dtype: str = "float32", fp8: bool = False, num_shards: int = 1
) -> TinyCheckpoint:
    """The checkpoint of a case. dtype: of tensors that are not FP8. fp8: as DeepSeek-V3 ships."""
    return _build(case, dtype, fp8, num_shards)


@cache
def _build(case: str, dtype: str, fp8: bool, num_shards: int) -> TinyCheckpoint:
    root = _session_directory() / f"{case}-{dtype}-{fp8}-{num_shards}"
    source = _float32_directory(case)
    stored, restored = _convert(load_file(source / "model.safetensors"), dtype, fp8)
    config = json.loads((source / "config.json").read_text())
    _write(root / "stored", stored, config | {"dtype": dtype}, num_shards, fp8)
    _write(root / "restored", restored, config, 1, False)
    reference = FAMILIES[_ALL_CASES[case][0]][1].from_pretrained(
        root / "restored", dtype=torch.float32, attn_implementation="eager"
    )
    return TinyCheckpoint(root / "stored", reference.eval())


@cache
def _session_directory() -> Path:
    logging.disable_progress_bar()
    directory = Path(tempfile.mkdtemp(prefix="moe-ep-tiny-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@cache
def _float32_directory(case: str) -> Path:
    """The case as ``transformers`` itself saves it."""
    directory = _session_directory() / case
    family, differences = _ALL_CASES[case]
    config_class, model_class = FAMILIES[family]
    model = model_class(config_class(**SIZES | differences))
    _randomize(model)
    if case in GPU_CASES:
        embedding = model.get_input_embeddings().weight.data
        embedding.mul_(_GPU_EMBEDDING_STD / embedding.std())
    model.save_pretrained(directory)
    return directory


def _randomize(model: PreTrainedModel) -> None:
    """Weights that make every part matter: the default ones give nearly uniform logits."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                tensor.copy_(1.0 + 0.1 * noise)
            elif name.endswith("bias"):  # the router's too: it must change what is picked
                tensor.copy_(0.2 * noise)
            else:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)


def _convert(
    tensors: dict[str, torch.Tensor], dtype: str, fp8: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors as stored, and the float32 values that this stands for."""
    stored: dict[str, torch.Tensor] = {}
    restored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if fp8 and name.endswith(("proj.weight", "mqa.weight")):
            weight, scale = quantize_blocks(tensor)
            stored |= {name: weight, name + "_scale_inv": scale}
            restored[name] = dequantize_blocks(weight, scale, torch.float32)
        else:
            stored[name] = tensor.to(getattr(torch, dtype))
            restored[name] = stored[name].float()
    return stored, restored


def _write(
    directory: Path,
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    num_shards: int,
    fp8: bool,
) -> None:
    directory.mkdir(parents=True)
    extra = {"quantization_config": FP8_CONFIG} if fp8 else {}
    (directory / "config.json").write_text(json.dumps(config | extra))
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = names[shard::num_shards]  # an expert's tensors lie in different files
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
