"""The answer to one question: memory of a rank, time of a step by stage, and what follows.

``as_json`` is the machine's form; ``data/plan.schema.json`` documents it.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from launch.plan.memory import RankMemory, rank_memory
from launch.plan.parameters import Range, family, ranges
from launch.plan.question import Question
from launch.plan.setting import Setting, setting
from launch.plan.step import StepTime, is_exchange, step_time
from moe_ep.engine.memory import CACHE_BLOCK


@dataclass(frozen=True)
class Estimate:
    """A number, and between what it lay for 8 of 10 published records when predicted unseen."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class StageTime:
    """us: per MoE layer, both micro-batches, with the range of kernels or exchanges that others
    measured. share: of the stages' sum. bound: what takes it."""

    stage: str
    us: Estimate
    share: float
    bound: str


@dataclass(frozen=True)
class Plan:
    """cache_tokens_needed: by all requests of a rank, in whole blocks. ttft_ms: of the last prompt
    of a batch, its waiting included. wait_ms: of it, in the queue. bound: what takes most of a
    layer. warnings: what the numbers cannot know."""

    setting: Setting
    memory: RankMemory
    cache_tokens_needed: int
    step: StepTime
    stages: tuple[StageTime, ...]
    step_ms: Estimate
    tokens_per_s_per_gpu: Estimate
    tpot_ms: Estimate | None
    ttft_ms: Estimate | None
    wait_ms: float
    bound: str
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether parts and the cache that is needed have room."""
        return self.memory.headroom_bytes > 0 and self.cache_tokens_needed <= (
            self.memory.cache_tokens
        )

    @property
    def tokens_per_s_per_node(self) -> Estimate:
        d = self.setting.deployment
        return _scaled(self.tokens_per_s_per_gpu, min(d.card.gpus_per_node, d.ep_size))


def make_plan(question: Question) -> Plan:
    """Raises ConfigError with everything that is wrong with the question."""
    found = setting(question)
    d, batch = found.deployment, found.batch
    step = step_time(d, batch, family(d.card.family))
    memory = rank_memory(
        d, batch, found.sizes,
        backend=question.backend, utilization=question.gpu_memory_utilization,
    )  # fmt: skip
    step_ms = _around(step.step_us / 1e3, ranges()[question.phase])
    is_decode = question.phase == "decode"
    gained = question.batch * question.accepted if is_decode else question.step_tokens
    num_steps = 0.0 if is_decode else _steps_of_batch(found, step.step_us)
    # An M/D/1 queue of jobs, each as long as the steps of a batch.
    waiting = num_steps * question.prefill_load / (2 * (1 - question.prefill_load))
    return Plan(
        setting=found,
        memory=memory,
        cache_tokens_needed=_cache_tokens(question),
        step=step,
        stages=_stages(step),
        step_ms=step_ms,
        tokens_per_s_per_gpu=_rate(gained * 1e3, step_ms),
        tpot_ms=_scaled(step_ms, 1 / question.accepted) if is_decode else None,
        ttft_ms=None if is_decode else _scaled(step_ms, num_steps + waiting),
        wait_ms=step_ms.value * waiting,
        bound=_bound(step),
        warnings=tuple(_warnings(found)),
    )


def _steps_of_batch(found: Setting, step_us: float) -> float:
    """What a batch of prompts takes, in full steps; the last one may have fewer tokens."""
    q, d = found.question, found.deployment
    full, rest = divmod(q.batch * q.queries, q.step_tokens)
    if not rest:
        return full
    last = step_time(d, replace(found.batch, num_tokens=rest), family(d.card.family))
    return full + last.step_us / step_us


def _cache_tokens(q: Question) -> int:
    """A request holds whole blocks."""
    return q.batch * -(-(q.context + q.mtp_tokens) // CACHE_BLOCK) * CACHE_BLOCK


def as_json(plan: Plan) -> dict[str, Any]:
    d, question = plan.setting.deployment, asdict(plan.setting.question)
    question["expert_load"] = str(question["expert_load"]) if question["expert_load"] else None
    nodes = -(-d.ep_size // d.card.gpus_per_node)
    return {
        "version": 1,
        "question": question,
        "deployment": {
            "slots_per_rank": d.num_slots,
            "imbalance": d.imbalance,
            "weights": d.weights,
            "fabric": d.fabric.name,
            "nodes": nodes,
            "steps": plan.setting.question.num_steps,
            "tokens_per_step": plan.setting.question.step_tokens,
        },
        "fits": plan.fits,
        "memory": asdict(plan.memory) | {"cache_tokens_needed": plan.cache_tokens_needed},
        "step": {
            "ms": asdict(plan.step_ms),
            "layer_us": plan.step.layer_us,
            "exposed_us": plan.step.exposed_us,
            "dense_layer_us": plan.step.dense_us,
            "outside": [
                {"stage": stage, "us": cost.us} for stage, cost in plan.step.outside.items()
            ],
            "stages": [asdict(stage) for stage in plan.stages],
            "bound": plan.bound,
        },
        "tokens_per_s_per_gpu": asdict(plan.tokens_per_s_per_gpu),
        "tokens_per_s_per_node": asdict(plan.tokens_per_s_per_node),
        "tpot_ms": asdict(plan.tpot_ms) if plan.tpot_ms else None,
        "ttft_ms": asdict(plan.ttft_ms) if plan.ttft_ms else None,
        "wait_ms": plan.wait_ms,
        "warnings": list(plan.warnings),
    }


def _around(value: float, errors: Range) -> Estimate:
    return Estimate(value, *errors.around(value))


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(estimate.value * factor, estimate.low * factor, estimate.high * factor)


def _rate(amount: float, ms: Estimate) -> Estimate:
    """A long step is a low rate."""
    return Estimate(amount / ms.value, amount / ms.high, amount / ms.low)


def _stages(step: StepTime) -> tuple[StageTime, ...]:
    total = sum(cost.us for cost in step.layer.values())
    return tuple(
        StageTime(
            stage=str(stage),
            us=_around(cost.us, ranges()["exchange" if is_exchange(stage) else "kernel"]),
            share=cost.us / total,
            bound=cost.bound,
        )
        for stage, cost in step.layer.items()
    )


def _bound(step: StepTime) -> str:
    """What takes most of a layer: exchange that nothing hides, or a bound of the computing."""
    shares: dict[str, float] = {"exchange": step.exposed_us}
    for cost in step.layer.values():
        if cost.bound not in ("nvlink", "fabric", "latency"):
            shares[cost.bound] = shares.get(cost.bound, 0.0) + cost.us
    return max(shares, key=shares.__getitem__)


def _warnings(found: Setting) -> list[str]:
    q, d = found.question, found.deployment
    notes = [
        "Times are of kernels as others published them, glue fused and steps captured as graphs;"
        " this engine has not been timed on this card."
    ]
    if q.phase == "prefill":
        notes.append("Attention is that of a fused kernel; the engine's own prefill is slower.")
        notes.append(
            f"Waiting is that of an M/D/1 queue at a load of {q.prefill_load:.0%}: prompts arrive"
            " at random, all as long as these."
        )
    if d.card.family == "blackwell":
        notes.append(
            "No published decode step on Blackwell could be compared (batch not published, or NVFP4"
            " weights): the range is that of Hopper."
        )
    if d.model.hidden_size != 7168:
        notes.append("Every fitted record is of DeepSeek-V3's sizes; this model's are not.")
    if d.weights != "fp8":
        notes.append("Every fitted record has FP8 products; BF16 ones are an extrapolation.")
    if q.kv_cache_dtype == "fp8":
        notes.append("The engine caches latents in BF16; FP8 is planned here, not yet served.")
    if q.mtp_tokens:
        notes.append(
            "The engine drafts no tokens yet. One draft layer as DeepSeek-V3's is counted, with its"
            " cache; whether this model has one, and every draft's acceptance, is taken as given."
        )
    if q.moe_a2a_backend == "deepep_v2" and d.ep_size > d.card.gpus_per_node:
        notes.append("V2's buffers over several nodes depend on the topology that it finds.")
    if d.imbalance > 1 and q.imbalance is None and q.expert_load is None:
        notes.append(
            f"Imbalance {d.imbalance:.2f} was published for this EP size, not seen in your traffic;"
            " give --imbalance or --expert-load."
        )
    return notes
