"""How to use a number of GPUs under goals: EP sizes, batches, and shares of prefill and decode.

Prefill and decode are planned as engines of their own. Every candidate is a full plan; what does
not fit, is refused or misses its goal drops out, and is counted by reason. Prefill engines are
given as much work as ``prefill_load`` says, since prompts wait the longer the busier they are.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from launch.flags import option_name
from launch.plan.checks import question_problems
from launch.plan.command import launch_command
from launch.plan.plan import Plan, as_json, make_plan
from launch.plan.question import Question, read_model
from moe_ep.config import ConfigError, Problem
from moe_ep.config.exchange import V1_CHUNKS

EP_SIZES = (1, *V1_CHUNKS)
DECODE_BATCHES = (8, *range(16, 512, 16))
PREFILL_TOKENS = (4096, 8192, 16384, 32768)
REDUNDANT = (0, 16, 32, 64)
SHOWN = 5
# What the search chooses; a problem with anything else is the user's to solve.
SEARCHED = {"ep_size", "ep_num_redundant_experts", "batch"}


@dataclass(frozen=True)
class Goal:
    """gpus: in all. Of every request: most time per output token and to the first token, in ms, and
    tokens of its prompt and its output."""

    gpus: int
    slo_tpot_ms: float
    slo_ttft_ms: float
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Option:
    """One way to use the GPUs. requests_per_s: of all of them. limited_by: what keeps it from more.
    spare: GPUs that it leaves unused."""

    prefill: Plan
    decode: Plan
    num_prefill: int
    num_decode: int
    requests_per_s: float
    limited_by: str
    spare: int


@dataclass(frozen=True)
class Advice:
    options: tuple[Option, ...]
    num_candidates: int
    dropped: dict[str, int]


def advise(question: Question, goal: Goal) -> Advice:
    """The best few ways; raises ConfigError for goals that make no sense, and for all in the
    question that no candidate could mend."""
    _check(question, goal)
    dropped: Counter[str] = Counter()
    candidates = [*_decodes(question, goal), *_prefills(question, goal)]
    plans = [plan for one in candidates if (plan := _tried(one, goal, dropped)) is not None]
    best = _best_of_size(plans)
    options = [
        option
        for (phase, _), prefill in best.items()
        if phase == "prefill"
        for (other, _), decode in best.items()
        if other == "decode" and (option := _shared(prefill, decode, goal)) is not None
    ]
    options.sort(key=lambda option: -option.requests_per_s)
    return Advice(tuple(options[:SHOWN]), len(candidates), dict(dropped))


def _check(question: Question, goal: Goal) -> None:
    problems = [
        Problem(name, value, "above 0 and finite", f"Change {option_name(name)}.")
        for name, value in vars(goal).items()
        if not 0 < value < math.inf
    ]
    if goal.gpus == 1:
        fix = "Prefill and decode are planned as engines of their own."
        problems.append(Problem("gpus", 1, "at least 2", fix))
    found = question_problems(replace(question, ep_size=1, batch=1, context=1))
    problems += [problem for problem in found if problem.field not in SEARCHED]
    if not problems:
        problems += _length_problems(question, goal)
    if problems:
        raise ConfigError(problems)


def _length_problems(question: Question, goal: Goal) -> list[Problem]:
    limit = read_model(question.model).max_position_embeddings
    fix = "The model knows no positions beyond max_position_embeddings."
    if goal.input_len >= limit:
        return [Problem("input_len", goal.input_len, f"below {limit}", fix)]
    if goal.input_len + goal.output_len > limit:
        allowed = f"at most {limit - goal.input_len} with --input-len {goal.input_len}"
        return [Problem("output_len", goal.output_len, allowed, fix)]
    return []


def _sizes(question: Question, goal: Goal) -> Iterator[tuple[int, int]]:
    """EP sizes, and redundant experts that leave every rank the same slots."""
    num_experts = read_model(question.model).num_experts
    for ep in EP_SIZES:
        extras = REDUNDANT if ep > 1 else (0,)
        if ep <= goal.gpus:
            yield from ((ep, extra) for extra in extras if (num_experts + extra) % ep == 0)


def _decodes(question: Question, goal: Goal) -> Iterator[Question]:
    # On average a request is half way through its output.
    context = goal.input_len + goal.output_len // 2
    for ep, extra in _sizes(question, goal):
        for batch in DECODE_BATCHES:
            yield from _with_overlap(question, "decode", ep, extra, batch, context)


def _prefills(question: Question, goal: Goal) -> Iterator[Question]:
    for ep, extra in _sizes(question, goal):
        for tokens in PREFILL_TOKENS:
            batch = max(1, tokens // goal.input_len)
            sized = replace(question, max_num_batched_tokens=min(tokens, batch * goal.input_len))
            yield from _with_overlap(sized, "prefill", ep, extra, batch, goal.input_len)


def _with_overlap(
    question: Question, phase: str, ep: int, extra: int, batch: int, context: int
) -> Iterator[Question]:
    for overlap in (False, True):
        yield replace(
            question,
            phase=phase,
            ep_size=ep,
            ep_num_redundant_experts=extra,
            batch=batch,
            context=context,
            enable_two_batch_overlap=overlap,
        )


def _tried(question: Question, goal: Goal, dropped: Counter[str]) -> Plan | None:
    try:
        plan = make_plan(question)
    except ConfigError as error:
        dropped[f"refused ({', '.join(sorted({p.field for p in error.problems}))})"] += 1
        return None
    if not plan.fits:
        dropped["does not fit into memory"] += 1
    elif plan.tpot_ms and plan.tpot_ms.value > goal.slo_tpot_ms:
        dropped["misses the time per output token"] += 1
    elif plan.ttft_ms and plan.ttft_ms.value > goal.slo_ttft_ms:
        dropped["misses the time to the first token"] += 1
    else:
        return plan
    return None


def _best_of_size(plans: list[Plan]) -> dict[tuple[str, int], Plan]:
    """By phase and EP size, the plan with the most tokens per second."""
    best: dict[tuple[str, int], Plan] = {}
    for plan in plans:
        question = plan.setting.question
        key = (question.phase, question.ep_size)
        if key not in best or _rate(plan) > _rate(best[key]):
            best[key] = plan
    return best


def _rate(plan: Plan) -> float:
    return plan.tokens_per_s_per_gpu.value


def _shared(prefill: Plan, decode: Plan, goal: Goal) -> Option | None:
    """As many engines of each as serve most requests together."""
    sizes = [plan.setting.question.ep_size for plan in (prefill, decode)]
    per_engine = (
        _rate(prefill) * prefill.setting.question.prefill_load * sizes[0] / goal.input_len,
        _rate(decode) * sizes[1] / goal.output_len,
    )
    best: Option | None = None
    for num_prefill in range(1, (goal.gpus - sizes[1]) // sizes[0] + 1):
        num_decode = (goal.gpus - num_prefill * sizes[0]) // sizes[1]
        ways = (num_prefill * per_engine[0], num_decode * per_engine[1])
        if best is None or min(ways) > best.requests_per_s:
            best = Option(
                prefill=prefill,
                decode=decode,
                num_prefill=num_prefill,
                num_decode=num_decode,
                requests_per_s=min(ways),
                limited_by=_limit(ways, prefill, decode, goal),
                spare=goal.gpus - num_prefill * sizes[0] - num_decode * sizes[1],
            )
    return best


def _limit(ways: tuple[float, float], prefill: Plan, decode: Plan, goal: Goal) -> str:
    slower, name = (prefill, "prefill") if ways[0] <= ways[1] else (decode, "decode")
    limit = goal.slo_ttft_ms if name == "prefill" else goal.slo_tpot_ms
    estimate = slower.ttft_ms or slower.tpot_ms
    assert estimate is not None
    if estimate.value > 0.8 * limit:
        return f"{name}: time goal"
    if slower.cache_tokens_needed > 0.7 * slower.memory.cache_tokens:
        return f"{name}: cache memory"
    return f"{name}: {slower.bound}"


def advice_json(advice: Advice, goal: Goal) -> dict[str, Any]:
    """The machine's form; ``data/plan.schema.json`` documents it."""
    return {
        "version": 1,
        "goal": asdict(goal),
        "candidates": advice.num_candidates,
        "dropped": advice.dropped,
        "options": [
            {
                "requests_per_s": option.requests_per_s,
                "limited_by": option.limited_by,
                "unused_gpus": option.spare,
                "num_prefill_engines": option.num_prefill,
                "num_decode_engines": option.num_decode,
                "prefill": as_json(option.prefill),
                "decode": as_json(option.decode),
                "commands": [
                    launch_command(plan.setting.question)
                    for plan in (option.prefill, option.decode)
                ],
            }
            for option in advice.options
        ],
    }
