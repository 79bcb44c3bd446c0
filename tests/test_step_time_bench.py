"""``moe-ep bench step-time``: geometries, costs by hand, and whole runs whose files are checked."""

import itertools
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import step_time
from bench.steps.geometry import scaled, write_config
from bench.steps.roofline import Ceilings, Cost, Load, Roofline
from moe_ep.config import EngineConfig, ModelConfig, geometry_names
from moe_ep.progress import Stage
from tests.tiny import tiny_checkpoint

GEOMETRIES = ("deepseek-v2-lite", "deepseek-v3", "glm-4.7-flash", "kimi-k2", "moonlight")
SMALL = ["--model", "deepseek-v2-lite", "--scale", "0.05", "--num-layers", "2", "--threads", "1"]
FEW = ["--batch", "4", "--context", "70", "--iterations", "4", "--warm-up", "1"]


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize(("scale", "num_layers"), [(1.0, None), (0.125, 4), (0.01, 2), (0.3, 1)])
def test_a_geometry_shrinks_and_keeps_its_structure(
    name: str, scale: float, num_layers: int | None, tmp_path: Path
):
    model = ModelConfig.from_path(name)
    small = scaled(model, scale, num_layers)
    assert ModelConfig.from_path(write_config(small, tmp_path)) == small
    for kept in ("num_experts", "num_experts_per_tok", "n_group", "kv_lora_rank", "v_head_dim"):
        assert getattr(small, kept) == getattr(model, kept)
    assert small.num_layers == (num_layers or model.num_layers)
    assert small.num_moe_layers >= 1
    assert small.hidden_size % 128 == 0
    assert (scale == 1) == (small.hidden_size == model.hidden_size)


def test_all_geometries_are_there_and_keep_both_kinds_of_layers():
    assert set(GEOMETRIES) <= set(geometry_names())
    small = scaled(ModelConfig.from_path("deepseek-v3"), 0.125, 4)
    assert (small.first_k_dense_replace, small.hidden_size, small.num_heads) == (1, 896, 16)
    assert (small.moe_intermediate_size, small.q_lora_rank) == (256, 192)


@pytest.mark.parametrize(("scale", "num_layers"), [(0.0, None), (1.5, None), (1.0, 0), (1.0, 62)])
def test_a_geometry_grows_in_no_way(scale: float, num_layers: int | None):
    with pytest.raises(ValueError, match="given"):
        scaled(ModelConfig.from_path("deepseek-v3"), scale, num_layers)


def test_costs_by_hand():
    """The tiny V3 on two ranks in float32: hidden 64, 16 experts of 48, top 4, 4 heads."""
    model = ModelConfig.from_path(tiny_checkpoint("v3").path)
    config, _ = EngineConfig(model="tiny", ep_size=2).resolve(model)
    costs = Roofline(config, model, Load(num_requests=2, context=9, length=1)).costs()
    assert costs[Stage.EMBEDDING] == Cost(2 * 2 * 64 * 4)
    weight = 64 * (40 + 40) + 40 * 4 * 24
    projections = (weight + 2 * 64 + 2 * (4 * 24 + 2 * 40)) * 4
    assert costs[Stage.ATTENTION_PROJECTIONS] == Cost(projections, 4 * weight, "float32", 3)
    up = 4 * (16 + 16) * 32
    core = (up + 2 * 10 * 40 + 2 * 4 * (24 + 16)) * 4
    flops = 2 * (2 * up + 2 * 10 * 4 * (40 + 32))
    assert costs[Stage.ATTENTION_CORE] == Cost(core, flops, "float32", 3)
    none_here = 70 / 1820  # of 16 experts, 4 from the other rank's 8
    rows = 2 * 2 * (1 - none_here)
    assert costs[Stage.DISPATCH_WAIT].num_bytes == pytest.approx(rows * 64 * 4)  # half: twice
    experts = 8 * (1 - 0.75**4)
    moved = experts * 3 * 64 * 48 + 8 * 64 + 8 * 64
    assert costs[Stage.EXPERTS].num_bytes == pytest.approx(moved * 4)
    assert costs[Stage.EXPERTS].num_flops == 2 * 8 * 3 * 64 * 48
    assert costs[Stage.DENSE_MLP].times == 1
    assert costs[Stage.EXPERTS].times == 2


def test_a_floor_is_what_takes_longer_times_the_layers():
    ceilings = Ceilings(copy_bytes_per_s=10.0, flops_per_s={"float32": 4.0})
    assert ceilings.floor(Cost(20.0, 4.0, "float32", times=3)) == (6.0, "copy")
    assert ceilings.floor(Cost(20.0, 12.0, "float32")) == (3.0, "product")
    assert Load(2, 3, 2).num_scores == 2 * (4 + 5)


def run(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The report and the trace of one run."""
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    files = ["--json", str(report), "--trace", str(trace)]
    assert step_time.main([*SMALL, *FEW, *files, *arguments]) == 0
    return json.loads(report.read_text()), json.loads(trace.read_text())


def check_report(report: dict[str, Any], *, num_ranks: int, arms: list[str]) -> None:
    assert (report["bench"], report["schema"]) == ("step_time", 1)
    assert [arm["name"] for arm in report["arms"]] == arms
    for arm in report["arms"]:
        assert sum(row["share_of_step"] for row in arm["stages"]) == pytest.approx(1)
        step = arm["step"]
        for kind in ("samples", "samples_with_recorder", "samples_bare"):
            assert [len(samples) for samples in step[kind]] == [4] * num_ranks
        pieces = [
            [
                sum(parts)
                for parts in zip(*(row["samples"][rank] for row in arm["stages"]), strict=True)
            ]
            for rank in range(num_ranks)
        ]
        covered = [
            sum_s / wall_s
            for by_rank in zip(pieces, step["samples"], strict=True)
            for sum_s, wall_s in zip(*by_rank, strict=True)
        ]
        assert statistics.median(covered) == pytest.approx(1, abs=0.03)
        in_layers = sum(part["mean"] for part in arm["layers"])
        assert in_layers == pytest.approx(statistics.mean(map(statistics.mean, pieces)))
        for row in arm["stages"]:
            assert row["p50"] <= row["p90"] <= row["p99"]
            assert (row["floor"] is None) == (row["ratio_to_floor"] is None)


def check_trace(trace: dict[str, Any], *, num_ranks: int) -> None:
    """What a rank does for its micro-batches never happens at the same time."""
    rows: dict[tuple[int, bool], list[tuple[float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["ph"] in "XM"
        if event["ph"] == "X":
            assert event["dur"] >= 0
            is_flight = event["cat"] == "in flight"
            rows[event["pid"], is_flight].append((event["ts"], event["dur"]))
    assert {rank for rank, _ in rows} == set(range(num_ranks))
    for rank in range(num_ranks):
        spans = sorted(rows[rank, False])
        for (start, duration), (following, _) in itertools.pairwise(spans):
            assert start + duration <= following + 0.01


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_one_rank(phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report, trace = run(tmp_path, "--phase", phase)
    check_report(report, num_ranks=1, arms=["overlap off"])
    check_trace(trace, num_ranks=1)
    stages = {row["stage"] for row in report["arms"][0]["stages"]}
    assert {"expert GEMMs", "attention core", "dense mlp", "sampling"} <= stages
    assert report["speed_up"] is None
    shown = capsys.readouterr().out
    assert "deepseek-v2-lite" in shown
    assert "exposed communication" in shown
    assert "recording:" in shown


def test_two_ranks_with_two_batches_in_turns(tmp_path: Path):
    plot = tmp_path / "steps.png"
    overlap = ["--ep-size", "2", "--enable-two-batch-overlap", "--tbo-token-threshold", "2"]
    overlap += ["--batch", "32"]
    report, trace = run(tmp_path, *overlap, "--plot", str(plot))
    check_report(report, num_ranks=2, arms=["overlap on", "overlap off"])
    check_trace(trace, num_ranks=2)
    micro_batches = {e["tid"] for e in trace["traceEvents"] if e["args"].get("run") == "overlap on"}
    assert {0, 1} <= micro_batches
    assert report["run"]["clock_offsets_ns"] == [0, 0]
    assert report["speed_up"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_measured_is_said(capsys: pytest.CaptureFixture[str]):
    assert step_time.main([*SMALL, "--batch", "0"]) == 2
    assert step_time.main([*SMALL, "--load-format", "auto"]) == 2
    assert step_time.main([*SMALL, "--ep-size", "3"]) == 2
    assert "ep_size" in capsys.readouterr().err
    assert not torch.distributed.is_initialized()
