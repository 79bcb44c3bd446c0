"""A whole step: layers under overlap, and what comes before and after them.

Overlap is played through, not assumed: two micro-batches take turns on the compute stream as the
engine's generators do (``moe_ep/overlap.py``), their exchanges share one link, and the time of a
layer is what remains when the first layers are over. Times are in microseconds.
"""

from dataclasses import dataclass, replace

from launch.plan.kernels import Cost, Parameters, product
from launch.plan.layer import (
    NORMAL_MODE_SMS,
    Batch,
    Deployment,
    Stages,
    attention_stages,
    dense_stages,
    moe_stages,
)
from moe_ep.progress import Stage

BEFORE_DISPATCH = (
    Stage.NORMS, Stage.ATTENTION_PROJECTIONS, Stage.ATTENTION_CORE, Stage.ATTENTION_OUTPUT,
    Stage.GATE,
)  # fmt: skip
SIMULATED_LAYERS = 8
# Of the host between two steps (alibaba/rtp-llm reporter.md). The 2 ms of launches that it has
# beside them are none where steps are graphs, and hidden where steps are long.
HOST_US = 1500.0


@dataclass(frozen=True)
class StepTime:
    """layer: stages of one MoE layer, of all micro-batches together, exchanges as if nothing
    overlapped them. layer_us: what such a layer takes, overlap counted. exposed_us: of it, time in
    which nothing is computed. dense_us: a dense layer. outside: what a step does outside of layers,
    by stage, and ``drafts``.
    """

    layer: Stages
    layer_us: float
    exposed_us: float
    dense_us: float
    outside: dict[str, Cost]
    step_us: float


def step_time(d: Deployment, batch: Batch, p: Parameters) -> StepTime:
    model = d.model
    parts = 2 if d.overlap else 1
    micro = batch.half() if d.overlap else batch
    seen = d.with_fewer_sms(NORMAL_MODE_SMS) if d.overlap and batch.phase == "prefill" else d
    attention = attention_stages(seen, micro, p)
    moe = attention | moe_stages(seen, micro, p)
    layer_us = overlapped_layer(moe) if d.overlap else _sequential(moe)
    compute_us = parts * sum(cost.us for stage, cost in moe.items() if not is_exchange(stage))
    dense = attention | dense_stages(seen, micro, p)
    dense_us = parts * sum(cost.us for cost in dense.values())
    outside = _outside(d, batch, p)
    layers_us = model.num_moe_layers * layer_us + model.first_k_dense_replace * dense_us
    return StepTime(
        layer={stage: cost.times(parts) for stage, cost in moe.items()},
        layer_us=layer_us,
        exposed_us=max(0.0, layer_us - compute_us),
        dense_us=dense_us,
        outside=outside,
        step_us=layers_us * p[f"{batch.phase}_inflation"]
        + sum(cost.us for cost in outside.values()),
    )


def is_exchange(stage: Stage) -> bool:
    return stage in (Stage.DISPATCH_WAIT, Stage.COMBINE_WAIT)


def _sequential(stages: Stages) -> float:
    """One micro-batch: the shared expert is computed while tokens are on their way."""
    us = {stage: cost.us for stage, cost in stages.items()}
    shared = us.pop(Stage.SHARED_EXPERT, 0.0)
    hidden = min(shared, us[Stage.DISPATCH_WAIT])
    return sum(us.values()) + shared - hidden


def overlapped_layer(stages: Stages) -> float:
    """What a layer of two micro-batches, each with these stages, adds to a step."""
    us = {stage: cost.us for stage, cost in stages.items()}
    before = sum(us[stage] for stage in BEFORE_DISPATCH)
    shared = us.get(Stage.SHARED_EXPERT, 0.0)
    now, link = 0.0, 0.0
    arrival = [0.0, 0.0]  # of what each micro-batch waits for
    ends = []
    for _ in range(SIMULATED_LAYERS):
        for i in (0, 1):
            now = max(now, arrival[i]) + before
            link = arrival[i] = max(now, link) + us[Stage.DISPATCH_WAIT]
        for i in (0, 1):
            now = max(now + shared, arrival[i]) + us[Stage.EXPERTS]
            link = arrival[i] = max(now, link) + us[Stage.COMBINE_WAIT]
        ends.append(now)
    return (ends[-1] - ends[2]) / (SIMULATED_LAYERS - 3)


def _outside(d: Deployment, batch: Batch, p: Parameters) -> dict[str, Cost]:
    # A prefill samples one token per prompt, a decode step one per query.
    rows = batch.num_tokens if batch.phase == "decode" else batch.num_requests
    found = {
        str(Stage.HEAD): _head(d, rows, p),
        str(Stage.SCHEDULING): Cost(HOST_US, "launch"),
    }
    if batch.num_drafts:
        found["drafts"] = _drafts(d, batch, p).times(p[f"{batch.phase}_inflation"])
    return found


def _head(d: Deployment, rows: float, p: Parameters) -> Cost:
    size = d.model.hidden_size
    return product(d.card, p, m=rows, n=d.model.vocab_size, k=size, dtype="bfloat16")


def _drafts(d: Deployment, batch: Batch, p: Parameters) -> Cost:
    """The draft layer after the step: once over all its tokens, then, in decode, once more over a
    token of each request for every further draft. A product joins hidden states and embeddings, a
    layer with experts follows, then the model's own head; nothing overlaps."""
    again = replace(batch, num_tokens=batch.num_requests, queries_per_request=1.0)
    passes = [batch] + (batch.num_drafts - 1) * [again] * (batch.phase == "decode")
    hidden, total = d.model.hidden_size, Cost(0.0, "launch")
    for one in passes:
        stages = attention_stages(d, one, p) | moe_stages(d, one, p)
        total += product(d.card, p, m=one.num_tokens, n=hidden, k=2 * hidden, dtype="bfloat16")
        total += Cost(_sequential(stages), "memory")
        total += _head(d, batch.num_requests, p)
    return total
