"""Which published records this model can be held against, and what it predicts for each.

A record becomes a ``Target``, or it is excluded with a reason that the report prints. Nothing here
looks at how well a prediction does.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from launch.plan.balance import imbalance
from launch.plan.cards import Card, cards, fabrics
from launch.plan.exclusions import reason_against
from launch.plan.kernels import Parameters, product
from launch.plan.layer import Batch, Deployment, attention_stages, experts, gate, mlp
from launch.plan.published import Product, Record, group_of, products, records
from launch.plan.question import read_model
from launch.plan.step import step_time
from moe_ep.progress import Stage

# The parameters that a target needs, by what it measures.
KERNEL, EXCHANGE, DECODE, PREFILL = "kernel", "exchange", "decode", "prefill"
# Slots that the systems below had in all: 256 experts and 32 redundant ones.
SLOTS_WITH_REDUNDANCY = 288
ASSUMED_PREFILL_TOKENS = 16384


@dataclass(frozen=True)
class Target:
    """predict: the value in the record's unit under given parameters of the card's family. table:
    records of one table weigh as much as one record. note: what had to be assumed."""

    kind: str
    group: str
    family: str
    table: str
    what: str
    published: float
    unit: str
    predict: Callable[[Parameters], float]
    note: str = ""


@cache
def comparable() -> tuple[Target, ...]:
    found = (target(record) for record in records())
    return (*product_targets(), *(item for item in found if isinstance(item, Target)))


def excluded() -> list[tuple[str, str, int]]:
    """Group, reason and number of records that are not compared."""
    reasons = ((r.group, answer) for r in records() if isinstance(answer := target(r), str))
    return [(group, reason, n) for (group, reason), n in Counter(reasons).items()]


def product_targets() -> list[Target]:
    source, name, rows = products()
    card = cards()[name]

    def made(row: Product) -> Target:
        def predict(p: Parameters) -> float:
            return product(card, p, m=row.m, n=row.n, k=row.k, groups=row.groups).us

        return Target(
            kind=KERNEL,
            group=group_of(source),
            family=card.family,
            table=f"{source} {'grouped' if row.groups > 1 else 'dense'}",
            what=f"{row.groups} x [{row.m}, {row.k}] x [{row.k}, {row.n}]",
            published=row.us,
            unit="us",
            predict=predict,
        )

    return [made(row) for row in rows]


def target(record: Record) -> Target | str:
    """The target, or why there is none."""
    if reason := reason_against(record):
        return reason
    card = cards()[_card_name(record)]
    if record.metric in ("dispatch_us", "combine_us"):
        return _exchange(record, card)
    if record.metric in _KERNELS:
        return _kernel(record, card)
    if record.metric in ("decode_tok_s_per_gpu", "decode_step_ms"):
        return _decode(record, card)
    if record.metric in ("prefill_tok_s_per_gpu", "prefill_step_ms"):
        return _prefill(record, card)
    return f"{record.metric}: smaller than a stage of this model, or part of another record"


def _card_name(record: Record) -> str:
    if "on CX7" in record.note:
        return "h100"
    return record.gpu.lower().split("/")[-1].split("-")[0]


def _deployment(record: Record, card: Card, *, num_slots: int, x: float = 1.0) -> Deployment:
    return Deployment(
        model=read_model("deepseek-v3"),
        card=card,
        fabric=fabrics()[card.fabric],
        ep_size=record.ep or 1,
        num_slots=num_slots,
        imbalance=x,
        cache_value_bytes=1 if "FP8 KV" in record.dtype else 2,
        overlap=bool(record.tbo),
    )


def _made(record: Record, card: Card, kind: str, predict: Callable[[Parameters], float],
          note: str = "") -> Target:  # fmt: skip
    size = f"EP{record.ep}, " if record.ep else ""
    context = f", context {record.context:.0f}" if record.context else ""
    tokens = "?" if record.tokens is None else f"{record.tokens:g}"
    mode = " normal" if "DeepEP normal" in record.note else ""
    overlap = {True: ", overlap", False: "", None: ""}[record.tbo]
    return Target(
        kind=kind,
        group=record.group,
        family=card.family,
        table=record.source if kind == KERNEL else f"{record.source} {record.metric}{mode}",
        what=f"{_SHORT.get(record.metric, record.metric)}{mode} {record.gpu}: {size}"
        f"batch {tokens}{context}{overlap}",
        published=record.value,
        unit=record.unit,
        predict=predict,
        note=note,
    )


_SHORT = {
    "decode_tok_s_per_gpu": "decode tok/s",
    "decode_step_ms": "decode ms",
    "prefill_tok_s_per_gpu": "prefill tok/s",
    "prefill_step_ms": "prefill ms",
}


def _exchange(record: Record, card: Card) -> Target:
    d = _deployment(record, card, num_slots=1)
    way, tokens = record.metric.removesuffix("_us"), record.tokens or 0.0
    send = d.exchange.low_latency if record.phase == "decode" else d.exchange.normal
    note = "card not stated: NVLink of an H100" if "on CX7" in record.note else ""
    return _made(record, card, EXCHANGE, lambda p: send(p, tokens, way).us, note)


def _kernel(record: Record, card: Card) -> Target:
    ep = record.ep or 1
    d = _deployment(record, card, num_slots=256 // ep)
    batch = Batch(record.phase, record.tokens or 0.0, record.context or 1.0)
    return _made(record, card, KERNEL, lambda p: _KERNELS[record.metric](d, batch, p))


def _module(d: Deployment, batch: Batch, p: Parameters) -> float:
    stages = attention_stages(d, batch, p)
    return sum(cost.us for stage, cost in stages.items() if stage is not Stage.NORMS)


def _part(n: int, k: int, groups: int = 1, dtype: str = "fp8") -> "_Predict":
    return lambda d, batch, p: (
        product(d.card, p, m=batch.num_tokens, n=n, k=k, groups=groups, dtype=dtype).us
    )


def _expert_part(n: int, k: int) -> "_Predict":
    def predict(d: Deployment, batch: Batch, p: Parameters) -> float:
        rows = batch.num_tokens * d.model.num_experts_per_tok / d.num_slots
        return product(d.card, p, m=rows, n=n, k=k, groups=d.num_slots).us

    return predict


_Predict = Callable[[Deployment, Batch, Parameters], float]
_KERNELS: dict[str, _Predict] = {
    "mla_module_us": _module,
    "attention_total_us": _module,
    "mla_core_us": lambda d, b, p: attention_stages(d, b, p)[Stage.ATTENTION_CORE].us,
    "router_total_us": lambda d, b, p: gate(d, b.num_tokens, p).us,
    "expert_compute_us": lambda d, b, p: experts(d, b, p, is_random=False).us,
    "shared_expert_us": lambda d, b, p: mlp(d, p, b.num_tokens, 2048).us,
    "q_a_kv_a_us": _part(2112, 7168),
    "q_b_us": _part(24576, 1536),
    "o_proj_us": _part(7168, 16384),
    "q_absorb_bmm_us": _part(512, 128, 128, "bfloat16"),
    "v_absorb_bmm_us": _part(128, 512, 128, "bfloat16"),
    "expert_gate_up_us": _expert_part(4096, 7168),
    "expert_down_us": _expert_part(7168, 2048),
}


def _decode(record: Record, card: Card) -> Target | str:
    requests, queries, accepted, drafts, note = _speculation(record)
    if requests is None or (record.context is None and record.quality != "figure"):
        return "no batch or no context is published"
    ep = record.ep or 1
    is_profile = record.group == "DeepSeek profile"
    slots = 256 // ep if is_profile or ep < 32 else SLOTS_WITH_REDUNDANCY // ep
    x = 1.0 if is_profile else imbalance(ep, is_balanced=True)
    d = _deployment(record, card, num_slots=slots, x=x)
    batch = Batch("decode", requests * queries, record.context or 5120, queries, drafts)
    if record.metric == "decode_step_ms":
        return _made(record, card, DECODE, lambda p: step_time(d, batch, p).step_us / 1e3, note)
    return _made(
        record, card, DECODE,
        lambda p: requests * accepted / step_time(d, batch, p).step_us * 1e6, note,
    )  # fmt: skip


def _speculation(record: Record) -> tuple[float | None, float, float, int, str]:
    """Requests per GPU, query tokens and accepted tokens of each per step, passes of a draft layer,
    and what was assumed."""
    tokens = record.tokens
    if "EPLB figure" in record.source:
        note = "requests and context of the report's other record, 2 query tokens"
        return 92.5, 2.0, 1.0, 1, note
    if tokens is None:
        return None, 1.0, 1.0, 0, ""
    if record.group == "DeepSeek profile":
        return tokens / 2, 2.0, 1.0, 0, ""
    if "simulated MTP" in record.note:
        return tokens, 2.0, 1.6, 0, "1.6 accepted tokens, as the post assumes; no draft layer"
    if record.group == "Ant Group H20":
        accepted = 1.92 if tokens == 32 else 1.85
        note = f"{accepted} accepted tokens, as at EP16; combine not hidden behind the down product"
        return tokens, 2.0, accepted, 1, note
    return tokens, 1.0, 1.0, 0, "288 slots assumed" if record.group == "vLLM H200" else ""


def _prefill(record: Record, card: Card) -> Target | str:
    if record.context is None:
        return "no prompt length is published"
    ep = record.ep or 1
    note = "" if record.tokens else f"{ASSUMED_PREFILL_TOKENS} tokens per step assumed"
    note += "" if record.tbo is not None else ", no overlap assumed"
    tokens = record.tokens or ASSUMED_PREFILL_TOKENS
    is_even = record.group == "DeepSeek profile" or "perfect" in record.note
    slots = (SLOTS_WITH_REDUNDANCY if ep >= 32 else 256) // ep
    x = 1.0 if is_even else imbalance(ep, is_balanced=True)
    d = _deployment(record, card, num_slots=slots, x=x)
    batch = Batch("prefill", tokens, min(record.context, tokens))
    if record.metric == "prefill_step_ms":
        return _made(record, card, PREFILL, lambda p: step_time(d, batch, p).step_us / 1e3, note)
    return _made(
        record, card, PREFILL, lambda p: tokens / step_time(d, batch, p).step_us * 1e6, note
    )
