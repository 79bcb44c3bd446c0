"""What the backends are asked to serve, from a resolved config: the engine and ``check`` agree."""

import torch

from moe_ep.config import EngineConfig, ModelConfig
from moe_ep.dispatch import DispatchSpec
from moe_ep.engine.step_shape import StepRules
from moe_ep.experts import ExpertSpec

DTYPES = {"fp8": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float32": torch.float32}


def step_rules(config: EngineConfig) -> StepRules:
    return StepRules(
        deepep_mode=config.deepep_mode,
        capacity=config.max_num_seqs,
        buckets=config.cuda_graph_bs or (),
    )


def expert_spec(config: EngineConfig, model: ModelConfig, device: torch.device) -> ExpertSpec:
    num_slots = _num_slots_per_rank(config, model)
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


def dispatch_spec(config: EngineConfig, model: ModelConfig, row_alignment: int) -> DispatchSpec:
    """row_alignment: what the expert backend needs."""
    return DispatchSpec(
        hidden=model.hidden_size,
        num_topk=model.num_experts_per_tok,
        num_ranks=config.ep_size,
        num_slots_per_rank=_num_slots_per_rank(config, model),
        max_tokens_per_rank=config.max_num_batched_tokens,
        capacity=step_rules(config).capacity,
        payload_dtype=DTYPES[config.ep_dispatch_dtype],
        out_dtype=DTYPES[config.dtype],
        row_alignment=row_alignment,
    )


def _num_slots_per_rank(config: EngineConfig, model: ModelConfig) -> int:
    return (model.num_experts + config.ep_num_redundant_experts) // config.ep_size
