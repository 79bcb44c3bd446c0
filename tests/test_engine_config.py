"""The engine's flags: conflicts among them and with the model, and what "auto" becomes."""

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_ep.config import ConfigError, EngineConfig, ModelConfig, find_problems, validate

GEOMETRY = Path(__file__).parents[1] / "moe_ep/geometries/deepseek-v3.json"
MODEL = ModelConfig.from_path(GEOMETRY)
CONFLICTS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"ep_size": 64, "ep_num_redundant_experts": 64, "max_model_len": 163840}, []),
    ({"ep_size": 2, "ep_num_redundant_experts": 256}, []),  # every expert on both ranks
    ({"ep_size": 3}, ["ep_size"]),
    ({"ep_size": 2, "ep_num_redundant_experts": 258}, ["ep_num_redundant_experts"]),
    ({"ep_num_redundant_experts": 1}, ["ep_num_redundant_experts"]),
    ({"ep_size": 0}, ["ep_size"]),
    ({"ep_size": "2"}, ["ep_size"]),
    ({"ep_size": True}, ["ep_size"]),
    ({"ep_num_redundant_experts": -1}, ["ep_num_redundant_experts"]),
    ({"ep_size": 4, "attn_dp_size": 2}, ["attn_dp_size"]),
    ({"ep_size": 4, "attn_dp_size": 4}, []),
    ({"ep_size": 2, "moe_a2a_backend": "local"}, ["moe_a2a_backend"]),
    ({"moe_a2a_backend": "collective"}, []),
    ({"moe_a2a_backend": "nccl"}, ["moe_a2a_backend"]),
    ({"moe_a2a_backend": "deepep", "ep_size": 2}, []),  # whether it runs is asked of the backend
    ({"deepep_mode": "fast"}, ["deepep_mode"]),
    ({"max_model_len": 163841}, ["max_model_len"]),
    ({"max_num_seqs": 64, "max_num_batched_tokens": 63}, ["max_num_batched_tokens"]),
    ({"num_kv_blocks": 0}, ["num_kv_blocks"]),
    ({"gpu_memory_utilization": 0.0}, ["gpu_memory_utilization"]),
    ({"gpu_memory_utilization": 1}, []),
    ({"watchdog_timeout_s": float("inf")}, ["watchdog_timeout_s"]),
    ({"watchdog_timeout_s": float("nan")}, ["watchdog_timeout_s"]),
    ({"dtype": "float16"}, ["dtype"]),
    ({"ep_dispatch_dtype": "float32"}, ["ep_dispatch_dtype"]),
    ({"dtype": "float32", "ep_dispatch_dtype": "float32", "kv_cache_dtype": "float32"}, []),
    ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, ["kv_cache_dtype"]),
    ({"tbo_token_threshold": 8}, ["tbo_token_threshold"]),  # of what is not enabled
    ({"tbo_token_threshold": 0, "enable_two_batch_overlap": True}, ["tbo_token_threshold"]),
    ({"tbo_token_threshold": 8, "enable_two_batch_overlap": True}, []),
    ({"cuda_graph_bs": (1, 2, 8)}, []),
    ({"cuda_graph_bs": (2, 1)}, ["cuda_graph_bs"]),
    ({"cuda_graph_bs": (0, 1)}, ["cuda_graph_bs"]),
    ({"cuda_graph_bs": (1,), "enforce_eager": True}, ["cuda_graph_bs"]),
    ({"cuda_graph_bs": (8, 16), "max_num_seqs": 8}, ["cuda_graph_bs"]),
    ({"tokenizer": "/nowhere"}, ["tokenizer"]),
    ({"load_format": "safetensors"}, ["model"]),  # a built-in geometry has no weights
    ({"load_format": "auto"}, ["model"]),
]


@pytest.mark.parametrize(("flags", "fields"), CONFLICTS)
def test_conflicts_between_flags_and_model(flags: dict[str, Any], fields: list[str]):
    engine = EngineConfig(**{"model": "deepseek-v3", "load_format": "dummy"} | flags)
    assert [problem.field for problem in find_problems(engine, MODEL)] == fields


def test_independent_problems_come_at_once_in_the_order_of_the_flags(tmp_path: Path):
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads(GEOMETRY.read_text()) | {"n_group": 7})
    )
    flags: dict[str, Any] = {
        "ep_size": 2,
        "attn_dp_size": 1,
        "moe_a2a_backend": "local",
        "seed": -1,
    }
    with pytest.raises(ConfigError) as caught:
        validate(EngineConfig(model=str(tmp_path), dtype="half", max_num_seqs=0, **flags))
    fields = [
        "n_group",
        "model",
        "dtype",
        "seed",
        "attn_dp_size",
        "moe_a2a_backend",
        "max_num_seqs",
    ]
    assert [problem.field for problem in caught.value.problems] == fields
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.problems) == (str(caught.value), caught.value.problems)


def test_a_model_that_is_not_there_lists_the_built_in_ones():
    with pytest.raises(ConfigError, match=r"glm-4\.7-flash"):
        validate(EngineConfig(model="/nowhere", load_format="dummy"))


RESOLVED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {"dtype": "bfloat16", "ep_dispatch_dtype": "fp8"}),
    ({"quantization": None, "dtype": "float16"}, {}, {"dtype": "bfloat16"}),
    ({"quantization": None}, {}, {"ep_dispatch_dtype": "bfloat16"}),
    ({"quantization": None}, {"ep_size": 4}, {"ep_dispatch_dtype": "fp8"}),
    ({"quantization": None, "dtype": "float32"}, {}, {"dtype": "float32"}),
    ({"quantization": None, "dtype": "float32"}, {}, {"ep_dispatch_dtype": "float32"}),
    ({}, {"dtype": "float32"}, {"ep_dispatch_dtype": "float32", "kv_cache_dtype": "float32"}),
    ({}, {"ep_size": 4}, {"attn_dp_size": 4}),
    ({}, {}, {"max_model_len": 163840, "load_format": "safetensors", "served_model_name": "m"}),
    ({}, {}, {"attention_backend": "auto", "moe_runner_backend": "auto"}),
    ({}, {"max_model_len": 5, "served_model_name": "n"}, {"max_model_len": 5}),
]


@pytest.mark.parametrize(("model", "flags", "expected"), RESOLVED)
def test_what_auto_becomes(model: dict[str, Any], flags: dict[str, Any], expected: dict[str, Any]):
    engine = EngineConfig(model="m", **flags)
    resolved, choices = engine.resolve(dataclasses.replace(MODEL, **model))
    for name, value in expected.items():
        assert getattr(resolved, name) == value
    changed = {name for name, value in vars(resolved).items() if value != getattr(engine, name)}
    assert {choice.field for choice in choices} == changed
    assert not changed.intersection(flags)
    assert all(choice.reason for choice in choices)
    assert resolved.resolve(MODEL) == (resolved, [])
    left_open = {name for name, value in vars(resolved).items() if value in (None, "auto")}
    backends = {"moe_a2a_backend", "moe_runner_backend", "attention_backend"}
    seen_later = {"tokenizer", "deepep_mode", "num_kv_blocks", "cuda_graph_bs"}
    seen_later |= {"tbo_token_threshold"}  # None: one for each phase
    assert left_open == seen_later | backends


def test_every_flag_is_described_and_every_count_has_a_scope():
    for field in dataclasses.fields(EngineConfig):
        assert field.metadata["help"].endswith("."), field.name
        if field.name.startswith(("max_num", "num", "ep_size", "ep_num", "attn_dp")):
            assert field.metadata["scope"] in ("per rank", "total"), field.name
        default, choices = field.default, field.metadata["choices"]
        assert choices is None or default in choices, field.name


def test_importing_the_config_imports_nothing_heavy():
    heavy = ("torch", "transformers", "ray", "numpy", "safetensors")
    code = f"import moe_ep.config, sys; print([m for m in {heavy!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "[]", run.stderr
