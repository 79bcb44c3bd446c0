"""Bytes of a rank against a published checkpoint, the exchange's formulas and loaded engines."""

import gc
import types
from dataclasses import replace

import pytest
import torch

from attention import products
from launch.cli import main
from launch.plan.memory import draft_bytes
from launch.plan.plan import make_plan
from launch.plan.question import Question
from moe_ep.config import EngineConfig, ModelConfig
from moe_ep.engine.assemble import assemble
from moe_ep.engine.memory import WeightStorage, cache_bytes_per_token, slots_per_rank, weight_bytes
from moe_ep.model.tensor_names import expected_tensors
from tests.emulators.device import emulated_kernels
from tests.emulators.install import emulated
from tests.engine.driver import world_alone
from tests.tiny import tiny_checkpoint

# Weight files of deepseek-ai/DeepSeek-V3 (artifact_bytes of its repository tree afb92e1), which
# hold a multi-token-prediction layer with copies of embedding and head.
PUBLISHED_BYTES = 688_586_727_753
PUBLISHED_PARAMETERS = 671e9  # README_WEIGHTS.md, main model


def checkpoint_bytes(model: ModelConfig) -> int:
    """All tensors as an FP8 checkpoint has them: router, norms, embedding and head unquantised."""
    wide = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
    total = 0
    for name, shape in expected_tensors(model).items():
        count = 1
        for size in shape:
            count *= size
        is_fp8 = model.quantization and len(shape) == 2 and not name.endswith(wide)
        blocks = 4 * -(-shape[0] // 128) * -(-shape[-1] // 128)
        total += count + blocks if is_fp8 else 2 * count
    return total


def test_a_rank_with_all_experts_holds_the_published_checkpoint():
    model = ModelConfig.from_path("deepseek-v3")
    storage = WeightStorage("bfloat16", keeps_fp8=True, expert_dtype="fp8")
    held = weight_bytes(model, storage, num_slots=256)
    hidden = model.hidden_size
    mtp_layer = (held.routed_experts + held.shared_experts + held.gates) / 58 + held.attention / 61
    mtp = mtp_layer + held.embedding + held.head + 2 * hidden * hidden * 2
    assert held.total + mtp == pytest.approx(PUBLISHED_BYTES, rel=0.01)
    bf16 = weight_bytes(model, WeightStorage("bfloat16"), num_slots=256)
    assert bf16.total == pytest.approx(2 * PUBLISHED_PARAMETERS, rel=0.01)


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "deepseek-v2-lite", "glm-4.7-flash"])
def test_parts_add_up_to_the_tensors_of_the_checkpoint(name: str):
    model = ModelConfig.from_path(name)
    is_fp8 = model.quantization == "fp8"
    storage = WeightStorage("bfloat16", is_fp8, "fp8" if is_fp8 else "bfloat16")
    held = weight_bytes(model, storage, num_slots=model.num_experts)
    # What a rank keeps wider than the checkpoint has it, apart from the tables: the router, and
    # for FP8 the folded projections.
    assert held.total - held.tables == pytest.approx(checkpoint_bytes(model), rel=0.006)
    assert held.total - held.tables >= checkpoint_bytes(model)


def test_latents_of_deepseek_take_70272_bytes_a_token():
    assert cache_bytes_per_token(ModelConfig.from_path("deepseek-v3"), 2) == 61 * 576 * 2 == 70272


def tensors_of(root: object) -> list[torch.Tensor]:
    """Every tensor that can be reached from an object, through closures too."""
    seen: set[int] = set()
    found, pending = [], [root]
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, type | types.ModuleType):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, types.FunctionType):
            pending += item.__closure__ or ()
        else:
            pending += gc.get_referents(item)
    return found


def allocated_bytes(root: object) -> int:
    """Of distinct storages; packed weights have none that can be asked, and are never shared."""
    storages = {}
    for tensor in tensors_of(root):
        if tensor.layout == torch._mkldnn:  # type: ignore[attr-defined]
            storages[id(tensor)] = tensor.numel() * tensor.element_size()
        else:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("case", ["v3", "moonlight", "v3-half-split", "v3-tied", "v2-lite"])
def test_a_loaded_engine_allocates_what_the_plan_counts(case: str):
    model_path = str(tiny_checkpoint(case).path)
    config = EngineConfig(model=model_path, num_kv_blocks=7, max_num_seqs=4, enforce_eager=True)
    parts = assemble(config, world_alone())
    model = ModelConfig.from_path(model_path)
    slots = slots_per_rank(model, ep_size=1, num_redundant=0)
    storage = WeightStorage("float32", expert_dtype="float32", is_cpu=True)
    planned = weight_bytes(model, storage, num_slots=slots)
    assert allocated_bytes(parts.decoder) == planned.total
    tokens = 64 * (7 + 1)  # and the block for padding
    assert parts.info.kv_cache_bytes == tokens * cache_bytes_per_token(model, 4)


@pytest.mark.parametrize("has_bf16", [True, False])
def test_bf16_weights_on_cpus_take_what_the_plan_counts(
    has_bf16: bool, monkeypatch: pytest.MonkeyPatch
):
    if has_bf16 and not products.cpu_has_bf16():
        pytest.skip("this CPU has no BF16 instructions")
    monkeypatch.setattr(products, "cpu_has_bf16", lambda: has_bf16)
    model_path = str(tiny_checkpoint("v3", dtype="bfloat16").path)
    config = EngineConfig(model=model_path, num_kv_blocks=7, max_num_seqs=4, enforce_eager=True)
    parts = assemble(config, world_alone())
    model = ModelConfig.from_path(model_path)
    storage = WeightStorage("bfloat16", is_cpu=True, is_widened=not has_bf16)
    planned = weight_bytes(model, storage, num_slots=model.num_experts)
    assert allocated_bytes(parts.decoder) == planned.total


@pytest.mark.parametrize("major", [9, 10])
def test_fp8_weights_of_the_library_take_what_the_plan_counts(major: int):
    model_path = str(tiny_checkpoint("v3-wide", dtype="bfloat16", fp8=True).path)
    config = EngineConfig(
        model=model_path,
        num_kv_blocks=7,
        max_num_seqs=4,
        enforce_eager=True,
        moe_runner_backend="deep_gemm",
        attention_backend="torch",
    )
    model = ModelConfig.from_path(model_path)
    with emulated("deep_ep"), emulated_kernels(major=major):
        parts = assemble(config, world_alone())
        held = allocated_bytes(parts.decoder)
    resolved, _ = config.resolve(model)
    storage = WeightStorage.of(
        resolved,
        model,
        is_sm100=major == 10,
        is_cpu=True,
        is_widened=not products.cpu_has_bf16(),
    )
    planned = weight_bytes(model, storage, num_slots=model.num_experts)
    # On SM100 scales that are no powers of two are made anew, in whole blocks of rows.
    first = (model.q_lora_rank or 0) + model.latent_dim
    padding = model.num_layers * (-first % 128) * model.hidden_size if major == 10 else 0
    assert held == planned.total + padding


def test_drafts_take_a_layer_and_its_cache():
    """README_WEIGHTS.md of DeepSeek-V3 counts 11.5e9 parameters in it, most of them in FP8."""
    plain = make_plan(Question("deepseek-v3", gpu="h200", ep_size=8, batch=8)).memory
    drafted = make_plan(Question("deepseek-v3", gpu="h200", ep_size=8, batch=8, mtp_tokens=1))
    sizes = {part.name: part.bytes for part in drafted.memory.parts}
    assert drafted.memory.cache_bytes_per_token == plain.cache_bytes_per_token * 62 // 61
    d = drafted.setting.deployment
    whole = draft_bytes(replace(d, num_slots=256, ep_size=1))
    assert whole == pytest.approx(11.5e9, rel=0.03)
    assert sizes["draft layer"] == draft_bytes(d) < whole / 6


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]):
    crowded = make_plan(Question("deepseek-v3", gpu="h800", ep_size=8))
    assert not crowded.fits
    assert crowded.memory.headroom_bytes < 0
    lacking = 64 * 4096 * 70_272 - crowded.memory.headroom_bytes
    assert main(["plan", "--gpu", "h800", "--ep-size", "8"]) == 1
    assert f"{lacking / 2**30:.1f} GiB are lacking" in " ".join(capsys.readouterr().out.split())
    assert make_plan(Question("deepseek-v3", gpu="h200", ep_size=8)).fits
