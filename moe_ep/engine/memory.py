"""The bytes that a rank keeps from its start on: weights by part, and the latent cache.

Plain arithmetic on a model's sizes; needs no tensor and no device, so that ``moe-ep plan`` counts
as the engine does. Shape letters: L layers, E experts, S slots of a rank, H hidden, I expert
intermediate.
"""

from dataclasses import dataclass, fields

from moe_ep.config import EngineConfig, ModelConfig

FP8_BLOCK = 128  # FP8 weights have one scale per block of so many rows and columns
CACHE_BLOCK = 64  # tokens of a block of the latent cache
VALUE_BYTES = {"fp8": 1, "bfloat16": 2, "float32": 4}
# FP8 products of the library write 16 bytes of BF16 outputs at a time.
FP8_OUTPUT_MULTIPLE = 8


@dataclass(frozen=True)
class WeightStorage:
    """How a rank's backends keep weights.

    dtype: compute type, ``bfloat16`` or ``float32``. keeps_fp8: dense projections stay as an FP8
    checkpoint has them. expert_dtype: ``fp8`` or the compute type. expert_row_multiple: rows of
    gate, and of up, are padded to it. packs_scales: scales are four exponents in an int32, one per
    row and 512 columns (SM100), instead of one float32 per block. is_cpu: dense weights are packed;
    W_UK and W_UV are kept once more for the absorb path, and a head that is tied to the embedding
    lies apart from it. is_widened: also, weights of BF16 products are kept in float32, as on CPUs
    without instructions for BF16 (``attention.products``).
    """

    dtype: str
    keeps_fp8: bool = False
    expert_dtype: str = "bfloat16"
    expert_row_multiple: int = 1
    packs_scales: bool = False
    is_cpu: bool = False
    is_widened: bool = False

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model: ModelConfig,
        *,
        is_sm100: bool = False,
        is_cpu: bool = False,
        is_widened: bool = False,
    ) -> "WeightStorage":
        """config: resolved, with the experts' backend named."""
        runner, is_fp8 = config.moe_runner_backend, model.quantization == "fp8"
        is_library = runner == "deep_gemm"
        return cls(
            dtype=config.dtype,
            keeps_fp8=is_fp8 and is_library,
            expert_dtype="fp8" if is_fp8 and runner != "torch" else config.dtype,
            expert_row_multiple=FP8_BLOCK if runner == "triton" else 1,
            packs_scales=is_sm100 and is_library,
            is_cpu=is_cpu,
            is_widened=is_widened,
        )

    def matrix(self, rows: int, cols: int, dtype: str | None = None) -> int:
        """Bytes of a weight ``[rows, cols]`` of a product, and of its scales."""
        dtype = dtype or self.dtype
        if self.is_widened and dtype == "bfloat16":
            dtype = "float32"
        return rows * cols * VALUE_BYTES[dtype] + (
            self._scales(rows, cols) if dtype == "fp8" else 0
        )

    def projection(self, cols: int, *parts: int) -> int:
        """Bytes of one product with ``cols`` inputs; parts: outputs of the stacked matrices."""
        fits = (
            cols % FP8_BLOCK == 0
            and all(rows % FP8_BLOCK == 0 for rows in parts[:-1])
            and parts[-1] % FP8_OUTPUT_MULTIPLE == 0
        )
        return self.matrix(sum(parts), cols, "fp8" if self.keeps_fp8 and fits else None)

    def _scales(self, rows: int, cols: int) -> int:
        if self.packs_scales:
            return 4 * -(-rows // 4) * 4 * -(-cols // (4 * FP8_BLOCK))
        return 4 * -(-rows // FP8_BLOCK) * -(-cols // FP8_BLOCK)


@dataclass(frozen=True)
class WeightBytes:
    """Of one rank, all layers together. tables: rotary tables, slot tables and counters."""

    embedding: int
    head: int
    attention: int
    dense_mlp: int
    shared_experts: int
    gates: int
    norms: int
    routed_experts: int
    tables: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def slots_per_rank(model: ModelConfig, *, ep_size: int, num_redundant: int) -> int:
    return (model.num_experts + num_redundant) // ep_size


def weight_bytes(model: ModelConfig, storage: WeightStorage, *, num_slots: int) -> WeightBytes:
    """num_slots: of this rank, in every MoE layer."""
    hidden, num_moe = model.hidden_size, model.num_moe_layers
    head = storage.matrix(model.vocab_size, hidden)
    shared = model.num_shared_experts * model.moe_intermediate_size
    return WeightBytes(
        embedding=model.vocab_size * hidden * VALUE_BYTES[storage.dtype],
        head=0 if model.tie_word_embeddings and not storage.is_cpu else head,
        attention=model.num_layers * attention_bytes(model, storage),
        dense_mlp=model.first_k_dense_replace * _mlp(storage, hidden, model.intermediate_size),
        shared_experts=num_moe * _mlp(storage, hidden, shared) if shared else 0,
        gates=num_moe * _gate_bytes(model),
        norms=_num_norm_values(model) * VALUE_BYTES[storage.dtype],
        routed_experts=num_moe * num_slots * expert_bytes(model, storage),
        tables=_table_bytes(model, num_slots),
    )


def attention_bytes(model: ModelConfig, storage: WeightStorage) -> int:
    """Of one layer, without norms. W_UK and W_UV are kept restored, whatever the checkpoint has."""
    hidden, heads = model.hidden_size, model.num_heads
    q_out = heads * model.qk_head_dim
    first_q = q_out if model.q_lora_rank is None else model.q_lora_rank
    total = storage.projection(hidden, first_q, model.latent_dim)
    if model.q_lora_rank is not None:
        total += storage.projection(model.q_lora_rank, q_out)
    total += storage.projection(heads * model.v_head_dim, hidden)
    folded = heads * (model.qk_nope_head_dim + model.v_head_dim)
    biases = (first_q if model.q_lora_rank is not None else 0) + model.latent_dim + hidden
    if model.attention_bias:
        # One product has one bias: where only the latent has one, the query's part is zeros.
        biases += q_out if model.q_lora_rank is None else 0
        total += storage.matrix(1, biases)
    copies = 2 if storage.is_cpu else 1
    return total + copies * storage.matrix(folded, model.kv_lora_rank)


def expert_bytes(model: ModelConfig, storage: WeightStorage) -> int:
    """Of one routed expert as a slot keeps it."""
    inner = model.moe_intermediate_size
    padded = -(-inner // storage.expert_row_multiple) * storage.expert_row_multiple
    gate_up = storage.matrix(2 * padded, model.hidden_size, storage.expert_dtype)
    return gate_up + storage.matrix(model.hidden_size, inner, storage.expert_dtype)


def cache_bytes_per_token(model: ModelConfig, bytes_per_value: int) -> int:
    """Of the latents of one token in all layers."""
    return model.num_layers * model.latent_dim * bytes_per_value


def _mlp(storage: WeightStorage, hidden: int, width: int) -> int:
    return storage.projection(hidden, width, width) + storage.projection(width, hidden)


def _gate_bytes(model: ModelConfig) -> int:
    """The router computes in float32 whatever the checkpoint has."""
    has_bias = model.topk_method == "noaux_tc"
    return 4 * model.num_experts * (model.hidden_size + (1 if has_bias else 0))


def _num_norm_values(model: ModelConfig) -> int:
    per_layer = 2 * model.hidden_size + (model.q_lora_rank or 0) + model.kv_lora_rank
    return model.num_layers * per_layer + model.hidden_size


def _table_bytes(model: ModelConfig, num_slots: int) -> int:
    rotary = 2 * 4 * model.max_position_embeddings * (model.qk_rope_head_dim // 2)
    return rotary + 8 * model.num_moe_layers * (model.num_experts + num_slots)
