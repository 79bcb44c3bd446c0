"""Loading: each rank reads its share and no byte more, and every tensor is accounted for."""

import io
import pickle
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eplb.placement import Placement
from moe_ep.config import ModelConfig
from moe_ep.fp8 import dequantize_blocks
from moe_ep.model.checkpoint import INDEX_FILE
from moe_ep.model.loader import CheckpointSource, LoadError, expected_tensors, progress_bar
from moe_ep.model.weights import DummySource, WeightSource
from tests.compare import assert_bits_equal
from tests.tiny import CASES, tiny_checkpoint

STORED = [("float32", False), ("bfloat16", False), ("float16", False), ("bfloat16", True)]


def local_experts(model: ModelConfig, num_ranks: int, num_redundant: int, rank: int):
    placement = Placement.trivial(
        num_layers=model.num_moe_layers,
        num_experts=model.num_experts,
        num_ranks=num_ranks,
        num_redundant=num_redundant,
    )
    return [placement.local_experts(layer, rank) for layer in range(model.num_moe_layers)]


def load_share(source: WeightSource, model: ModelConfig, experts: list[list[int]]) -> None:
    """Ask for what the decoder of such a rank asks for."""
    for name in expected_tensors(model):
        if ".experts." not in name:
            source.tensor(name)
    for index, layer in enumerate(experts):
        for expert in layer:
            source.expert(model.first_k_dense_replace + index, expert)


def bytes_of(path: Path, wanted: Any) -> int:
    files = [load_file(file) for file in path.glob("*.safetensors")]
    return sum(t.nbytes for file in files for name, t in file.items() if wanted(name))


def characters_read() -> int:
    """Bytes that this process has asked the kernel for, whoever counts."""
    fields = Path("/proc/self/io").read_text().split()
    return int(fields[fields.index("rchar:") + 1])


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A sharded FP8 checkpoint that a test may break."""
    source = tiny_checkpoint("v3", dtype="bfloat16", fp8=True, num_shards=2).path
    return Path(shutil.copytree(source, tmp_path / "model"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "fp8"), STORED)
def test_values_are_those_of_the_reference(case: str, dtype: str, fp8: bool):
    checkpoint = tiny_checkpoint(case, dtype=dtype, fp8=fp8, num_shards=3)
    model = ModelConfig.from_path(checkpoint.path)
    assert (model.dtype, model.quantization) == (dtype, "fp8" if fp8 else None)
    source = CheckpointSource(checkpoint.path, model)
    parameters = dict(checkpoint.reference.state_dict())
    for name in expected_tensors(model):
        if ".experts." not in name:
            assert_bits_equal(source.tensor(name, torch.float32), parameters[name])
    layer = model.num_layers - 1
    prefix = f"model.layers.{layer}.mlp.experts."
    for expert in (0, model.num_experts - 1):
        weights = source.expert(layer, expert)
        assert (weights.gate.dtype == torch.float8_e4m3fn) == fp8
        gate, up, down = (
            w.float() if scale is None else dequantize_blocks(w, scale, torch.float32)
            for w, scale in (
                (weights.gate, weights.gate_scale),
                (weights.up, weights.up_scale),
                (weights.down, weights.down_scale),
            )
        )
        assert_bits_equal(torch.cat([gate, up]), parameters[prefix + "gate_up_proj"][expert])
        assert_bits_equal(down, parameters[prefix + "down_proj"][expert])


@pytest.mark.parametrize(("num_ranks", "num_redundant"), [(1, 0), (2, 0), (4, 0), (4, 8)])
@pytest.mark.parametrize("num_shards", [1, 5])
def test_each_rank_reads_its_share_and_no_byte_more(
    num_ranks: int, num_redundant: int, num_shards: int
):
    path = tiny_checkpoint("v3-blocks", dtype="bfloat16", fp8=True, num_shards=num_shards).path
    model = ModelConfig.from_path(path)
    dense = bytes_of(path, lambda name: ".experts." not in name)
    routed = bytes_of(path, lambda name: ".experts." in name)
    per_expert = routed // (model.num_moe_layers * model.num_experts)
    seen: set[str] = set()
    for rank in range(num_ranks):
        experts = local_experts(model, num_ranks, num_redundant, rank)
        expected = dense + per_expert * sum(map(len, experts))
        source = CheckpointSource(path, model)
        before = characters_read()
        load_share(source, model, experts)
        outside = characters_read() - before - expected
        report = source.report()
        assert report.bytes_read == expected == source.num_bytes(experts)
        assert 0 <= outside < 2_000  # reading the counter itself
        assert report.total_bytes == dense + routed
        assert (report.unexpected, report.missing, report.ignored) == ((), (), {})
        assert len(report.loaded) + len(report.other_ranks) == len(source.checkpoint.entries)
        assert bool(report.other_ranks) == (num_ranks > 1)
        seen |= set(report.loaded)
    assert seen == set(source.checkpoint.entries)


def rewrite(path: Path, change: Any) -> None:
    """Apply a change to the tensors of a checkpoint, kept as a single file."""
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (path / INDEX_FILE).unlink(missing_ok=True)
    save_file({k: v.contiguous() for k, v in change(tensors).items()}, path / "model.safetensors")


def test_both_spellings_of_scales_and_the_multimodal_prefix(broken: Path):
    model = ModelConfig.from_path(broken)
    original = CheckpointSource(broken, model)
    expert = original.expert(1, 3)
    vision = {"vision_tower.weight": torch.ones(2), "mm_projector.weight": torch.ones(2)}

    def respell(tensors):
        renamed = {n.replace("_scale_inv", "_scale"): t for n, t in tensors.items()}
        wide = {n: t.bfloat16() if n.endswith("_scale") else t for n, t in renamed.items()}
        return {f"language_model.{n}": t for n, t in wide.items()} | vision

    rewrite(broken, respell)
    source = CheckpointSource(broken, model)
    again = source.expert(1, 3)
    assert_bits_equal(again.gate, expert.gate)
    assert expert.gate_scale is not None
    assert again.gate_scale is not None
    assert_bits_equal(again.gate_scale, expert.gate_scale.bfloat16().float())
    load_share(source, model, local_experts(model, 1, 0, 0))
    report = source.report()
    assert report.ignored == dict.fromkeys(sorted(vision), "not of the language model")
    assert (report.unexpected, report.missing, report.other_ranks) == ((), (), ())


def test_every_tensor_is_accounted_for(broken: Path):
    model = ModelConfig.from_path(broken)
    extra = {
        "model.layers.3.eh_proj.weight": "multi-token prediction",
        "model.layers.0.self_attn.rotary_emb.inv_freq": "computed from the config",
        "lm_head.weight": "tied to the embedding",
    }
    strange = ("model.layers.0.self_attn.k_scale", "model.layers.1.mlp.experts.99.up_proj.weight")
    names = [*list(extra)[:2], *strange]
    rewrite(broken, lambda tensors: tensors | {name: torch.ones(1) for name in names})
    model = replace(model, tie_word_embeddings=True)
    source = CheckpointSource(broken, model)
    load_share(source, model, local_experts(model, 2, 0, 0))
    report = source.report()
    assert report.ignored == extra
    assert report.unexpected == strange
    assert report.missing == ()
    others = [
        name
        for name in source.checkpoint.entries
        if any(f"experts.{e}." in name for e in range(8, 16))
    ]
    assert sorted(report.other_ranks) == sorted(others)
    for part in ("k_scale", "multi-token prediction", f"{len(others)} tensors of other ranks"):
        assert part in str(report)


def test_what_was_never_asked_for_is_missing():
    path = tiny_checkpoint("v3-tied").path
    model = ModelConfig.from_path(path)
    source = CheckpointSource(path, model)
    load_share(source, model, [])
    assert source.report().missing == ()
    assert not source.has("lm_head.weight")
    assert source.optional("lm_head.weight") is None
    fresh = CheckpointSource(path, model)
    fresh.tensor("model.norm.weight")
    dense = [name for name in expected_tensors(model) if ".experts." not in name]
    assert set(fresh.report().missing) == set(dense) - {"model.norm.weight"}


def test_all_wrong_tensors_are_named_before_anything_is_read(broken: Path):
    expert = "model.layers.1.mlp.experts.5."
    gone, norm = expert + "up_proj.weight", "model.norm.weight"
    no_scale, bad_scale = expert + "gate_proj.weight", expert + "down_proj.weight"
    router, wide = "model.layers.2.mlp.gate.weight", "model.layers.2.mlp.experts.0.up_proj.weight"

    def spoil(tensors):
        del tensors[gone], tensors[gone + "_scale_inv"], tensors[no_scale + "_scale_inv"]
        tensors[bad_scale + "_scale_inv"] = torch.ones(64)
        tensors[norm] = tensors[norm][:-1]
        tensors[router] = tensors[router].to(torch.int8)
        tensors[wide] = tensors[wide].bfloat16()
        return tensors

    rewrite(broken, spoil)
    model = ModelConfig.from_path(broken)
    with pytest.raises(LoadError) as caught:
        CheckpointSource(broken, model)
    message = str(caught.value)
    assert len(caught.value.problems) == 6
    for name in (gone, norm, no_scale, bad_scale, router, wide):
        assert sum(name in problem for problem in caught.value.problems) == 1, name
    assert "has shape [63], the config asks for [64]" in message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


def test_fp8_weights_need_a_config_that_says_so():
    path = tiny_checkpoint("v3", dtype="bfloat16", fp8=True).path
    model = replace(ModelConfig.from_path(path), quantization=None)
    with pytest.raises(LoadError, match="no quantization_config") as caught:
        CheckpointSource(path, model)
    assert len(caught.value.problems) > 50
    assert f"and {len(caught.value.problems) - 50} more" in str(caught.value)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "is_shown"), [(Terminal(), True), (Terminal(), False), (io.StringIO(), True)]
)
def test_the_progress_bar_counts_bytes_on_a_terminal_only(monkeypatch, stream, is_shown):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    path = tiny_checkpoint("v3").path
    model = ModelConfig.from_path(path)
    experts = local_experts(model, 2, 0, 1)
    source = CheckpointSource(path, model)
    with progress_bar(source, experts, is_shown=is_shown):
        load_share(source, model, experts)
    text = stream.getvalue()
    if not (is_shown and stream.isatty()):
        assert text == ""
        return
    done = f"{source.report().bytes_read / 1e6:.1f}"
    assert "loading weights" in text
    assert f"{done}/{done} MB" in text


@pytest.mark.parametrize("name", ["v3", "v2-lite", "v3-half-split", "v3-tied"])
def test_dummy_weights_depend_on_name_and_seed_alone(name: str):
    model = replace(ModelConfig.from_path(tiny_checkpoint(name).path), quantization="fp8")
    first, again, other = DummySource(model, 1), DummySource(model, 1), DummySource(model, 2)
    names = list(expected_tensors(model))
    for tensor in reversed(names):
        again.raw(tensor)
    for tensor, shape in expected_tensors(model).items():
        weight, scale = first.raw(tensor)
        same, same_scale = again.raw(tensor)
        assert weight.shape == shape
        assert_bits_equal(weight, same)
        if scale is not None and same_scale is not None:
            assert_bits_equal(scale, same_scale)
        if not tensor.endswith("norm.weight"):
            assert not torch.equal(first.tensor(tensor), other.tensor(tensor))
            assert first.tensor(tensor).float().std() == pytest.approx(0.02, rel=0.5)
    is_fp8 = {n for n in names if first.raw(n)[0].dtype == torch.float8_e4m3fn}
    flat = [n for n in names if n.endswith(("norm.weight", "mlp.gate.weight", "bias"))]
    assert is_fp8 == {n for n in names if "layers" in n and n not in flat}
    report = first.report()
    assert (report.missing, report.other_ranks, report.unexpected) == ((), (), ())
    with pytest.raises(LoadError, match="nothing"):
        first.tensor("nothing")


# Parameters of the main model as published (without multi-token prediction), in billions.
PUBLISHED = {
    "deepseek-v3": 671.0,
    "kimi-k2": 1026.0,
    "deepseek-v2-lite": 15.7,
    "moonlight": 16.0,
    "glm-4.7-flash": 29.9,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_of_built_in_geometries_add_up(name: str):
    shapes = expected_tensors(ModelConfig.from_path(name)).values()
    count = sum(torch.Size(shape).numel() for shape in shapes)
    assert count / 1e9 == pytest.approx(PUBLISHED[name], rel=0.005)
