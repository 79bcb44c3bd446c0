"""The model as its config.json describes it, decided by fields and not by an allow-list of names.

A model is ours when it has MLA (``kv_lora_rank``) and routed experts. A family's name only fills
in fields that its config.json left out, with the defaults of ``transformers``' config classes;
under an unknown name every field must be there. Anything that this decoder would compute
differently is refused by the field that gives it away. Weights and ranks are unknown here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ep.config.fields import FieldReader, family_defaults, read_quantization, unsupported
from moe_ep.config.problems import ConfigError, Problem
from moe_ep.config.rope import YarnConfig, read_rotary

GEOMETRIES = Path(__file__).parent.parent / "geometries"
SCORING_OF = {"noaux_tc": "sigmoid", "greedy": "softmax", "group_limited_greedy": "softmax"}


@dataclass(frozen=True)
class ModelConfig:
    """Everything about a model that its weights' shapes and its arithmetic depend on.

    num_layers: decoder layers, without multi-token-prediction layers. num_experts: routed, logical.
    dtype: of the checkpoint's unquantised weights, ``bfloat16``, ``float16`` or ``float32``.
    quantization: ``fp8`` (e4m3 weights with one scale per 128x128 block) or None.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    n_group: int
    topk_group: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    first_k_dense_replace: int
    rms_norm_eps: float
    rope_theta: float
    rope_interleave: bool
    yarn: YarnConfig | None
    attention_bias: bool
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    quantization: str | None

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.first_k_dense_replace

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values cached per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def latent_norm_eps(self) -> float:
        """Epsilon of the norms of the query and key-value latents: 1e-6 in every family's
        published code, whatever ``rms_norm_eps`` is."""
        return 1e-6

    @property
    def router_groups(self) -> tuple[int, int]:
        """Groups of experts, and of how many of them a token's experts are: 1 and 1 for a router
        that knows none, whatever ``n_group`` is."""
        return (1, 1) if self.topk_method == "greedy" else (self.n_group, self.topk_group)

    @property
    def softmax_scale(self) -> float:
        """``qk_head_dim ** -0.5``, times YaRN's mscale squared when ``mscale_all_dim`` is set."""
        scale = self.qk_head_dim**-0.5
        if self.yarn is None or self.yarn.mscale_all_dim is None:
            return scale
        return scale * self.yarn.scale_for(self.yarn.mscale_all_dim) ** 2

    @classmethod
    def from_path(cls, path: str | Path) -> "ModelConfig":
        """Read a checkpoint directory, a config.json, or the name of a built-in geometry.

        ``eos_token_id`` of a generation_config.json next to it counts too. ConfigError when nothing
        is there, when it is not JSON, and for everything that ``from_dict`` refuses.
        """
        file = _config_file(path)
        config = _read_json(file)
        generation = file.with_name("generation_config.json")
        extra = _read_json(generation).get("eos_token_id") if generation.exists() else None
        return cls.from_dict(config, extra_eos=extra)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, extra_eos: object = None) -> "ModelConfig":
        """Parse a config.json. Of a multimodal one, the language model under ``text_config``.

        extra_eos: further end-of-sequence ids (an id, a list, or None). Raises ConfigError with
        every problem at once.
        """
        text = _language_model(config)
        reader = FieldReader(text, family_defaults(text.get("model_type")))
        if problems := unsupported(text):
            raise ConfigError(problems)
        values = _sizes(reader) | _routing(reader) | read_rotary(reader) | _rest(reader)
        values["eos_token_ids"] = _token_ids(reader, "eos_token_id", reader.get("eos_token_id"))
        values["eos_token_ids"] += tuple(
            i
            for i in _token_ids(reader, "eos_token_id", extra_eos)
            if i not in values["eos_token_ids"]
        )
        if reader.problems:
            raise ConfigError(reader.problems)
        return cls(**values)


def geometry_names() -> list[str]:
    """Names that stand for a published model's sizes, for ``--load-format dummy``."""
    return sorted(file.stem for file in GEOMETRIES.glob("*.json"))


def _config_file(path: str | Path) -> Path:
    given = Path(path)
    file = given / "config.json" if given.is_dir() else given
    if file.is_file():
        return file
    if str(path) in geometry_names():
        return GEOMETRIES / f"{path}.json"
    allowed = f"a directory with a config.json, or one of {', '.join(geometry_names())}"
    raise ConfigError([Problem("model", str(path), allowed, f"There is no file {file}.")])


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fix = "Fetch the file again."
        raise ConfigError([Problem(str(file), str(error), "readable JSON", fix)]) from error
    if not isinstance(value, dict):
        fix = "Fetch the file again."
        raise ConfigError([Problem(str(file), type(value).__name__, "a JSON object", fix)])
    return value


def _language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part about the language model, with what a multimodal file says once, on top."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return dict(config)
    shared = ("quantization_config", "dtype", "torch_dtype", "eos_token_id", "bos_token_id")
    return {key: config[key] for key in shared if config.get(key) is not None} | text


def _sizes(reader: FieldReader) -> dict[str, Any]:
    names = (
        "vocab_size", "hidden_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
        "v_head_dim", "intermediate_size", "moe_intermediate_size", "num_experts_per_tok",
        "max_position_embeddings",
    )  # fmt: skip
    values: dict[str, Any] = {name: reader.integer(name) for name in names}
    values["num_layers"] = reader.integer("num_hidden_layers")
    values["num_heads"] = reader.integer("num_attention_heads")
    values["q_lora_rank"] = reader.optional_integer("q_lora_rank")
    values["num_experts"] = reader.integer("n_routed_experts")
    values["num_shared_experts"] = reader.optional_integer("n_shared_experts", minimum=0) or 0
    values["first_k_dense_replace"] = _num_dense_layers(reader, values["num_layers"])
    if values["qk_rope_head_dim"] % 2:
        reader.refuse("qk_rope_head_dim", "an even number", "Rotary embedding turns pairs.")
    return values


def _num_dense_layers(reader: FieldReader, num_layers: int) -> int:
    """Dense layers come first; ``mlp_layer_types`` says the same layer by layer."""
    types = reader.get("mlp_layer_types")
    if types is None:
        count = reader.integer("first_k_dense_replace", minimum=0)
    else:
        count = types.count("dense") if isinstance(types, list) else 0
        if types != ["dense"] * count + ["sparse"] * (num_layers - count):
            reader.refuse(
                "mlp_layer_types", f"{num_layers} entries, 'dense' first and then 'sparse'",
                "This decoder has its dense layers first.",
            )  # fmt: skip
        elif reader.given.get("first_k_dense_replace", count) != count:
            reader.refuse("first_k_dense_replace", f"{count}, as in mlp_layer_types", "Drop one.")
    if count >= num_layers:
        reader.refuse(
            "first_k_dense_replace", f"0 to {num_layers - 1}", "One layer must have experts."
        )
    return count


def _routing(reader: FieldReader) -> dict[str, Any]:
    method = reader.choice("topk_method", tuple(SCORING_OF))
    scoring = reader.choice("scoring_func", ("sigmoid", "softmax"))
    if scoring != SCORING_OF[method]:
        reader.refuse("scoring_func", SCORING_OF[method], f"topk_method is {method!r}.")
    experts = reader.integer("n_routed_experts")
    top_k = reader.integer("num_experts_per_tok")
    n_group = reader.optional_integer("n_group") or 1
    topk_group = reader.optional_integer("topk_group") or 1
    smallest = 2 if method == "noaux_tc" and n_group > 1 else 1  # groups rank by their best two
    if experts % n_group or experts // n_group < smallest:
        reader.refuse("n_group", f"a divisor of n_routed_experts ({experts})", "Check both fields.")
    elif topk_group > n_group:
        reader.refuse("topk_group", f"1 to n_group ({n_group})", "Check both fields.")
    elif top_k > (experts if method == "greedy" else experts // n_group * topk_group):
        reader.refuse("num_experts_per_tok", "at most the experts of the kept groups", "Check it.")
    return {
        "topk_method": method,
        "scoring_func": scoring,
        "n_group": n_group,
        "topk_group": topk_group,
        "norm_topk_prob": reader.boolean("norm_topk_prob"),
        "routed_scaling_factor": reader.real("routed_scaling_factor"),
    }


def _rest(reader: FieldReader) -> dict[str, Any]:
    quantization = read_quantization(reader)
    dtype = str(reader.get("dtype") or reader.get("torch_dtype") or "float32")
    if dtype not in ("bfloat16", "float16", "float32"):
        reader.refuse("dtype", "bfloat16, float16 or float32", "Convert the checkpoint.")
    return {
        "model_type": str(reader.get("model_type")),
        "rms_norm_eps": reader.real("rms_norm_eps"),
        "attention_bias": reader.boolean("attention_bias"),
        "tie_word_embeddings": reader.boolean("tie_word_embeddings"),
        "bos_token_id": reader.optional_integer("bos_token_id", minimum=0),
        "dtype": dtype,
        "quantization": quantization,
    }


def _token_ids(reader: FieldReader, name: str, value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        return tuple(ids)
    reader.refuse(name, "a token id, a list of them, or null", "Check the file.")
    return ()
