"""``moe-ep eplb``: tables, files and refusals, and that the engine takes what ``place`` writes."""

import json
from pathlib import Path

import pytest
import torch

from eplb.files import write_loads
from launch.cli import main
from launch.plan.plan import make_plan
from launch.plan.question import Question
from moe_ep.config import EngineConfig, ModelConfig, find_problems
from moe_ep.engine.eplb import initial_location
from tests.engine.driver import world_alone
from tests.tiny import tiny_checkpoint

NUM_STEPS, NUM_LAYERS, NUM_EXPERTS = 24, 2, 16  # as the tiny model has, after one dense layer


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Experts 0 to 3, which lie together, are hot."""
    loads = torch.ones(NUM_STEPS, NUM_LAYERS, NUM_EXPERTS, dtype=torch.int32)
    loads[:, :, :4] = 9
    write_loads(path := tmp_path / "loads.json", loads, num_dense=1)
    return path


def cluster_flags(dump: Path, ep_size: int = 4, num_redundant: int = 4) -> list[str]:
    return ["--loads", str(dump), "--ep-size", str(ep_size), "--ep-num-redundant-experts",
            str(num_redundant)]  # fmt: skip


def test_replay_tells_that_it_would_help(dump: Path, tmp_path: Path, capsys):
    files = ["--json", str(tmp_path / "replay.json"), "--plot", str(tmp_path / "replay.png")]
    model = ["--model", str(tiny_checkpoint("v3").path)]
    argv = ["eplb", "replay", *cluster_flags(dump), *model, *files, "--num-nodes", "2"]
    assert main([*argv, "--window", "5"]) == 0
    printed = capsys.readouterr().out
    assert "It would help, because" in printed
    assert "4 steps at the end fill none" in printed
    assert "copies between nodes (estimated)" in printed
    assert "--enable-eplb --ep-num-redundant-experts 4" in printed
    assert (tmp_path / "replay.png").read_bytes()[1:4] == b"PNG"
    report = json.loads((tmp_path / "replay.json").read_text())
    none, greedy, ours, _, oracle = report["policies"]
    # By hand: of 48 tokens of a layer 36 are on rank 0.
    assert none["balancedness"] == pytest.approx(12 / 36)
    assert none["rank_tokens"][0][0] == [180, 20, 20, 20]
    assert oracle["balancedness"] >= ours["balancedness"] > max(0.8, greedy["balancedness"])
    assert ours["saved"] == pytest.approx(1 - ours["tokens_of_slowest"] / (36 * 5 * 3 * 2))
    expert = (2 * 48 * 64 + 64 * 48) * 4
    assert report["bytes_per_expert"] == expert
    assert ours["redundant_bytes_per_rank"] == NUM_LAYERS * expert
    assert none["redundant_bytes_per_rank"] == sum(none["bytes_moved"]) == 0
    assert ours["experts_moved"][1:] == [0, 0]
    # A price brings experts of a group together on a node, as far as it outweighs balance.
    assert main([*argv, "--window", "5", "--eplb-node-traffic-price", "100"]) == 0
    priced = json.loads((tmp_path / "replay.json").read_text())["policies"][2]
    assert sum(priced["copies_between_nodes"]) < sum(ours["copies_between_nodes"])
    assert priced["saved"] <= ours["saved"]


def test_a_layers_time_is_the_planners(tmp_path: Path, capsys):
    loads = torch.rand(6, 58, 256, generator=torch.Generator().manual_seed(0)) ** 3
    write_loads(path := tmp_path / "v3.pt", (1000 * loads).round().int(), num_dense=3)
    flags = ["--model", "deepseek-v3", "--gpu", "h800", "--json", str(tmp_path / "v3.json")]
    assert main(["eplb", "replay", *cluster_flags(path, 32, 32), *flags]) == 0
    assert "MoE layer, us" in capsys.readouterr().out
    policies = json.loads((tmp_path / "v3.json").read_text())["policies"]
    none, oracle = (policies[index]["layer_us"] for index in (0, -1))
    balance = torch.tensor(policies[0]["rank_tokens"]).double()
    question = Question(
        "deepseek-v3", ep_size=32, imbalance=float((balance.amax(2) / balance.mean(2)).mean())
    )
    assert none == pytest.approx(make_plan(question).step.layer_us)
    assert 100 < oracle < none < 10_000


def test_without_a_model_layers_without_tokens_are_dense(dump: Path, tmp_path: Path):
    out = tmp_path / "replay.json"
    assert main(["eplb", "replay", *cluster_flags(dump), "--json", str(out)]) == 0
    policies = json.loads(out.read_text())["policies"]
    assert all(len(policy["balancedness_by_layer"]) == NUM_LAYERS for policy in policies)
    assert all(policy["bytes_moved"] is None for policy in policies)


@pytest.mark.parametrize("suffix", [".json", ".pt"])
def test_the_engine_starts_from_what_place_writes(dump: Path, tmp_path: Path, suffix: str, capsys):
    path = tmp_path / f"placement{suffix}"
    assert main(["eplb", "place", *cluster_flags(dump), "-o", str(path)]) == 0
    assert f"--init-expert-location {path}" in capsys.readouterr().out
    config = EngineConfig(
        model=str(tiny_checkpoint("v3").path),
        ep_size=4,
        ep_num_redundant_experts=4,
        init_expert_location=str(path),
    )
    model = ModelConfig.from_path(config.model)
    assert find_problems(config, model) == []
    placement = initial_location(config, model, world_alone()).placement
    hot_by_rank = (placement.physical_to_logical.unflatten(1, (4, 5)) < 4).sum(2)
    assert hot_by_rank.tolist() == [[2, 2, 2, 2]] * NUM_LAYERS


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ep-size", "3"], "ep_size: got 3, allowed: a divisor of 20 (16 experts + 4 redundant)."
         " Or use --ep-num-redundant-experts 5."),
        (["--ep-size", "1"], "ep_size: got 1, allowed: at least 2"),
        (["--ep-num-redundant-experts", "-4"], "ep_num_redundant_experts: got -4"),
        (["--ep-num-redundant-experts", "52"], "experts: got 52, allowed: 0 to 48"),
        (["--num-nodes", "3"], "num_nodes: got 3, allowed: a divisor of 4"),
        (["--window", "13"], "window: got 13, allowed: 1 to 12"),
        (["--window", "0"], "window: got 0"),
        (["--gpu", "h800"], "gpu: got 'h800', allowed: nothing without --model"),
        (["--model", "deepseek-v3"], "loads of 16 experts found, the model has 256"),
        (["--plot", "replay.docx"], "plot: got 'replay.docx'"),
        (["--loads", "nowhere.json"], "nowhere.json: cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_replayed_is_told_by_the_flags_name(dump: Path, flags, message: str, capsys):
    assert main(["eplb", "replay", *cluster_flags(dump), *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a .json file"),
        ('{"a": 1}', "['a'] found, one of logical_count"),
        ('{"physical_to_logical_map": [[0, 1]]}', "logical_count needed"),
        ('{"logical_count": [[[1, -1, 1, 1]]]}', "negative or not finite"),
        ('{"logical_count": [[1, 1, 1, 1]]}', "loads: got '1 step', allowed: 2 recorded steps"),
    ],
)
def test_bad_dumps_are_refused(tmp_path: Path, content: str, message: str, capsys):
    (path := tmp_path / "loads.json").write_text(content)
    assert main(["eplb", "replay", *cluster_flags(path, 2, 0)]) == 2
    assert message in capsys.readouterr().err


def test_files_of_different_models_do_not_mix(dump: Path, tmp_path: Path, capsys):
    write_loads(other := tmp_path / "other.json", torch.ones(2, 3, 8))
    argv = ["eplb", "place", *cluster_flags(dump), "--loads", str(dump), str(other)]
    assert main([*argv, "-o", str(tmp_path / "placement.json")]) == 2
    assert "files of one model" in capsys.readouterr().err
    assert main(["eplb", "place", *cluster_flags(dump), "-o", str(tmp_path / "p.txt")]) == 2
    assert "output: got" in capsys.readouterr().err
