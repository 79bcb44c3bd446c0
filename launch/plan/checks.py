"""Everything that is wrong with a question, all at once, by the names of its flags.

What the engine would refuse is asked from the engine's own checks (``moe_ep.config``).
"""

import math
from dataclasses import replace
from typing import Any

from launch.flags import option_name
from launch.plan.cards import cards, fabrics
from launch.plan.expert_load import load_problems
from launch.plan.memory import exchange_sizes
from launch.plan.question import Question, read_model
from moe_ep.config import ConfigError, EngineConfig, ModelConfig, Problem, find_problems
from moe_ep.config.exchange import v1_limit, v2_limit

PHASES = ("decode", "prefill")
CACHE_DTYPES = ("bfloat16", "fp8")
LIMITS = {"deepep": v1_limit, "deepep_v2": v2_limit}
# What the engine's own checks call the numbers that a question has.
ENGINE_NAMES = {"max_model_len": "context", "max_num_seqs": "batch"}
# Sizes that an exchange may refuse: the flag behind each, and a value that all of them serve.
EXCHANGE_FLAGS = {
    "num_ranks": ("ep_size", 8),
    "num_slots_per_rank": ("ep_size", 1),
    "capacity": ("batch", 1),
    "hidden": ("model", 7168),
    "num_topk": ("model", 8),
}


def question_problems(question: Question) -> list[Problem]:
    """At most one of each flag."""
    problems = _plain_problems(question) + _unknown_names(question)
    model = None
    try:
        model = read_model(question.model)
    except ConfigError as error:
        problems += error.problems
    found = find_problems(_engine_config(question), model)
    problems += [replace(p, field=ENGINE_NAMES.get(p.field, p.field)) for p in found]
    if model is not None:
        problems += _exchange_problems(question, model)
        if question.expert_load is not None:
            problems += load_problems(question.expert_load, model)
    by_field: dict[str, Problem] = {}
    for problem in problems:
        by_field.setdefault(problem.field, problem)
    return list(by_field.values())


def _plain_problems(q: Question) -> list[Problem]:
    factor, most = q.imbalance, q.max_num_batched_tokens
    checks = (
        ("phase", q.phase, q.phase in PHASES, ", ".join(PHASES)),
        ("batch", q.batch, q.batch >= 1, "at least 1"),
        ("context", q.context, q.context >= 1, "at least 1"),
        ("mtp_tokens", q.mtp_tokens, q.mtp_tokens >= 0, "at least 0"),
        ("mtp_acceptance", q.mtp_acceptance, 0 <= q.mtp_acceptance <= 1, "0 to 1"),
        ("imbalance", factor, factor is None or 1 <= factor < math.inf, "at least 1 and finite"),
        ("imbalance", factor, None in (factor, q.expert_load), "nothing with --expert-load"),
        ("max_num_batched_tokens", most, most is None or most >= max(1, q.capacity),
         f"at least {q.capacity}, a token of every request and its drafts"),
        ("prefill_load", q.prefill_load, 0 <= q.prefill_load < 1, "at least 0 and below 1"),
        ("kv_cache_dtype", q.kv_cache_dtype, q.kv_cache_dtype in CACHE_DTYPES,
         ", ".join(CACHE_DTYPES)),
        ("moe_a2a_backend", q.moe_a2a_backend, q.moe_a2a_backend in LIMITS, ", ".join(LIMITS)),
    )  # fmt: skip
    return [
        Problem(name, given, allowed, f"Change {option_name(name)}.")
        for name, given, is_right, allowed in checks
        if not is_right
    ]


def _unknown_names(q: Question) -> list[Problem]:
    problems = []
    if q.gpu not in cards():
        fix = "Name one of these, or add its data sheet to launch/plan/data/cards.json."
        problems.append(Problem("gpu", q.gpu, ", ".join(cards()), fix))
    if q.fabric is not None and q.fabric not in fabrics():
        fix = "Name one of these, or leave it out for the card's usual one."
        problems.append(Problem("fabric", q.fabric, ", ".join(fabrics()), fix))
    return problems


def _engine_config(q: Question) -> EngineConfig:
    """The engine that would be started, for the checks that it would make."""
    return EngineConfig(
        model=q.model,
        load_format="dummy",
        ep_size=q.ep_size,
        attn_dp_size=q.attn_dp_size,
        ep_num_redundant_experts=q.ep_num_redundant_experts,
        max_model_len=q.context,
        max_num_seqs=q.batch,
        max_num_batched_tokens=q.batched_tokens,
        gpu_memory_utilization=q.gpu_memory_utilization,
    )


def _exchange_problems(q: Question, model: ModelConfig) -> list[Problem]:
    """A limit names one size; the next shows once that one is put right."""
    limit = LIMITS.get(q.moe_a2a_backend)
    if limit is None or q.ep_size < 2:
        return []
    sizes = exchange_sizes(q, model)
    other = next(name for name in LIMITS if name != q.moe_a2a_backend)
    problems = []
    while reason := limit(sizes):
        given, _, allowed = reason.partition(", ")
        name = given.split(":")[0].split(" ")[0]
        field, served = EXCHANGE_FLAGS[name]
        fix = f"({given}.) Or try --moe-a2a-backend {other}."
        problems.append(Problem(field, getattr(q, field), allowed, fix))
        put_right: dict[str, Any] = {name: served}
        sizes = replace(sizes, **put_right)
    return problems
