"""What the user asks, and everything that is wrong with it at once."""

import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from launch.flags import option_name
from launch.plan.balance import imbalance
from launch.plan.cards import Card, Fabric, cards, fabrics
from launch.plan.expert_load import placed_imbalance
from launch.plan.layer import Batch, Deployment
from launch.plan.memory import ExchangeSizes, exchange_sizes
from moe_ep.config import ConfigError, EngineConfig, ModelConfig, Problem, find_problems
from moe_ep.config.exchange import v1_limit, v2_limit
from moe_ep.engine.memory import VALUE_BYTES, slots_per_rank

PHASES = ("decode", "prefill")
BACKENDS = ("deepep", "deepep_v2")
DEFAULT_BATCHED_TOKENS: int = EngineConfig(model="").max_num_batched_tokens
# What the engine's own checks call the numbers that a question has.
ENGINE_NAMES = {"max_model_len": "context", "max_num_seqs": "batch"}
CACHE_DTYPES = ("bfloat16", "fp8")


@dataclass(frozen=True)
class Question:
    """batch: requests of a rank in a step; in prefill, prompts that arrive together. context:
    cached tokens of a request in decode, tokens of a prompt in prefill. imbalance: rows of the
    busiest rank over the mean, None for the published one of this EP size. expert_load: file with
    recorded loads of experts, which gives the imbalance. mtp_tokens: drafted tokens per step.
    mtp_acceptance: chance that a drafted token is accepted when those before it were.
    max_num_batched_tokens: of a step, None for the room that the batch needs. prefill_load: share
    of its time in which a prefill engine is busy, which gives the time that prompts wait."""

    model: str
    gpu: str = "h800"
    fabric: str | None = None
    ep_size: int = 8
    attn_dp_size: int | None = None
    ep_num_redundant_experts: int = 0
    batch: int = 64
    context: int = 4096
    phase: str = "decode"
    enable_two_batch_overlap: bool = False
    imbalance: float | None = None
    expert_load: Path | None = None
    mtp_tokens: int = 0
    mtp_acceptance: float = 0.85
    max_num_batched_tokens: int | None = None
    prefill_load: float = 0.7
    kv_cache_dtype: str = "bfloat16"
    moe_a2a_backend: str = "deepep"
    gpu_memory_utilization: float = 0.9

    @property
    def queries(self) -> int:
        """Query tokens of a request: of a step in decode, of its prompt in prefill."""
        return 1 + self.mtp_tokens if self.phase == "decode" else self.context

    @property
    def accepted(self) -> float:
        """Tokens that a request gains in a decode step."""
        return sum(self.mtp_acceptance**i for i in range(self.mtp_tokens + 1))

    @property
    def batched_tokens(self) -> int:
        """Of the engine: as given, else room for the batch, and the default at least, so that it
        can prefill."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(DEFAULT_BATCHED_TOKENS, self.batch * self.queries)

    @property
    def step_tokens(self) -> int:
        """Query tokens of a rank in a step."""
        return min(self.batch * self.queries, self.batched_tokens)

    @property
    def num_steps(self) -> int:
        """Steps that the batch takes: 1 in decode, in prefill as many as there are chunks."""
        return math.ceil(self.batch * self.queries / self.step_tokens)

    @property
    def backend(self) -> str:
        return "local" if self.ep_size == 1 else self.moe_a2a_backend


@dataclass(frozen=True)
class Setting:
    """A question with its names looked up."""

    question: Question
    deployment: Deployment
    batch: Batch
    sizes: ExchangeSizes


@cache
def read_model(name: str) -> ModelConfig:
    return ModelConfig.from_path(name)


def setting(question: Question) -> Setting:
    """Raises ConfigError with every problem."""
    problems = _plain_problems(question)
    model = _model(question, problems)
    card, fabric = _card(question, problems), _fabric(question, problems)
    found = find_problems(_engine_config(question), model)
    known = {problem.field for problem in problems}
    named = [replace(p, field=ENGINE_NAMES.get(p.field, p.field)) for p in found]
    problems += [problem for problem in named if problem.field not in known]
    if problems or model is None or card is None:
        raise ConfigError(problems)
    deployment = _deployment(question, model, card, fabric or fabrics()[card.fabric])
    sizes = exchange_sizes(
        deployment,
        capacity=question.step_tokens if question.phase == "decode" else 1,
        max_tokens=question.batched_tokens,
    )
    if question.ep_size > 1:
        limit = v1_limit if question.moe_a2a_backend == "deepep" else v2_limit
        if reason := limit(sizes):
            raise ConfigError([_limit_problem(question, reason)])
    return Setting(question, deployment, _batch(question), sizes)


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


def _plain_problems(q: Question) -> list[Problem]:
    file = q.expert_load
    checks = (
        ("phase", q.phase, q.phase in PHASES, ", ".join(PHASES)),
        ("batch", q.batch, q.batch >= 1, "at least 1"),
        ("context", q.context, q.context >= 1, "at least 1"),
        ("mtp_tokens", q.mtp_tokens, q.mtp_tokens >= 0, "at least 0"),
        ("mtp_acceptance", q.mtp_acceptance, 0 <= q.mtp_acceptance <= 1, "0 to 1"),
        ("imbalance", q.imbalance, q.imbalance is None or q.imbalance >= 1, "at least 1"),
        ("imbalance", q.imbalance, None in (q.imbalance, file), "nothing with --expert-load"),
        ("prefill_load", q.prefill_load, 0 <= q.prefill_load < 1, "at least 0 and below 1"),
        ("kv_cache_dtype", q.kv_cache_dtype, q.kv_cache_dtype in CACHE_DTYPES,
         ", ".join(CACHE_DTYPES)),
        ("moe_a2a_backend", q.moe_a2a_backend, q.moe_a2a_backend in BACKENDS, ", ".join(BACKENDS)),
    )  # fmt: skip
    return [
        Problem(name, given, allowed, f"Change {option_name(name)}.")
        for name, given, is_right, allowed in checks
        if not is_right
    ]


def _model(question: Question, problems: list[Problem]) -> ModelConfig | None:
    try:
        return read_model(question.model)
    except ConfigError as error:
        problems += error.problems
        return None


def _card(question: Question, problems: list[Problem]) -> Card | None:
    card = cards().get(question.gpu)
    if card is None:
        fix = "Name one of these, or add its data sheet to launch/plan/data/cards.json."
        problems.append(Problem("gpu", question.gpu, ", ".join(cards()), fix))
    return card


def _fabric(question: Question, problems: list[Problem]) -> Fabric | None:
    if question.fabric is None or question.fabric in fabrics():
        return fabrics().get(question.fabric or "")
    fix = "Name one of these, or leave it out for the card's usual one."
    problems.append(Problem("fabric", question.fabric, ", ".join(fabrics()), fix))
    return None


def _engine_config(q: Question) -> EngineConfig:
    """The engine that would be started, for the checks that it would make."""
    return EngineConfig(
        model=q.model,
        load_format="dummy",
        ep_size=q.ep_size,
        attn_dp_size=q.attn_dp_size,
        ep_num_redundant_experts=q.ep_num_redundant_experts,
        max_model_len=q.context,
        max_num_seqs=q.batch * (max(1, q.queries) if q.phase == "decode" else 1),
        max_num_batched_tokens=q.batched_tokens,
        gpu_memory_utilization=q.gpu_memory_utilization,
    )


def _limit_problem(q: Question, reason: str) -> Problem:
    given, allowed = reason.partition(", ")[::2]
    flag = {"num_ranks": "ep_size", "capacity": "batch", "hidden": "model"}.get(
        given.split(":")[0], "ep_size"
    )
    value = {"ep_size": q.ep_size, "batch": q.batch, "model": q.model}[flag]
    other = {"deepep": "deepep_v2", "deepep_v2": "deepep"}[q.moe_a2a_backend]
    return Problem(flag, value, allowed, f"Or try --moe-a2a-backend {other}. ({reason})")


def _deployment(q: Question, model: ModelConfig, card: Card, fabric: Fabric) -> Deployment:
    redundant = q.ep_num_redundant_experts
    num_slots = slots_per_rank(model, ep_size=q.ep_size, num_redundant=redundant)
    if q.expert_load is not None:
        factor = placed_imbalance(q.expert_load, model, ep_size=q.ep_size, num_slots=num_slots)
    else:
        is_balanced = q.ep_num_redundant_experts > 0
        factor = q.imbalance or imbalance(q.ep_size, is_balanced=is_balanced)
    return Deployment(
        model=model,
        card=card,
        fabric=fabric,
        ep_size=q.ep_size,
        num_slots=num_slots,
        imbalance=factor,
        cache_value_bytes=VALUE_BYTES[q.kv_cache_dtype],
        overlap=q.enable_two_batch_overlap,
    )
