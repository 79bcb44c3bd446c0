"""A whole MLA layer against transformers' DeepseekV3Attention, fed in pieces of every kind."""

from array import array
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

from attention import MLA, AttentionBatch, AttentionSpec, LatentCache, create_attention, new_tokens
from attention.mla import Part
from moe_ep.config import ModelConfig
from moe_ep.model.norm import RMSNorm
from moe_ep.model.rope import RotaryEmbedding
from tests.compare import assert_bits_equal, assert_rows_close

pytestmark = pytest.mark.usefixtures("bf16_products")

NUM_BLOCKS, MAX_POSITIONS = 16, 512
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@dataclass(frozen=True)
class Step:
    """(request, number of new tokens) in token order, decodes first, plus padding rows."""

    parts: list[tuple[int, int]]
    num_decodes: int = 0
    num_padding: int = 0


class Layer:
    """transformers' module and ours over the same weights, and a cache of shuffled blocks."""

    def __init__(
        self,
        *,
        q_lora_rank: int | None = 48,
        interleave: bool = True,
        yarn: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        self.dtype = dtype
        config = DeepseekV3Config(
            hidden_size=64,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=q_lora_rank,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=24,
            rope_interleave=interleave,
            max_position_embeddings=MAX_POSITIONS,
            rope_parameters=dict(YARN) if yarn else None,
        )
        config._attn_implementation = "eager"
        self.reference = hf.DeepseekV3Attention(config, layer_idx=0).eval()
        for parameter in self.reference.parameters():
            parameter.data = parameter.data.uniform_(-0.3, 0.3).to(dtype).float()
        self.reference_rope = hf.DeepseekV3RotaryEmbedding(config)
        self.rope, self.mla = our_layer(config, self.reference, dtype)
        self.cache = LatentCache(num_layers=2, num_blocks=NUM_BLOCKS, latent_dim=40, dtype=dtype)
        self.cache.tensor.fill_(torch.nan)
        self.free_blocks = torch.randperm(NUM_BLOCKS).tolist()
        self.tables: dict[int, array[int]] = {}
        self.lens: dict[int, int] = {}
        self.parts: list[Part] = []  # of attention, as they began

    @torch.no_grad()
    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """transformers' output for one whole sequence ``[T, H]``."""
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        embeddings = self.reference_rope(x, torch.arange(len(x))[None])
        return self.reference(x[None], embeddings, mask)[0][0]

    @torch.no_grad()
    def run(self, sequences: dict[int, torch.Tensor], step: Step) -> torch.Tensor:
        batch = AttentionBatch(step.num_decodes, [], [], [], 0)
        rows: list[torch.Tensor] = []
        positions: list[int] = []
        slots: list[int] = []
        for request, count in step.parts:
            start = self.lens.get(request, 0)
            table = self.tables.setdefault(request, array("i"))
            while len(table) * 64 < start + count:
                table.append(self.free_blocks.pop())
            rows.append(sequences[request][start : start + count])
            positions += range(start, start + count)
            slots += [table[p // 64] * 64 + p % 64 for p in range(start, start + count)]
            batch.query_lens.append(count)
            batch.context_lens.append(start)
            batch.block_tables.append(table)
            self.lens[request] = start + count
        padding = torch.full((step.num_padding, 64), torch.nan)
        x = torch.cat([*rows, padding]).to(self.dtype)
        cos, sin = self.rope.cos_sin(torch.tensor(positions + [0] * step.num_padding).long())
        return self.mla.forward(
            x,
            cos=cos,
            sin=sin,
            cache=self.cache,
            layer_idx=1,
            slot_mapping=torch.tensor(slots + [-1] * step.num_padding).long(),
            plan=self.mla.backend.plan(replace(batch, num_padded_tokens=len(x))),
            enter=self.parts.append,
        )


def our_layer(config: Any, reference: Any, dtype: torch.dtype) -> tuple[RotaryEmbedding, MLA]:
    model = ModelConfig.from_dict(config.to_dict())
    weights = {name: p.detach().to(dtype) for name, p in reference.named_parameters()}
    sizes = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    spec = AttentionSpec(
        **{name: getattr(model, name) for name in sizes},
        softmax_scale=model.softmax_scale,
        dtype=dtype,
    )
    rope = RotaryEmbedding(
        dim=model.qk_rope_head_dim,
        theta=model.rope_theta,
        interleave=model.rope_interleave,
        yarn=model.yarn,
        max_positions=MAX_POSITIONS,
    )

    def q(x: torch.Tensor) -> torch.Tensor:
        if config.q_lora_rank is None:
            return linear(x, weights["q_proj.weight"]).view(-1, 4, 24)
        x = linear(x, weights["q_a_proj.weight"])
        x = RMSNorm(weights["q_a_layernorm.weight"], 1e-6)(x)
        return linear(x, weights["q_b_proj.weight"]).view(-1, 4, 24)

    return rope, MLA(
        spec=spec,
        backend=create_attention("auto", spec),
        qkv=lambda x: (q(x), linear(x, weights["kv_a_proj_with_mqa.weight"])),
        latents=lambda x: linear(x, weights["kv_a_proj_with_mqa.weight"]),
        kv_a_norm=RMSNorm(weights["kv_a_layernorm.weight"], 1e-6),
        o_proj=lambda x: linear(x, weights["o_proj.weight"]),
        rope=rope,
        w_kv_b=weights["kv_b_proj.weight"].view(4, 40, 32),
    )


@pytest.mark.parametrize("q_lora_rank", [None, 48])
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("yarn", [True, False])
def test_pieces_equal_transformers(q_lora_rank: int | None, interleave: bool, yarn: bool) -> None:
    check_pieces(Layer(q_lora_rank=q_lora_rank, interleave=interleave, yarn=yarn))


@pytest.mark.parametrize("interleave", [True, False])
def test_pieces_taken_in_by_the_kernel(monkeypatch, interleave: bool) -> None:
    """In its interpreter; on a GPU it is the usual way."""
    monkeypatch.setattr(new_tokens, "uses_kernel", lambda device: True)
    check_pieces(Layer(interleave=interleave))


def check_pieces(layer: Layer) -> None:
    """Two sequences by prefill, chunk, mixed steps, single and double decodes, with padding."""
    sequences = {0: torch.randn(150, 64), 1: torch.randn(75, 64)}
    steps = [
        Step([(0, 62)], num_padding=2),
        Step([(0, 1), (1, 30)], num_decodes=1),
        Step([(1, 1), (0, 80)], num_decodes=1, num_padding=3),
        Step([(0, 1), (1, 42)], num_decodes=1),
        Step([(0, 1), (1, 1)], num_decodes=2, num_padding=6),
        Step([(0, 2), (1, 1)], num_decodes=2),
        Step([(0, 3)], num_decodes=1, num_padding=1),
    ]
    got: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for step in steps:
        out = layer.run(sequences, step)
        lens = [count for _, count in step.parts]
        *pieces, padding = out.split([*lens, step.num_padding])
        assert_bits_equal(padding, torch.zeros(step.num_padding, 64))
        for (request, _), piece in zip(step.parts, pieces, strict=True):
            got[request].append(piece)
    assert layer.parts == [Part.PROJECTIONS, Part.CORE, Part.OUTPUT] * len(steps)
    for request, sequence in sequences.items():
        want = layer.expected(sequence)
        assert_rows_close(torch.cat(got[request]), want, rtol=1e-5, atol=1e-5)
    assert layer.cache.tensor[0].isnan().all()


@pytest.mark.parametrize("num_padding", [0, 5])
def test_no_tokens(num_padding: int) -> None:
    layer = Layer()
    out = layer.run({}, Step([], num_padding=num_padding))
    assert_bits_equal(out, torch.zeros(num_padding, 64))
    assert layer.cache.tensor.isnan().all()


def test_bfloat16_equals_transformers_in_float32() -> None:
    """Both see the same rounded weights and inputs, so the tolerance is our rounding alone."""
    layer = Layer(dtype=torch.bfloat16)
    sequence = torch.randn(132, 64).bfloat16().float()
    steps = [Step([(0, 60)]), Step([(0, 70)], num_padding=1), Step([(0, 1)], 1), Step([(0, 1)], 1)]
    outs = [layer.run({0: sequence}, step)[: step.parts[0][1]] for step in steps]
    got = torch.cat(outs)
    assert got.dtype == torch.bfloat16
    assert_rows_close(got.float(), layer.expected(sequence), rtol=3e-2, atol=1e-3)


def test_decode_equals_prefill_of_the_same_token() -> None:
    sequences = {0: torch.randn(71, 64)}
    outs = []
    for num_decodes in (0, 1):
        layer = Layer()
        layer.run(sequences, Step([(0, 70)]))
        outs.append(layer.run(sequences, Step([(0, 1)], num_decodes=num_decodes)))
    assert_rows_close(outs[0], outs[1])


def test_wrong_weight_shape_is_refused() -> None:
    layer = Layer()
    with pytest.raises(ValueError, match=r"must be \(4, 40, 32\), got \(4, 32, 40\)"):
        MLA(
            spec=layer.mla.spec,
            backend=layer.mla.backend,
            qkv=layer.mla.qkv,
            latents=layer.mla.latents,
            kv_a_norm=layer.mla.kv_a_norm,
            o_proj=layer.mla.o_proj,
            rope=layer.rope,
            w_kv_b=torch.zeros(4, 32, 40),
        )
