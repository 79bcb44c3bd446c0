"""Write the trained demo model as a checkpoint in DeepSeek-V3's published form, and read it back.

Published form: one tensor per expert and projection; weights of the attention projections and of
all MLPs in FP8 (e4m3) with one float32 scale per 128x128 block, stored as `weight_scale_inv`, by
which the FP8 values are *multiplied*; router, norms, embedding and output head in BF16; the
router's correction bias in float32. This module knows names and formats only, nothing of training.
"""

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from launch.demo.architecture import model_config
from launch.demo.tokenizer import BOS_ID, EOS_ID, save_tokenizer
from moe_ep.fp8 import BLOCK, FP8, dequantize_blocks, quantize_blocks

if TYPE_CHECKING:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

SCALE_SUFFIX = "_scale_inv"
WEIGHTS_FILE = "model.safetensors"
QUANTIZED = re.compile(
    r"\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|gate_proj|up_proj|down_proj)\.weight$"
)
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
# In DeepSeek-V3's config.json under these names, and in the configuration class of `transformers`.
CONFIG_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "n_shared_experts",
    "n_routed_experts",
    "routed_scaling_factor",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_rope_head_dim",
    "v_head_dim",
    "qk_nope_head_dim",
    "n_group",
    "topk_group",
    "num_experts_per_tok",
    "first_k_dense_replace",
    "norm_topk_prob",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
    "use_cache",
)


def split_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """From `transformers`' stacked experts to one tensor per expert and projection."""
    split: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name.endswith(".experts.gate_up_proj"):
            prefix = name.removesuffix(".gate_up_proj")
            for expert, gate_up in enumerate(tensor):  # [2I, H]: gate first
                gate, up = gate_up.chunk(2)
                split[f"{prefix}.{expert}.gate_proj.weight"] = gate
                split[f"{prefix}.{expert}.up_proj.weight"] = up
        elif name.endswith(".experts.down_proj"):
            prefix = name.removesuffix(".down_proj")
            for expert, down in enumerate(tensor):  # [H, I]
                split[f"{prefix}.{expert}.down_proj.weight"] = down
        else:
            split[name] = tensor
    return split


def stack_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `split_experts`."""
    stacked: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for name, tensor in state.items():
        if match := EXPERT.match(name):
            prefix, expert, projection = match.groups()
            parts.setdefault(prefix, {}).setdefault(projection, {})[int(expert)] = tensor
        else:
            stacked[name] = tensor
    for prefix, projections in parts.items():
        by_expert = {
            projection: torch.stack([tensors[expert] for expert in range(len(tensors))])
            for projection, tensors in projections.items()
        }
        gate_up = torch.cat([by_expert["gate_proj"], by_expert["up_proj"]], dim=1)
        stacked[f"{prefix}.gate_up_proj"] = gate_up
        stacked[f"{prefix}.down_proj"] = by_expert["down_proj"]
    return stacked


def quantize_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """From float32 weights under `transformers`' names to the tensors of the published form."""
    published: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(split_experts(state).items()):
        if QUANTIZED.search(name):
            published[name], published[name + SCALE_SUFFIX] = quantize_blocks(tensor)
        elif name.endswith(".e_score_correction_bias"):
            published[name] = tensor.float()
        else:
            published[name] = tensor.bfloat16()
    return published


def dequantize_state(published: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `quantize_state` up to rounding, all float32."""
    restored: dict[str, torch.Tensor] = {}
    for name, tensor in published.items():
        if name.endswith(SCALE_SUFFIX):
            continue
        if tensor.dtype is FP8:
            restored[name] = dequantize_blocks(
                tensor, published[name + SCALE_SUFFIX], torch.float32
            )
        else:
            restored[name] = tensor.float()
    return stack_experts(restored)


def config_dict(config: "DeepseekV3Config") -> dict[str, Any]:
    """The contents of `config.json`."""
    values = config.to_dict() | {"n_routed_experts": config.n_routed_experts}
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **{key: values[key] for key in CONFIG_KEYS},
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "rope_theta": values["rope_parameters"]["rope_theta"],
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "activation_scheme": "dynamic",
        },
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export(state: dict[str, torch.Tensor], config: "DeepseekV3Config", out: Path) -> None:
    """Write weights, configs and tokenizer into `out`, over what was there under these names."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    partial = out / (WEIGHTS_FILE + ".partial")
    save_file(quantize_state(state), partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors writes for the owner alone
    partial.replace(out / WEIGHTS_FILE)
    write_json(out / "config.json", config_dict(config))
    write_json(out / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    save_tokenizer(out, max_length=config.max_position_embeddings)


def load_dequantized(directory: Path) -> "DeepseekV3ForCausalLM":
    """An exported checkpoint as a float32 model of `transformers`, in evaluation mode.

    Every tensor of the file must have its place in the model and every parameter its tensor.
    """
    from safetensors.torch import load_file
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    values = json.loads((directory / "config.json").read_text("utf-8"))
    del values["quantization_config"], values["torch_dtype"]
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**values))
    model.load_state_dict(dequantize_state(load_file(directory / WEIGHTS_FILE)), strict=True)
    return model.float().eval()


def main() -> None:
    from safetensors.torch import load_file

    from launch.demo.train import WEIGHTS_FILE as TRAINED_WEIGHTS_FILE

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trained", type=Path, required=True, help="folder that training wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    args = parser.parse_args()
    export(load_file(args.trained / TRAINED_WEIGHTS_FILE), model_config(), args.out)


if __name__ == "__main__":
    main()
