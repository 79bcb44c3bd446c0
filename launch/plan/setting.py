"""A question with its names looked up: what runs where, and on what."""

import math
from dataclasses import dataclass

from launch.plan.balance import imbalance
from launch.plan.cards import cards, fabrics
from launch.plan.checks import question_problems
from launch.plan.expert_load import placed_imbalance
from launch.plan.layer import Batch, Deployment
from launch.plan.memory import ExchangeSizes, exchange_sizes
from launch.plan.question import Question, read_model
from moe_ep.config import ConfigError, ModelConfig
from moe_ep.engine.memory import VALUE_BYTES, slots_per_rank


@dataclass(frozen=True)
class Setting:
    question: Question
    deployment: Deployment
    batch: Batch
    sizes: ExchangeSizes


def setting(question: Question) -> Setting:
    """Raises ConfigError with every problem."""
    if problems := question_problems(question):
        raise ConfigError(problems)
    model = read_model(question.model)
    sizes = exchange_sizes(question, model)
    return Setting(question, _deployment(question, model), _batch(question), sizes)


def _batch(q: Question) -> Batch:
    """Later chunks of a prompt make the keys of all earlier ones again: half of them on average."""
    num_chunks = math.ceil(q.context / q.step_tokens) if q.phase == "prefill" else 1
    return Batch(
        phase=q.phase,
        num_tokens=q.step_tokens,
        context=q.context,
        queries_per_request=q.queries if q.phase == "decode" else 1,
        num_drafts=q.mtp_tokens,
        expansions=(num_chunks + 1) / 2,
    )


def _deployment(q: Question, model: ModelConfig) -> Deployment:
    redundant, card = q.ep_num_redundant_experts, cards()[q.gpu]
    num_slots = slots_per_rank(model, ep_size=q.ep_size, num_redundant=redundant)
    if q.expert_load is not None:
        factor = placed_imbalance(q.expert_load, model, ep_size=q.ep_size, num_slots=num_slots)
    else:
        factor = q.imbalance or imbalance(q.ep_size, is_balanced=q.is_balanced)
    return Deployment(
        model=model,
        card=card,
        fabric=fabrics()[q.fabric or card.fabric],
        ep_size=q.ep_size,
        num_slots=num_slots,
        imbalance=factor,
        cache_value_bytes=VALUE_BYTES[q.kv_cache_dtype],
        overlap=q.enable_two_batch_overlap,
    )
