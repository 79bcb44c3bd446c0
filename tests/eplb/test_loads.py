"""Counts and their files: by hand, and as SGLang's own files look."""

import json

import pytest
import torch

from eplb.files import (
    FileError,
    ModelLayers,
    fit_placement,
    read_file,
    read_loads,
    write_loads,
    write_passes,
    write_placement,
)
from eplb.loads import (
    LoadRecorder,
    SlotRecords,
    balancedness,
    expected_slot_loads,
    last_placement,
    logical_loads,
    merge_records,
    rank_loads,
)
from eplb.placement import Placement

# 3 experts in 4 slots on 2 ranks; expert 0 has a replica on each rank.
PLACEMENT = Placement(torch.tensor([[0, 1, 2, 0], [2, 1, 0, 2]]), num_experts=3, num_ranks=2)
LAYERS = ModelLayers(num_moe=2, num_dense=1, num_experts=3)


def test_loads_by_hand():
    tokens = torch.tensor([[10, 1, 2, 20], [3, 4, 5, 6]])
    assert logical_loads(tokens, PLACEMENT).tolist() == [[30, 1, 2], [5, 4, 9]]
    ranks = rank_loads(tokens, 2)
    assert ranks.tolist() == [[11, 22], [7, 11]]
    assert balancedness(ranks).tolist() == pytest.approx([16.5 / 22, 9 / 11])
    even = expected_slot_loads(torch.tensor([[30, 1, 2], [5, 4, 9]]), PLACEMENT)
    assert even.tolist() == [[15, 1, 2, 15], [4.5, 4, 5, 4.5]]


def test_no_load_is_balanced():
    assert balancedness(torch.zeros(2, 4, dtype=torch.int64)).tolist() == [1, 1]


def test_recorders_of_two_ranks_merge_by_step_while_experts_move():
    recorders = [LoadRecorder(rank, num_steps=3) for rank in range(2)]
    tables = {step: torch.tensor([[0, 1], [1, 0]] if step < 4 else [[1, 0], [0, 1]]) for step in
              range(8)}  # fmt: skip
    totals = [torch.zeros(1, 2, dtype=torch.int64) for _ in range(2)]
    for step in range(8):
        for rank, recorder in enumerate(recorders):
            if step == rank + 1:  # the second starts a step later
                recorder.start()
            if recorder.wants_counts:
                before = tables[max(step - 1, 0)][rank].unsqueeze(0)
                recorder.record(step, totals[rank].clone(), before)
            # In step n the rank's slots process n tokens of expert 0 and 10 n of expert 1.
            totals[rank] += torch.where(tables[step][rank] == 0, step, 10 * step)
        if step == 5:
            recorders[0].stop()
    records = [recorder.records() for recorder in recorders]
    assert [record.steps for record in records] == [[3, 4, 5], [4, 5, 6]]
    loads = merge_records(records, num_experts=2)
    assert loads.tolist() == [[[8, 80]], [[10, 100]]]


def test_records_without_a_common_step_are_refused():
    recorders = [LoadRecorder(rank, num_steps=3) for rank in range(2)]
    recorders[0].start()
    for step in range(3):
        recorders[0].record(step, torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[0]]))
    with pytest.raises(ValueError, match=r"rank 0: steps 0 to 1; rank 1: none"):
        merge_records([recorder.records() for recorder in recorders], num_experts=1)


@pytest.mark.parametrize("suffix", [".pt", ".json"])
def test_what_is_written_is_read(tmp_path, suffix: str):
    loads = torch.randint(0, 99, (4, 2, 3))
    write_loads(path := tmp_path / f"loads{suffix}", loads, num_dense=1)
    assert torch.equal(read_loads(path, LAYERS), loads.double())
    assert read_loads(path).shape == (4, 3, 3), "as it is: with a row for the dense layer"
    write_placement(path := tmp_path / f"placement{suffix}", PLACEMENT, num_dense=1)
    kind, table = read_file(path)
    placement = fit_placement(path, table, LAYERS, num_slots=4, num_ranks=2)
    assert kind == "physical_to_logical_map"
    assert torch.equal(placement.physical_to_logical, PLACEMENT.physical_to_logical)


def test_a_dump_as_the_recorder_of_sglang_writes_it(tmp_path):
    counts = torch.arange(18, dtype=torch.int32).view(2, 3, 3)
    dump = {"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": 0.7}
    torch.save(dump, path := tmp_path / "expert_distribution_recorder_1700000000.1.pt")
    assert read_loads(path, LAYERS).tolist() == counts[:, 1:].tolist()
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"logical_count": counts[0].tolist()}))
    assert read_loads(path, LAYERS).tolist() == counts[:1, 1:].tolist()


def test_passes_as_sglang_writes_them(tmp_path):
    counts = torch.tensor([[[7, 1], [2, 0]]], dtype=torch.int32)  # one step, two layers
    record = SlotRecords(1, [5], counts, PLACEMENT.of_rank(1).unsqueeze(0).int())
    other = SlotRecords(0, [4, 5], counts.repeat(2, 1, 1), PLACEMENT.of_rank(0).repeat(2, 1, 1))
    placement = last_placement([other, record], num_experts=3)
    write_passes(path := tmp_path / "passes_1.pt", record, placement)
    content = torch.load(path, weights_only=True)
    (found,) = content["records"]
    assert (found["forward_pass_id"], found["rank"], found["gatherer_key"]) == (5, 1, "primary")
    assert found["global_physical_count"].tolist() == [[0, 0, 7, 1], [0, 0, 2, 0]]
    table = content["last_physical_to_logical_map"]
    assert torch.equal(table, PLACEMENT.physical_to_logical)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a .json file"),
        ("[1, 2]", "list found"),
        ('{"a": 1}', r"\['a'\] found, one of logical_count and physical_to_logical_map"),
        ('{"logical_count": [[1, 2], [3]]}', "not an array of numbers"),
        ('{"logical_count": "much"}', "not an array of numbers"),
        ('{"logical_count": [1, 2]}', r"shape \[2\] found"),
        ('{"logical_count": [[1, -2, 3], [1, 1, 1]]}', "negative"),
        ('{"logical_count": [[1, 2, 3, 4], [1, 1, 1, 1]]}', "4 experts found, the model has 3"),
        ('{"logical_count": [[1, 2, 3]]}', "1 layers found, the model has 2 with experts or 3"),
        ('{"physical_to_logical_map": [[0, 1, 2, 0]]}', "physical_to_logical_map found"),
    ],
)
def test_bad_loads_are_refused(tmp_path, content: str, message: str):
    path = tmp_path / "loads.json"
    path.write_text(content)
    with pytest.raises(FileError, match=message) as caught:
        read_loads(path, LAYERS)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0, 1, 2], [0, 1, 2]], "3 slots per layer found, 4 needed: 3 experts and 1 redundant"),
        ([[0, 1, 2, 0]] * 4, "4 layers found"),
        ([[0, 1, 2, 2]] * 2, "two replicas of expert 2 on rank 1"),
        ([[0, 1, 1, 0]] * 2, "expert 2 of layer 0 has no slot"),
        ([[0, 1, 2, 3]] * 2, "experts 0 to 3 given"),
        ([[0.0, 1.0, 2.0, 0.5]] * 2, "integers"),
    ],
)
def test_bad_placements_are_refused(tmp_path, table: list, message: str):
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"physical_to_logical_map": table}))
    with pytest.raises(FileError, match=message):  # noqa: PT012
        _, rows = read_file(path)
        fit_placement(path, rows, LAYERS, num_slots=4, num_ranks=2)


def test_a_torn_or_missing_file_is_told(tmp_path):
    torch.save({"logical_count": torch.ones(2, 3)}, path := tmp_path / "torn.pt")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FileError, match=r"torn\.pt: not a \.pt file"):
        read_loads(path)
    with pytest.raises(FileError, match="cannot be read"):
        read_loads(tmp_path / "none.pt")
    with pytest.raises(FileError, match=r"\.npy given, \.json or \.pt needed"):
        read_loads(tmp_path / "loads.npy")
