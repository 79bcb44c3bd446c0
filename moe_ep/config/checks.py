"""Conflicts between flags and model, each as a Problem; checks are independent of each other."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from moe_ep.config.model import ModelConfig, geometry_names
from moe_ep.config.problems import Problem

if TYPE_CHECKING:
    from moe_ep.config.engine import EngineConfig

_AT_LEAST_ONE = (
    "ep_size", "attn_dp_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "num_kv_blocks", "tbo_token_threshold", "eplb_rebalance_num_iterations", "eplb_bytes_per_step",
    "expert_distribution_recorder_buffer_size",
)  # fmt: skip
_AT_LEAST_ZERO = (
    "seed",
    "ep_num_redundant_experts",
    "step_time_interval",
    "eplb_node_traffic_price",
)


def find_problems(engine: "EngineConfig", model: ModelConfig | None) -> list[Problem]:
    """Everything that stops this engine from running this model, in the order of the flags.

    model: None when its config could not be read; then only what the flags alone tell. A field
    with a value of the wrong kind takes no part in the checks that combine fields.
    """
    problems = _field_problems(engine)
    bad = {problem.field for problem in problems}

    def usable(*names: str) -> bool:
        return not bad.intersection(names)

    if usable("model", "load_format"):
        problems += _source(engine)
    if usable("ep_size", "attn_dp_size"):
        problems += _attention_groups(engine)
    if usable("init_expert_location"):
        problems += _initial_location(engine)
    if usable("ep_size", "enable_eplb"):
        problems += _eplb(engine)
    if usable("ep_size", "moe_a2a_backend"):
        problems += _exchange(engine)
    if usable("max_num_seqs", "max_num_batched_tokens"):
        problems += _token_budget(engine)
    if usable("enable_two_batch_overlap", "tbo_token_threshold"):
        problems += _overlap(engine)
    if usable("cuda_graph_bs", "enforce_eager", "max_num_seqs"):
        problems += _graphs(engine)
    if model is not None:
        if usable("ep_size", "ep_num_redundant_experts"):
            problems += _expert_slots(engine, model)
        if usable("max_model_len"):
            problems += _context(engine, model)
        if usable("dtype", "ep_dispatch_dtype", "kv_cache_dtype"):
            problems += _dtypes(engine, model)
    order = [field.name for field in dataclasses.fields(engine)]
    return sorted(problems, key=lambda problem: order.index(problem.field))


def _field_problems(engine: "EngineConfig") -> list[Problem]:
    """Each flag by itself: kind of value, valid names, range."""
    problems = []
    for field in dataclasses.fields(engine):
        value = getattr(engine, field.name)
        allowed = _why_not(field, value)
        if allowed is not None:
            option = "--" + field.name.replace("_", "-")
            problems.append(Problem(field.name, value, allowed, f"Change {option}."))
    return problems


def _why_not(field: "dataclasses.Field[Any]", value: object) -> str | None:
    """What the flag accepts, when it does not accept the value."""
    if not _is_a(value, field.type):
        return f"a value of type {getattr(field.type, '__name__', field.type)}"
    if value is None:
        return None
    choices = field.metadata["choices"]
    if choices and value not in choices:
        return ", ".join(choices)
    number: Any = value
    if field.name in _AT_LEAST_ONE and number < 1:
        return "at least 1"
    if field.name in _AT_LEAST_ZERO and not 0 <= number < float("inf"):
        return "at least 0"
    if field.name == "eplb_min_rebalancing_utilization_threshold" and not 0 <= number <= 1:
        return "at least 0 and at most 1"
    if field.name == "gpu_memory_utilization" and not 0 < number <= 1:
        return "above 0 and at most 1"
    if field.name == "watchdog_timeout_s" and not 0 < number < float("inf"):
        return "above 0 and finite"
    return None


def _is_a(value: object, kind: Any) -> bool:
    """isinstance for the annotations in use; a bool is no number, an int is a float too."""
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_a(item, get_args(kind)[0]) for item in value)
    if options := get_args(kind):
        return any(_is_a(value, option) for option in options)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def _source(engine: "EngineConfig") -> list[Problem]:
    """Weights must come from somewhere; the tokenizer too, if one is named."""
    problems = []
    path = Path(engine.model)
    if engine.load_format != "dummy" and not any(path.glob("*.safetensors")):
        allowed = "a directory with *.safetensors files"
        fix = "Name such a directory, or use --load-format dummy for random weights."
        if path.is_dir() or engine.model in geometry_names():
            problems.append(Problem("model", engine.model, allowed, fix))
    if engine.tokenizer is not None and not Path(engine.tokenizer).exists():
        fix = "Name one, or leave it out to use the model's."
        problems.append(Problem("tokenizer", engine.tokenizer, "an existing directory", fix))
    return problems


def _attention_groups(engine: "EngineConfig") -> list[Problem]:
    if engine.attn_dp_size in (None, engine.ep_size):
        return []
    fix = "Leave it out: tensor-parallel attention is not implemented."
    allowed = f"{engine.ep_size}, the EP size"
    return [Problem("attn_dp_size", engine.attn_dp_size, allowed, fix)]


def _initial_location(engine: "EngineConfig") -> list[Problem]:
    """Whether the file fits is known once it is read."""
    location = engine.init_expert_location
    if location == "trivial" or Path(location).is_file():
        return []
    fix = "moe-ep eplb place writes such a file."
    return [Problem("init_expert_location", location, "trivial or an existing file", fix)]


def _eplb(engine: "EngineConfig") -> list[Problem]:
    if not engine.enable_eplb or engine.ep_size > 1:
        return []
    fix = "One rank has nothing to balance: leave it out, or raise --ep-size."
    return [Problem("enable_eplb", True, "an ep_size of at least 2", fix)]


def _exchange(engine: "EngineConfig") -> list[Problem]:
    if engine.moe_a2a_backend != "local" or engine.ep_size == 1:
        return []
    fix = f"local cannot reach other ranks, and the EP size is {engine.ep_size}."
    return [Problem("moe_a2a_backend", "local", "auto, deepep, deepep_v2 or collective", fix)]


def _token_budget(engine: "EngineConfig") -> list[Problem]:
    if engine.max_num_batched_tokens >= engine.max_num_seqs:
        return []
    allowed = f"at least max_num_seqs ({engine.max_num_seqs})"
    fix = "Every running request needs one token of the step; raise it or lower --max-num-seqs."
    return [Problem("max_num_batched_tokens", engine.max_num_batched_tokens, allowed, fix)]


def _overlap(engine: "EngineConfig") -> list[Problem]:
    threshold = engine.tbo_token_threshold
    if engine.enable_two_batch_overlap or threshold is None:
        return []
    fix = "Or add --enable-two-batch-overlap."
    allowed = "nothing without enable_two_batch_overlap"
    return [Problem("tbo_token_threshold", threshold, allowed, fix)]


def _graphs(engine: "EngineConfig") -> list[Problem]:
    sizes = engine.cuda_graph_bs
    if not sizes:
        return []
    problems = []
    if engine.enforce_eager:
        fix = "Give only one of --enforce-eager and --cuda-graph-bs."
        problems.append(Problem("cuda_graph_bs", sizes, "nothing with enforce_eager", fix))
    if sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
        fix = "List each size once."
        problems.append(Problem("cuda_graph_bs", sizes, "positive, in rising order", fix))
    elif sizes[-1] > engine.max_num_seqs:
        allowed = f"at most max_num_seqs ({engine.max_num_seqs})"
        fix = "No decode step has more tokens; lower it or raise --max-num-seqs."
        problems.append(Problem("cuda_graph_bs", sizes, allowed, fix))
    return problems


def _expert_slots(engine: "EngineConfig", model: ModelConfig) -> list[Problem]:
    """Slots divide evenly over ranks, and no rank holds two replicas of one expert."""
    experts, ranks = model.num_experts, engine.ep_size
    redundant = engine.ep_num_redundant_experts
    problems = []
    if (experts + redundant) % ranks:
        allowed = f"a divisor of {experts + redundant} ({experts} experts + {redundant} redundant)"
        missing = -(experts + redundant) % ranks
        fix = f"Or use --ep-num-redundant-experts {redundant + missing}."
        problems.append(Problem("ep_size", ranks, allowed, fix))
    most = experts * (ranks - 1)
    if redundant > most:
        allowed = f"at most {most} ({experts} experts on {ranks} ranks)"
        fix = "With more, two replicas of one expert would share a rank."
        problems.append(Problem("ep_num_redundant_experts", redundant, allowed, fix))
    return problems


def _context(engine: "EngineConfig", model: ModelConfig) -> list[Problem]:
    limit = model.max_position_embeddings
    if engine.max_model_len is None or engine.max_model_len <= limit:
        return []
    fix = "The model knows no positions beyond max_position_embeddings."
    return [Problem("max_model_len", engine.max_model_len, f"at most {limit}", fix)]


def _dtypes(engine: "EngineConfig", model: ModelConfig) -> list[Problem]:
    """Tokens travel and are cached in the compute type, or travel as FP8."""
    dtype = engine.compute_dtype(model)
    problems = []
    if engine.ep_dispatch_dtype not in ("auto", "fp8", dtype):
        fix = f"The compute type is {dtype}."
        given = engine.ep_dispatch_dtype
        problems.append(Problem("ep_dispatch_dtype", given, f"auto, fp8 or {dtype}", fix))
    if engine.kv_cache_dtype not in ("auto", dtype):
        fix = f"The compute type is {dtype}."
        problems.append(Problem("kv_cache_dtype", engine.kv_cache_dtype, f"auto or {dtype}", fix))
    return problems
