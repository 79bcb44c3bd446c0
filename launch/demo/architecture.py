"""Shape and initial weights of the demo model, built from `transformers`' own DeepSeek-V3.

What the engine serves is thereby checked against code that this project does not own.
"""

from typing import TYPE_CHECKING

import torch

from launch.demo.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

if TYPE_CHECKING:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

MAX_CONTEXT = 1024


def model_config() -> "DeepseekV3Config":
    """DeepSeek-V3's shape at 15 million parameters; widths are multiples of the FP8 block."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        moe_intermediate_size=128,
        num_hidden_layers=5,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        n_routed_experts=32,
        n_shared_experts=1,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        num_mtp_layers=0,
        max_position_embeddings=MAX_CONTEXT,
        initializer_range=0.05,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def build_model(seed: int) -> "DeepseekV3ForCausalLM":
    """A fresh float32 model. Outputs into the residual stream start small, the embedding large."""
    from transformers import DeepseekV3ForCausalLM

    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(model_config())
    residual_scale = (2 * model.config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.mul_(residual_scale)
        model.model.embed_tokens.weight.normal_(std=0.3)
        model.lm_head.weight.normal_(std=0.02)
    # The fastest of transformers' implementations for training in BF16 on a CPU, by measurement.
    model.set_experts_implementation("grouped_mm")
    return model
