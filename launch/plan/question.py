"""What the user asks, and everything that is wrong with it at once."""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from launch.plan.balance import imbalance
from launch.plan.cards import Card, Fabric, cards, fabrics
from launch.plan.layer import Batch, Deployment
from launch.plan.memory import ExchangeSizes, exchange_sizes
from moe_ep.config import ConfigError, EngineConfig, ModelConfig, Problem, find_problems
from moe_ep.config.exchange import v1_limit, v2_limit

PHASES = ("decode", "prefill")
BACKENDS = ("deepep", "deepep_v2")
DEFAULT_BATCHED_TOKENS: int = EngineConfig(model="").max_num_batched_tokens
# What the engine's own checks call the numbers that a question has.
ENGINE_NAMES = {"max_model_len": "context", "max_num_seqs": "batch"}
CACHE_BYTES = {"bfloat16": 2, "fp8": 1}


@dataclass(frozen=True)
class Question:
    """batch: requests of a rank in a step; in prefill, whole prompts. context: cached tokens of a
    request in decode, tokens of a prompt in prefill. imbalance: rows of the busiest rank over the
    mean, None for the published one of this EP size. expert_load: file with tokens per slot, which
    gives the imbalance. mtp_tokens: drafted tokens per step. mtp_acceptance: chance that a drafted
    token is accepted when those before it were."""

    model: str
    gpu: str = "h800"
    fabric: str | None = None
    ep_size: int = 8
    ep_num_redundant_experts: int = 0
    batch: int = 64
    context: int = 4096
    phase: str = "decode"
    enable_two_batch_overlap: bool = False
    imbalance: float | None = None
    expert_load: Path | None = None
    mtp_tokens: int = 0
    mtp_acceptance: float = 0.85
    kv_cache_dtype: str = "bfloat16"
    moe_a2a_backend: str = "deepep"
    gpu_memory_utilization: float = 0.9

    @property
    def queries(self) -> int:
        """Query tokens of a request and step."""
        return 1 + self.mtp_tokens if self.phase == "decode" else self.context

    @property
    def accepted(self) -> float:
        """Tokens that a request gains in a decode step."""
        return sum(self.mtp_acceptance**i for i in range(self.mtp_tokens + 1))

    @property
    def max_num_batched_tokens(self) -> int:
        """Of the engine: room for the step, and the default at least, so that it can prefill."""
        return max(DEFAULT_BATCHED_TOKENS, self.batch * self.queries)

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
    if model is not None:
        found = find_problems(_engine_config(question), model)
        problems += [replace(p, field=ENGINE_NAMES.get(p.field, p.field)) for p in found]
    if problems or model is None or card is None:
        raise ConfigError(problems)
    deployment = _deployment(question, model, card, fabric or fabrics()[card.fabric])
    sizes = exchange_sizes(
        deployment,
        capacity=question.batch * question.queries if question.phase == "decode" else 1,
        max_tokens=question.max_num_batched_tokens,
    )
    if question.ep_size > 1:
        limit = v1_limit if question.moe_a2a_backend == "deepep" else v2_limit
        if reason := limit(sizes):
            raise ConfigError([_limit_problem(question, reason)])
    batch = Batch(
        phase=question.phase,
        num_tokens=question.batch * question.queries,
        context=question.context,
        queries_per_request=question.queries if question.phase == "decode" else 1,
    )
    return Setting(question, deployment, batch, sizes)


def _plain_problems(q: Question) -> list[Problem]:
    checks = (
        ("phase", q.phase, q.phase in PHASES, ", ".join(PHASES)),
        ("batch", q.batch, q.batch >= 1, "at least 1"),
        ("context", q.context, q.context >= 1, "at least 1"),
        ("mtp_tokens", q.mtp_tokens, q.mtp_tokens >= 0, "at least 0"),
        ("mtp_acceptance", q.mtp_acceptance, 0 <= q.mtp_acceptance <= 1, "0 to 1"),
        ("imbalance", q.imbalance, q.imbalance is None or q.imbalance >= 1, "at least 1"),
        ("kv_cache_dtype", q.kv_cache_dtype, q.kv_cache_dtype in CACHE_BYTES,
         ", ".join(CACHE_BYTES)),
        ("moe_a2a_backend", q.moe_a2a_backend, q.moe_a2a_backend in BACKENDS, ", ".join(BACKENDS)),
    )  # fmt: skip
    return [
        Problem(name, given, allowed, f"Change --{name.replace('_', '-')}.")
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
    seqs = max(1, q.batch) * (q.queries if q.phase == "decode" else 1)
    return EngineConfig(
        model=q.model,
        load_format="dummy",
        ep_size=q.ep_size,
        ep_num_redundant_experts=q.ep_num_redundant_experts,
        max_model_len=q.context,
        max_num_seqs=seqs,
        max_num_batched_tokens=max(seqs, q.max_num_batched_tokens),
        gpu_memory_utilization=q.gpu_memory_utilization,
    )


def _limit_problem(q: Question, reason: str) -> Problem:
    given, allowed = reason.partition(", ")[::2]
    flag = {"num_ranks": "ep_size", "capacity": "batch"}.get(given.split(":")[0], "ep_size")
    value = {"ep_size": q.ep_size, "batch": q.batch}[flag]
    other = {"deepep": "deepep_v2", "deepep_v2": "deepep"}[q.moe_a2a_backend]
    return Problem(flag, value, allowed, f"Or try --moe-a2a-backend {other}. ({reason})")


def _deployment(q: Question, model: ModelConfig, card: Card, fabric: Fabric) -> Deployment:
    num_slots = (model.num_experts + q.ep_num_redundant_experts) // q.ep_size
    is_balanced = q.ep_num_redundant_experts > 0
    factor = q.imbalance or imbalance(q.ep_size, is_balanced=is_balanced)
    if q.expert_load is not None:
        factor = recorded_imbalance(q.expert_load, q.ep_size, num_slots)
    return Deployment(
        model=model,
        card=card,
        fabric=fabric,
        ep_size=q.ep_size,
        num_slots=num_slots,
        imbalance=factor,
        weights="fp8" if model.quantization == "fp8" else "bfloat16",
        cache_value_bytes=CACHE_BYTES[q.kv_cache_dtype],
        overlap=q.enable_two_batch_overlap,
    )


def recorded_imbalance(file: Path, ep_size: int, num_slots: int) -> float:
    """Mean over layers of the busiest rank's tokens over the average rank's.

    file: JSON, for every MoE layer a list of tokens per slot, ranks one after the other. Raises
    ConfigError when it is anything else.
    """
    allowed = f"a JSON list of layers, each with tokens of {ep_size * num_slots} slots"
    problem = Problem("expert_load", str(file), allowed, "Record loads per slot of this EP size.")
    try:
        layers = json.loads(file.read_text(encoding="utf-8"))
        ratios = [_layer_imbalance([float(n) for n in slots], ep_size, num_slots)
                  for slots in layers]  # fmt: skip
        return sum(ratios) / len(ratios)
    except (OSError, ValueError, TypeError, ZeroDivisionError) as error:
        fix = f"{problem.fix} ({error})"
        raise ConfigError([replace(problem, fix=fix)]) from error


def _layer_imbalance(slots: list[float], ep_size: int, num_slots: int) -> float:
    if len(slots) != ep_size * num_slots:
        raise ValueError(f"{len(slots)} slots in a layer")
    ranks = [sum(slots[r * num_slots : (r + 1) * num_slots]) for r in range(ep_size)]
    return max(ranks) * ep_size / sum(ranks)
