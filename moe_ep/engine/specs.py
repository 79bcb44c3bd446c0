"""What the backends are asked to serve, from a resolved config: the engine and ``check`` agree."""

import torch

from moe_ep.config import EngineConfig, ModelConfig
from moe_ep.config.overlap import DEFAULT_OVERLAP, OverlapRules
from moe_ep.dispatch import DispatchSpec, Mode
from moe_ep.engine.memory import slots_per_rank
from moe_ep.engine.step_shape import StepRules
from moe_ep.experts import ExpertSpec
from moe_ep.fp8 import ScaleFormat

DTYPES = {"fp8": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float32": torch.float32}


def step_rules(config: EngineConfig) -> StepRules:
    threshold = config.tbo_token_threshold
    given = DEFAULT_OVERLAP if threshold is None else OverlapRules(threshold, threshold)
    return StepRules(
        deepep_mode=config.deepep_mode,
        capacity=config.max_num_seqs,
        buckets=config.cuda_graph_bs or (),
        overlap=given if config.enable_two_batch_overlap else None,
    )


def expert_spec(config: EngineConfig, model: ModelConfig, device: torch.device) -> ExpertSpec:
    num_slots = _num_slots(config, model)
    rows = step_rules(config).capacity * model.num_experts_per_tok  # that a full rank sends
    return ExpertSpec(
        num_slots=num_slots,
        hidden=model.hidden_size,
        intermediate=model.moe_intermediate_size,
        dtype=DTYPES[config.dtype],
        is_fp8=model.quantization == "fp8",
        device=device,
        expected_rows=max(1, rows // num_slots),
    )


def dispatch_spec(
    config: EngineConfig,
    model: ModelConfig,
    *,
    row_alignment: int = 1,
    scale_format: ScaleFormat = ScaleFormat.FLOAT32,
) -> DispatchSpec:
    """row_alignment, scale_format: what the expert backend needs."""
    mode = config.deepep_mode
    return DispatchSpec(
        hidden=model.hidden_size,
        num_topk=model.num_experts_per_tok,
        num_ranks=config.ep_size,
        num_slots_per_rank=_num_slots(config, model),
        max_tokens_per_rank=config.max_num_batched_tokens,
        capacity=step_rules(config).capacity,
        payload_dtype=DTYPES[config.ep_dispatch_dtype],
        out_dtype=DTYPES[config.dtype],
        row_alignment=row_alignment,
        scale_format=scale_format,
        modes=frozenset(Mode) if mode == "auto" else frozenset({Mode(mode)}),
    )


def _num_slots(config: EngineConfig, model: ModelConfig) -> int:
    redundant = config.ep_num_redundant_experts
    return slots_per_rank(model, ep_size=config.ep_size, num_redundant=redundant)
