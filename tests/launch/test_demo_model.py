"""The shipped demo model: format and size of its files, its tokenizer, and its held-out loss."""

import json
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from launch.demo.corpus import KINDS, Kind
from launch.demo.evaluate import SHIPPED_MODEL, held_out_losses, sample_streams
from launch.demo.export import SCALE_SUFFIX, WEIGHTS_FILE, load_dequantized
from launch.demo.tokenizer import BOS_ID, EOS_ID, PAD_ID
from moe_ep.fp8 import FP8, num_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_BYTES = 20_000_000
# Nats per byte; the shipped weights reach 1.70 and 1.35 on the same windows, and a broken tensor
# costs far more than the tenth of room. A uniform guess over bytes is 5.5.
MAX_LOSS: dict[Kind, float] = {"verse": 1.70, "code": 1.30}
PROMPTS_FILE = SHIPPED_MODEL.parent / "prompts.json"


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return load_file(SHIPPED_MODEL / WEIGHTS_FILE)


@pytest.fixture(scope="module")
def tokenizer() -> "PreTrainedTokenizerFast":
    return AutoTokenizer.from_pretrained(SHIPPED_MODEL)


def test_shipped_folder_is_small():
    assert sum(path.stat().st_size for path in SHIPPED_MODEL.iterdir()) <= MAX_BYTES


def test_every_fp8_weight_has_a_scale_per_block_and_no_scale_is_left_over(
    tensors: dict[str, torch.Tensor],
):
    quantized = {name for name, tensor in tensors.items() if tensor.dtype is FP8}
    scales = {name for name in tensors if name.endswith(SCALE_SUFFIX)}
    assert {name + SCALE_SUFFIX for name in quantized} == scales
    for name in quantized:
        scale = tensors[name + SCALE_SUFFIX]
        assert scale.dtype is torch.float32, name
        assert scale.shape == tuple(num_blocks(size) for size in tensors[name].shape), name
        assert scale.isfinite().all(), name
        assert (scale > 0).all(), name


def test_tensors_have_the_published_names_and_dtypes(tensors: dict[str, torch.Tensor]):
    config = json.loads((SHIPPED_MODEL / "config.json").read_text("utf-8"))
    moe_layers = range(config["first_k_dense_replace"], config["num_hidden_layers"])
    for layer in moe_layers:
        prefix = f"model.layers.{layer}.mlp"
        for expert in range(config["n_routed_experts"]):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                assert tensors[f"{prefix}.experts.{expert}.{projection}.weight"].dtype is FP8
        assert tensors[f"{prefix}.gate.weight"].dtype is torch.bfloat16
        assert tensors[f"{prefix}.gate.e_score_correction_bias"].dtype is torch.float32
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn"
        for projection in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
            assert tensors[f"{prefix}.{projection}.weight"].dtype is FP8
    others = [
        t.dtype for name, t in tensors.items() if name.endswith(("norm.weight", "head.weight"))
    ]
    assert set(others) == {torch.bfloat16}


def test_transformers_reads_the_config():
    config = AutoConfig.from_pretrained(SHIPPED_MODEL)
    assert config.architectures == ["DeepseekV3ForCausalLM"]
    assert config.quantization_config["weight_block_size"] == [128, 128]
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (
        BOS_ID,
        EOS_ID,
        PAD_ID,
    )


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200))
def test_tokenizer_gives_bytes_and_restores_any_text(
    tokenizer: "PreTrainedTokenizerFast", text: str
):
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode(ids) == text


def test_tokenizer_marks_the_end_and_joins_a_chat(tokenizer: "PreTrainedTokenizerFast"):
    assert tokenizer("<|eos|>")["input_ids"] == [EOS_ID]
    assert tokenizer.decode([65, EOS_ID, PAD_ID], skip_special_tokens=True) == "A"
    messages = [{"role": "user", "content": "To be"}, {"role": "assistant", "content": "or not"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "To be\n\nor not"


def test_prompts_are_short_and_of_both_kinds():
    prompts = json.loads(PROMPTS_FILE.read_text("utf-8"))
    assert all(60 <= len(entry["prompt"]) <= 300 for entry in prompts)
    for kind in KINDS:
        assert sum(entry["kind"] == kind for entry in prompts) == 15


def test_held_out_loss_of_the_shipped_weights():
    model = load_dequantized(SHIPPED_MODEL)
    losses = held_out_losses(model, sample_streams(), context=512, num_windows=8)
    for kind, bound in MAX_LOSS.items():
        assert losses[kind] < bound, losses
