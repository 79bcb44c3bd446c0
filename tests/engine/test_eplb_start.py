"""The placement that an engine starts with: what is read, and what is refused with which words."""

import json
from pathlib import Path

import pytest
import torch

from eplb.files import write_loads, write_placement
from eplb.placement import Placement
from moe_ep.config import ConfigError, EngineConfig, ModelConfig, find_problems
from moe_ep.engine.eplb import initial_location
from tests.engine.driver import world_alone
from tests.engine.moving import loading_worker, unlike_worker
from tests.engine.test_parity import check_exact, config_for, reference, run
from tests.eplb.placements import random_placement
from tests.ranks import RankError
from tests.tiny import tiny_checkpoint


def tiny_config(location: Path | str, **flags) -> EngineConfig:
    flags = {"ep_size": 2, "ep_num_redundant_experts": 8} | flags
    return config_for(tiny_checkpoint("v3"), init_expert_location=str(location), **flags)


def some_placement(seed: int = 5) -> Placement:
    return random_placement(seed, num_ranks=2, num_experts=16, slots_per_rank=12)


def placement_of(config: EngineConfig) -> Placement:
    model = ModelConfig.from_path(config.model)
    return initial_location(config, model, world_alone()).placement


def test_an_engine_starts_from_a_file_and_reads_its_experts_only(rank_pool, tmp_path):
    write_placement(path := tmp_path / "placement.json", some_placement(), num_dense=1)
    config = tiny_config(path)
    results = run(rank_pool, config)
    check_exact(results, reference("v3"))
    loaded = rank_pool.run(loading_worker, 2, config)
    for rank, names in enumerate(loaded):
        found = {tuple(map(int, name.split(".")[2:6:3])) for name in names if ".experts." in name}
        expected = {
            (1 + layer, expert)
            for layer in range(2)
            for expert in some_placement().local_experts(layer, rank)
        }
        assert found == expected


def test_loads_place_the_hot_expert_twice(tmp_path):
    loads = torch.ones(3, 2, 16, dtype=torch.int64)
    loads[:, :, 13] = 100
    write_loads(path := tmp_path / "loads.pt", loads, num_dense=1)
    placement = placement_of(tiny_config(path))
    assert placement.replica_counts[:, 13].tolist() == [2, 2]
    assert placement.num_slots == 24


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (some_placement().physical_to_logical[:1], "1 layers found, the model has 2"),
        (some_placement().physical_to_logical[:, :20], "20 slots per layer found, 24 needed"),
        (torch.arange(24).repeat(2, 1) % 12, "expert 12 of layer 0 has no slot"),
        (torch.arange(24).repeat(2, 1), "experts 0 to 23 given, 0 to 15 allowed"),
    ],
)
def test_a_placement_of_something_else_is_refused(tmp_path, table, message: str):
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"physical_to_logical_map": table.tolist()}))
    with pytest.raises(ConfigError, match=message) as caught:
        placement_of(tiny_config(path))
    assert caught.value.problems[0].field == "init_expert_location"
    assert str(path) in str(caught.value)


def test_loads_of_another_model_are_refused(tmp_path):
    write_loads(path := tmp_path / "loads.json", torch.ones(1, 58, 256))
    with pytest.raises(ConfigError, match="loads of 256 experts found, the model has 16"):
        placement_of(tiny_config(path))


def test_ranks_with_unlike_files_do_not_start(rank_pool, tmp_path):
    for rank in range(2):
        write_placement(tmp_path / f"{rank}.json", some_placement(rank))
    with pytest.raises(RankError, match=r"is another file on ranks \[1\] than on rank 0"):
        rank_pool.run(unlike_worker, 2, [tiny_config(tmp_path / f"{r}.json") for r in range(2)])


def test_flags_that_cannot_work_are_told_at_once():
    config = tiny_config(
        "nowhere.json", ep_size=1, ep_num_redundant_experts=0, enable_eplb=True,
        eplb_rebalance_num_iterations=0, eplb_min_rebalancing_utilization_threshold=1.5,
        eplb_bytes_per_step=0,
    )  # fmt: skip
    problems = find_problems(config, ModelConfig.from_path(config.model))
    assert [problem.field for problem in problems] == [
        "init_expert_location",
        "enable_eplb",
        "eplb_rebalance_num_iterations",
        "eplb_min_rebalancing_utilization_threshold",
        "eplb_bytes_per_step",
    ]
