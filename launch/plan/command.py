"""The command that starts the engine of a plan. It knows no drafts and no FP8 cache yet."""

import shlex
from dataclasses import asdict
from pathlib import Path

from launch.plan.question import Question
from moe_ep.config import EngineConfig
from moe_ep.config.overlap import DEFAULT_OVERLAP

# Tokens from which the engine overlaps steps unless told otherwise, by phase.
OVERLAP_FROM: dict[str, int] = asdict(DEFAULT_OVERLAP)
NO_WEIGHTS = (
    "The model has no weights here, so that the command makes random ones: give --model the"
    " checkpoint's directory, and leave --load-format out."
)
DEFAULT_UTILIZATION: float = EngineConfig(model="").gpu_memory_utilization


def launch_command(question: Question) -> str:
    """For a shell; ``moe-ep check`` takes the same flags."""
    q = question
    parts = ["moe-ep", "serve", "--model", _model(q.model)]
    if not has_weights(q.model):
        parts += ["--load-format", "dummy"]
    parts += ["--ep-size", str(q.ep_size)]
    parts += ["--ep-num-redundant-experts", str(q.ep_num_redundant_experts)]
    if q.expert_load is not None:
        parts += ["--init-expert-location", str(q.expert_load)]
    if q.is_balanced:
        parts += ["--enable-eplb"]
    parts += ["--moe-a2a-backend", q.backend]
    parts += ["--max-num-seqs", str(q.batch)]
    parts += ["--max-num-batched-tokens", str(q.batched_tokens)]
    if q.gpu_memory_utilization != DEFAULT_UTILIZATION:
        parts += ["--gpu-memory-utilization", str(q.gpu_memory_utilization)]
    if q.enable_two_batch_overlap:
        parts += ["--enable-two-batch-overlap", *_threshold(q)]
    return shlex.join(parts)


def has_weights(model: str) -> bool:
    return any(Path(_model(model)).glob("*.safetensors"))


def _model(model: str) -> str:
    """Of a checkpoint's config.json, the directory."""
    path = Path(model)
    return str(path.parent) if path.is_file() and path.name == "config.json" else model


def _threshold(q: Question) -> list[str]:
    """Steps that are planned with overlap shall have it."""
    tokens = q.batch if q.phase == "decode" else q.step_tokens
    return ["--tbo-token-threshold", str(tokens)] if tokens < OVERLAP_FROM[q.phase] else []
