"""What one rank's memory holds: exact where it is arithmetic, else an estimate that says so."""

from dataclasses import dataclass, fields, replace

from launch.plan.cards import cards
from launch.plan.layer import Batch, Deployment
from launch.plan.question import Question
from moe_ep.config import EngineConfig, ModelConfig
from moe_ep.config.exchange import (
    MASKED_ROW_ALIGNMENT,
    NUM_SMS,
    Mode,
    v1_buffer_bytes,
    v1_rounded_capacity,
    v2_buffer_bytes,
)
from moe_ep.engine.memory import (
    CACHE_BLOCK,
    FP8_BLOCK,
    WeightStorage,
    cache_bytes_per_token,
    weight_bytes,
)

# CUDA context, loaded kernels of torch and the libraries, NCCL's own buffers. An assumption, on the
# high side of what processes on these cards show before they load a model.
RUNTIME_BYTES = 3 << 30
# What torch's allocator holds beyond what is in use; an assumption.
FRAGMENTATION = 1.1


@dataclass(frozen=True)
class ExchangeSizes:
    """Sizes of an exchange, as ``moe_ep.config.exchange`` reads them."""

    hidden: int
    num_topk: int
    num_ranks: int
    num_slots_per_rank: int
    max_tokens_per_rank: int
    capacity: int
    row_alignment: int
    num_sms: int = NUM_SMS
    modes: frozenset[Mode] = frozenset(Mode)


@dataclass(frozen=True)
class MemoryPart:
    """is_exact: counted byte by byte as the engine allocates, not estimated."""

    name: str
    bytes: int
    is_exact: bool


@dataclass(frozen=True)
class RankMemory:
    """total_bytes: of the card. parts: everything but the cache. cache_tokens: that fit next to the
    parts into the share of the card that may be used. headroom_bytes: of that share, without cache;
    negative when not even the parts fit."""

    total_bytes: int
    usable_bytes: int
    parts: tuple[MemoryPart, ...]
    cache_bytes_per_token: int
    cache_tokens: int
    headroom_bytes: int


def exchange_sizes(question: Question, model: ModelConfig) -> ExchangeSizes:
    """Of the engine that would be started. Also of a question that cannot be answered, if its EP
    size is at least 1."""
    slots = model.num_experts + question.ep_num_redundant_experts
    card = cards().get(question.gpu)
    is_blackwell = card is not None and card.family == "blackwell"
    return ExchangeSizes(
        hidden=model.hidden_size,
        num_topk=model.num_experts_per_tok,
        num_ranks=question.ep_size,
        num_slots_per_rank=-(-slots // question.ep_size),
        max_tokens_per_rank=question.batched_tokens,
        capacity=question.capacity,
        row_alignment=2 * FP8_BLOCK if is_blackwell else MASKED_ROW_ALIGNMENT,
    )


def weight_storage(d: Deployment) -> WeightStorage:
    """As the engine keeps weights with DeepGEMM."""
    config = EngineConfig(model="", dtype="bfloat16", moe_runner_backend="deep_gemm")
    return WeightStorage.of(config, d.model, is_sm100=d.card.family == "blackwell")


def rank_memory(
    d: Deployment, batch: Batch, sizes: ExchangeSizes, *, backend: str, utilization: float
) -> RankMemory:
    """backend: ``deepep``, ``deepep_v2`` or ``local``. utilization: share of the card to use."""
    weights = weight_bytes(d.model, weight_storage(d), num_slots=d.num_slots)
    parts = [
        MemoryPart(field.name.replace("_", " "), getattr(weights, field.name), True)
        for field in fields(weights)
    ]
    if batch.num_drafts:
        parts.append(MemoryPart("draft layer", draft_bytes(d), False))
    parts.append(MemoryPart("exchange buffers", _buffers(sizes, backend, d), True))
    parts.append(MemoryPart("activations and graphs", _activations(d, batch, sizes), False))
    parts.append(MemoryPart("runtime", RUNTIME_BYTES, False))
    usable = int(d.card.memory_bytes * utilization)
    headroom = usable - sum(part.bytes for part in parts)
    cached = replace(d.model, num_layers=d.model.num_layers + 1) if batch.num_drafts else d.model
    per_token = cache_bytes_per_token(cached, d.cache_value_bytes)
    blocks = max(0, headroom // (per_token * CACHE_BLOCK) - 1)  # one block is for padding
    return RankMemory(
        total_bytes=d.card.memory_bytes,
        usable_bytes=usable,
        parts=tuple(part for part in parts if part.bytes),
        cache_bytes_per_token=per_token,
        cache_tokens=blocks * CACHE_BLOCK,
        headroom_bytes=headroom,
    )


def draft_bytes(d: Deployment) -> int:
    """A layer with experts, the product that joins hidden states and embeddings, and its three
    norms; embedding and head are the model's own (DeepSeek-V3, README_WEIGHTS.md)."""
    one = weight_bytes(
        replace(d.model, num_layers=1, first_k_dense_replace=0),
        weight_storage(d),
        num_slots=d.num_slots,
    )
    hidden = d.model.hidden_size
    return (
        one.total - one.embedding - one.head - one.tables + 2 * (2 * hidden * hidden + 2 * hidden)
    )


def _buffers(sizes: ExchangeSizes, backend: str, d: Deployment) -> int:
    if backend == "local":
        return 0
    if backend == "deepep_v2":
        return v2_buffer_bytes(sizes, is_fp8=True)
    return v1_buffer_bytes(sizes).total(sizes)


def _activations(d: Deployment, batch: Batch, sizes: ExchangeSizes) -> int:
    """The largest tensors that live at once: around the experts, or the logits.

    Decode: rows lie in room for every rank's full batch in every slot (masked layout); a row has
    FP8 values, gate and up, the activation and the output. A captured graph keeps all of them.
    Prefill: as many rows as tokens bring on average, times the imbalance.
    """
    model = d.model
    inner, hidden = model.moe_intermediate_size, model.hidden_size
    row = (hidden + hidden // 32) + 2 * 2 * inner + inner + 2 * hidden
    if batch.phase == "decode" and d.ep_size > 1:
        rows = d.num_slots * d.ep_size * v1_rounded_capacity(sizes)
    else:
        mean = batch.num_tokens * model.num_experts_per_tok * d.imbalance
        rows = int(mean) + d.num_slots * sizes.row_alignment
    micro_batches = 2 if d.overlap else 1
    rows = rows // micro_batches if batch.phase == "prefill" else rows
    head_rows = batch.num_tokens if batch.phase == "decode" else max(1.0, batch.num_requests)
    logits = int(4 * head_rows * model.vocab_size)
    hidden_states = int(batch.num_tokens * hidden * 2 * 4)
    return int(FRAGMENTATION * (max(rows * row, logits) + hidden_states))
