"""The choice of backends: what "auto" takes, in which order, and what a name in vain is told."""

import dataclasses

import pytest
import torch

from eplb.dispatch import static_table
from eplb.placement import Placement
from moe_ep.config import ConfigError, EngineConfig, ModelConfig
from moe_ep.dispatch.layout import masked_rows
from moe_ep.engine.backends import backend_answers, exchange_spec, resolve_backends
from moe_ep.engine.specs import expert_spec
from moe_ep.fp8 import ScaleFormat
from moe_ep.linear import Linear
from moe_ep.linear_fp8 import DeepGemmLinear
from moe_ep.model.build import DecoderParts, build_decoder
from moe_ep.model.weights import DummySource
from moe_ep.progress import Progress
from tests.emulators.device import emulated_kernels
from tests.emulators.install import emulated

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MODEL = ModelConfig.from_path("deepseek-v3")
BACKENDS = ("moe_runner_backend", "moe_a2a_backend", "attention_backend")


def resolved(**flags) -> EngineConfig:
    config, _ = EngineConfig(model="deepseek-v3", load_format="dummy", **flags).resolve(MODEL)
    return config


def chosen(config: EngineConfig) -> list[str]:
    return [getattr(config, name) for name in BACKENDS]


@pytest.mark.parametrize(("ep_size", "exchange"), [(1, "local"), (2, "collective")])
def test_auto_without_libraries_says_what_is_missing(ep_size: int, exchange: str):
    config, choices = resolve_backends(resolved(ep_size=ep_size), MODEL, CPU)
    assert chosen(config) == ["torch", exchange, "torch"]
    assert [choice.field for choice in choices] == list(BACKENDS)
    runner, a2a, attention = (choice.reason for choice in choices)
    assert "No module named 'deep_gemm'" in runner
    assert "No module named 'flash_mla'" in attention
    assert ("deep_ep cannot be imported" in a2a) == (ep_size > 1)
    assert resolve_backends(config, MODEL, CPU)[0] == config


def test_auto_with_libraries_takes_them():
    with emulated("deep_ep"), emulated_kernels():
        config, _ = resolve_backends(resolved(ep_size=8), MODEL, CPU)
        assert chosen(config) == ["deep_gemm", "deepep", "flash_mla"]
        # What a library cannot serve is left to the next, here by the hidden size.
        wide = dataclasses.replace(MODEL, hidden_size=9216)
        config, choices = resolve_backends(resolved(ep_size=8), wide, CPU)
    assert chosen(config) == ["deep_gemm", "deepep_v2", "flash_mla"]
    assert "hidden: 9216 given" in choices[1].reason


def test_triton_is_preferred_to_torch_on_a_gpu_alone():
    def order(device: torch.device, setting: str) -> list[str]:
        answers = backend_answers(resolved(moe_runner_backend="torch"), MODEL, device)
        return [answer.backend for answer in answers if answer.setting == setting]

    assert order(GPU, "attention_backend") == ["flash_mla", "triton", "torch"]
    assert order(CPU, "attention_backend") == ["flash_mla", "torch", "triton"]
    assert order(GPU, "moe_runner_backend") == ["deep_gemm", "triton", "torch"]
    assert order(CPU, "moe_runner_backend") == ["deep_gemm", "torch", "triton"]


def test_names_in_vain_fail_together_with_what_can_and_why():
    config = resolved(
        ep_size=2,
        moe_a2a_backend="deepep",
        moe_runner_backend="deep_gemm",
        attention_backend="flash_mla",
    )
    with pytest.raises(ConfigError) as caught:
        resolve_backends(config, MODEL, CPU)
    problems = {problem.field: problem for problem in caught.value.problems}
    assert set(problems) == set(BACKENDS)
    exchange = problems["moe_a2a_backend"]
    assert (exchange.given, exchange.allowed) == ("deepep", "collective")
    assert "local: num_ranks: 2 given" in exchange.fix
    assert "deepep_v2: deep_ep cannot be imported" in exchange.fix
    assert "torch" in problems["moe_runner_backend"].allowed


def test_an_exchange_answers_for_the_modes_in_use():
    """More tokens than the low-latency kernels of DeepEP V1 can take."""

    def reason(mode: str) -> str | None:
        config = resolved(ep_size=8, max_num_seqs=600, deepep_mode=mode)
        answers = backend_answers(config, MODEL, CPU)
        return next(answer.reason for answer in answers if answer.backend == "deepep")

    with emulated("deep_ep"):
        assert reason("normal") is None
        assert "capacity: 600 given" in (reason("low_latency") or "")
        assert reason("auto") == reason("low_latency")


def test_the_exchange_delivers_the_alignment_of_the_experts():
    with emulated_kernels():
        config = resolved(ep_size=2, max_num_seqs=5, moe_runner_backend="deep_gemm")
        spec = exchange_spec(config, MODEL, CPU)
        assert (spec.row_alignment, spec.scale_format) == (128, ScaleFormat.FLOAT32)
        assert masked_rows(spec) == 128
        assert masked_rows(dataclasses.replace(spec, capacity=65)) == 256
        assert masked_rows(dataclasses.replace(spec, row_alignment=1)) == 10


def test_the_exchange_delivers_the_scales_of_the_experts():
    config = resolved(ep_size=2, moe_runner_backend="deep_gemm")
    with emulated_kernels(major=10):
        spec = exchange_spec(config, MODEL, CPU)
        assert (spec.row_alignment, spec.scale_format) == (256, ScaleFormat.UE8M0)
        wide = dataclasses.replace(MODEL, quantization=None)  # restores rows from float32 scales
        assert exchange_spec(config, wide, CPU).scale_format is ScaleFormat.FLOAT32
    other = dataclasses.replace(config, moe_runner_backend="torch")
    spec = exchange_spec(other, MODEL, CPU)
    assert (spec.row_alignment, spec.scale_format) == (1, ScaleFormat.FLOAT32)


def test_expected_rows_are_those_of_a_full_step():
    spec = expert_spec(resolved(ep_size=8, max_num_seqs=64), MODEL, CPU)
    assert spec.expected_rows == 64 * 8 // 32  # tokens of a rank x choices / slots of a rank
    assert expert_spec(resolved(max_num_seqs=1), MODEL, CPU).expected_rows == 1


class NoExperts:
    def load_slot(self, slot, weights) -> None: ...


@pytest.mark.parametrize("keeps_fp8", [False, True])
def test_fp8_projections_are_kept_where_their_sizes_allow(keeps_fp8: bool, caplog):
    model = dataclasses.replace(
        MODEL,
        num_layers=1,
        num_experts=8,
        hidden_size=256,
        num_heads=2,
        q_lora_rank=128,
        intermediate_size=320,  # gate cannot be stacked on up, and down has half a block
        vocab_size=32,
        max_position_embeddings=64,
    )
    placement = Placement.trivial(num_layers=1, num_experts=8, num_ranks=1)
    parts = DecoderParts(
        dtype=torch.bfloat16,
        device=CPU,
        keeps_fp8=keeps_fp8,
        attention=None,
        dispatcher=None,
        make_experts=NoExperts,
        placement=placement,
        slot_table=static_table(placement, 0, None),
        rank=0,
        progress=Progress(),
    )
    with emulated_kernels(), caplog.at_level("INFO"):
        (layer,) = build_decoder(model, DummySource(model, 0), parts).layers
    assert type(layer.attention.o_proj) is (DeepGemmLinear if keeps_fp8 else Linear)
    assert type(layer.mlp.gate_up) is type(layer.mlp.down) is Linear
    assert ("cannot share a scale per 128x128" in caplog.text) == keeps_fp8
