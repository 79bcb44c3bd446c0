"""Reading config.json field by field: typed, with a family's defaults, problems collected.

``FAMILY_DEFAULTS`` are those of ``transformers``' config classes of the same name; a test compares.
"""

from collections.abc import Mapping
from typing import Any

from moe_ep.config.problems import Problem

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_interleave": True,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}

FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": _COMMON
    | {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "deepseek_v2": _COMMON
    | {
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "moe_intermediate_size": 1407,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": 1536,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": None,
        "topk_group": None,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "scoring_func": "softmax",
        "topk_method": "greedy",
    },
    "glm4_moe_lite": _COMMON
    | {
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "n_shared_experts": 1,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "v_head_dim": 256,
        "qk_nope_head_dim": 192,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
}
FAMILY_DEFAULTS["kimi_k2"] = FAMILY_DEFAULTS["deepseek_v3"]

# Under an unknown name only what every published file leaves out at times has a default.
_UNKNOWN_DEFAULTS = {
    key: _COMMON[key]
    for key in ("attention_bias", "tie_word_embeddings", "rope_theta", "rope_interleave")
}

# Fields that no model of ours sets; each belongs to an architecture that computes otherwise.
_GIVE_AWAYS = {
    "index_topk": "sparse attention (DSA)",
    "index_n_heads": "sparse attention (DSA)",
    "hc_mult": "hyper-connections (DeepSeek-V4)",
    "o_groups": "a grouped output projection (DeepSeek-V4)",
    "compress_ratios": "compressed attention (DeepSeek-V4)",
    "compress_rates": "compressed attention (DeepSeek-V4)",
    "num_hash_layers": "hash routing (DeepSeek-V4)",
    "swiglu_limit": "clipped SwiGLU",
    "linear_attn_config": "linear attention",
    "full_attention_interval": "linear attention",
    "linear_conv_kernel_dim": "linear attention",
    "sliding_window": "sliding-window attention",
    "gated_mla": "gated attention",
    "learnable_sink": "attention sinks",
    "use_qk_norm": "norms on queries and keys",
    "zero_expert_num": "zero-computation experts",
    "scale_emb": "scaled embeddings",
}


def family_defaults(model_type: object) -> Mapping[str, Any]:
    """Defaults for fields that a config.json of this type left out."""
    return FAMILY_DEFAULTS.get(str(model_type), _UNKNOWN_DEFAULTS)


class FieldReader:
    """Typed access to one JSON object. A bad value adds a problem and yields a stand-in, so that
    one pass finds every problem; the values count only if ``problems`` stays empty."""

    def __init__(
        self, given: Mapping[str, Any], defaults: Mapping[str, Any], *, prefix: str = ""
    ) -> None:
        self.given = given
        self.problems: list[Problem] = []
        self._defaults = defaults
        self._prefix = prefix

    def get(self, name: str) -> Any:
        """The value given (null included), else the default, else None."""
        return self.given.get(name, self._defaults.get(name))

    def refuse(self, name: str, allowed: str, fix: str) -> None:
        problem = Problem(self._prefix + name, self.get(name), allowed, fix)
        if problem.field not in (known.field for known in self.problems):
            self.problems.append(problem)

    def optional_integer(self, name: str, *, minimum: int = 1) -> int | None:
        return None if self.get(name) is None else self.integer(name, minimum=minimum)

    def integer(self, name: str, *, minimum: int = 1) -> int:
        value = self.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
            return value
        self.refuse(name, f"an integer of at least {minimum}", "The model needs this field.")
        return minimum

    def optional_real(self, name: str) -> float | None:
        return None if self.get(name) is None else self.real(name)

    def real(self, name: str) -> float:
        value = self.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            return float(value)
        self.refuse(name, "a number of at least 0", "The model needs this field.")
        return 1.0

    def boolean(self, name: str) -> bool:
        value = self.get(name)
        if isinstance(value, bool):
            return value
        self.refuse(name, "true or false", "The model needs this field.")
        return False

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self.get(name)
        if value in allowed:
            return str(value)
        self.refuse(name, " or ".join(allowed), "Nothing else is implemented.")
        return allowed[0]


def unsupported(text: Mapping[str, Any]) -> list[Problem]:
    """Fields that tell another architecture; an empty list means an MLA decoder of ours."""
    allowed = "MLA over the whole context with SwiGLU experts"
    found = [
        Problem(name, text[name], "absent or null", f"This model has {what}; ours has {allowed}.")
        for name, what in _GIVE_AWAYS.items()
        if text.get(name) not in (None, [], {}, 0)
    ]
    layer_types = text.get("layer_types") or ["full_attention"]
    if others := sorted({str(kind) for kind in layer_types} - {"full_attention"}):
        fix = f"This model has other attention in some layers; ours has {allowed}."
        found.append(Problem("layer_types", others, "full_attention everywhere", fix))
    reader = FieldReader(text, family_defaults(text.get("model_type")))
    if reader.get("kv_lora_rank") is None and not found:
        name = "num_key_value_heads" if text.get("num_key_value_heads") else "kv_lora_rank"
        fix = "This model has ordinary (grouped-query) attention; choose an MLA model."
        found.append(Problem(name, text.get(name), "MLA, which has kv_lora_rank", fix))
    if reader.get("hidden_act") not in (None, "silu"):
        reader.refuse("hidden_act", "silu", "Experts and dense layers are SwiGLU.")
    if text.get("mlp_bias"):
        reader.refuse("mlp_bias", "false", "Experts and dense layers have no bias.")
    if not _is_every_layer(text.get("moe_layer_freq", 1), text):
        reader.refuse("moe_layer_freq", "1", "Every layer after the dense ones has experts.")
    return found + reader.problems


def _is_every_layer(freq: object, text: Mapping[str, Any]) -> bool:
    """``moe_layer_freq`` is 1, or a list with 0 for the first dense layers and 1 for the others."""
    if not isinstance(freq, list):
        return freq in (None, 1)
    dense = freq.count(0)
    is_split = freq == [0] * dense + [1] * (len(freq) - dense)
    return is_split and text.get("first_k_dense_replace", dense) == dense


def read_quantization(reader: FieldReader) -> str | None:
    """``fp8`` for e4m3 weights in 128x128 blocks with dynamic activations, None for no entry."""
    given = reader.get("quantization_config")
    if given is None:
        return None
    if not isinstance(given, dict):
        reader.refuse("quantization_config", "an object or null", "Check the file.")
        return None
    quant = FieldReader(given, {}, prefix="quantization_config.")
    method = quant.get("quant_method")
    fix = "Use a BF16 or a block-FP8 checkpoint of this model."
    if method == "compressed-tensors":
        _check_compressed_tensors(quant, fix)
    elif method != "fp8":
        quant.refuse("quant_method", "fp8", fix)
    else:
        if quant.get("weight_block_size") != [128, 128]:
            quant.refuse("weight_block_size", "[128, 128]", fix)
        if quant.get("activation_scheme") not in (None, "dynamic"):
            quant.refuse("activation_scheme", "dynamic", fix)
        if quant.get("fmt") not in (None, "e4m3"):
            quant.refuse("fmt", "e4m3", fix)
    reader.problems += quant.problems
    return "fp8"


def _check_compressed_tensors(quant: FieldReader, fix: str) -> None:
    wanted = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    groups = quant.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if groups else [None]
    if any((given or {}).get(key) != value for given in weights for key, value in wanted.items()):
        quant.refuse("config_groups", "float 8-bit weights in 128x128 blocks", fix)
