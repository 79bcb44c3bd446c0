"""What the DeepEP adapters refuse, and the sizes they know, without the library or a device."""

import re
import sys
from dataclasses import replace

import pytest
import torch

from moe_ep.dispatch import DispatchSpec, deep_ep_library, resolve_backend
from moe_ep.dispatch.deep_ep_v1 import DeepEpV1Dispatcher
from moe_ep.dispatch.deep_ep_v1_limits import buffer_sizes, rounded_capacity
from moe_ep.dispatch.deep_ep_v1_limits import spec_limits as v1_limits
from moe_ep.dispatch.deep_ep_v2 import DeepEpV2Dispatcher, _needs_row_major_scales
from moe_ep.dispatch.deep_ep_v2 import spec_limits as v2_limits
from moe_ep.dispatch.expand import copy_rows, expand, weighted_row_sums
from moe_ep.fp8 import FP8
from tests.compare import assert_bits_equal
from tests.emulators.install import emulated

# DeepSeek-V3 on one node of eight.
SPEC = DispatchSpec(
    hidden=7168,
    num_topk=8,
    num_ranks=8,
    num_slots_per_rank=32,
    max_tokens_per_rank=4096,
    capacity=128,
    payload_dtype=FP8,
    out_dtype=torch.bfloat16,
    row_alignment=128,
)
BOTH, V1, V2 = (v1_limits, v2_limits), (v1_limits,), (v2_limits,)


@pytest.mark.parametrize(
    ("limits", "change", "reason"),
    [
        (BOTH, {"payload_dtype": torch.float32}, "payload_dtype: torch.float32 given"),
        (BOTH, {"out_dtype": torch.float32}, "out_dtype: torch.float32 given"),
        (BOTH, {"num_ranks": 1}, "num_ranks: 1 given"),
        (BOTH, {"hidden": 0}, "hidden: 0 given"),
        (V1, {"num_ranks": 3}, "num_ranks: 3 given"),
        (V1, {"num_ranks": 40}, "num_ranks: 40 given"),
        (V1, {"hidden": 7424}, "hidden: 7424 given"),
        (V1, {"num_topk": 12}, "num_topk: 12 given, at most 11"),
        (V1, {"capacity": 497}, r"capacity: 497 given \(512 in whole blocks\), at most 511"),
        (V1, {"num_slots_per_rank": 129}, "num_slots_per_rank: 129 given, at most 128"),
        (V1, {"num_ranks": 16, "num_slots_per_rank": 65}, "65 given, at most 64 with 16 ranks"),
        (V2, {"hidden": 7296}, "hidden: 7296 given, V2 needs a multiple of 256"),
        (V2, {"num_topk": 33}, "num_topk: 33 given, at most 32"),
        (V2, {"num_slots_per_rank": 257}, "num_slots_per_rank: 257 given, at most 256"),
        (V2, {"num_ranks": 16, "num_slots_per_rank": 121}, "121 given, at most 120"),
        (V2, {"num_ranks": 1032}, "num_ranks: 1032 given, at most 1024"),
        (V2, {"num_ranks": 96, "num_slots_per_rank": 24}, "2304 given, at most 2048"),
    ],
)
def test_trap_12_limits_are_in_supports(limits, change, reason):
    for limit in limits:
        assert re.search(reason, limit(replace(SPEC, **change)) or "")


def test_specs_inside_the_limits_are_supported_where_the_library_is():
    specs = [SPEC, replace(SPEC, capacity=496), replace(SPEC, num_ranks=96, num_slots_per_rank=3)]
    for spec in specs:
        assert v1_limits(spec) is None
        assert v2_limits(spec) is None
    with emulated("deep_ep"):
        assert DeepEpV1Dispatcher.supports(SPEC) is None
        assert DeepEpV2Dispatcher.supports(SPEC) is None
        assert resolve_backend("auto", SPEC)[0] == "deepep"
        assert resolve_backend("auto", replace(SPEC, hidden=7424))[0] == "deepep_v2"
        assert resolve_backend("auto", replace(SPEC, hidden=136))[0] == "collective"


@pytest.mark.parametrize(
    "error", [ImportError("no"), AssertionError("no"), OSError("libcuda.so.1")]
)
def test_trap_18_a_library_that_does_not_load_is_a_reason(monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(deep_ep_library, "load_deep_ep", fail)
    for dispatcher in (DeepEpV1Dispatcher, DeepEpV2Dispatcher):
        reason = dispatcher.supports(SPEC)
        assert reason == f"deep_ep cannot be imported: {type(error).__name__}: {error}"
    assert resolve_backend("auto", SPEC)[0] == "collective"


def test_trap_18_old_versions_and_deterministic_filling_are_reasons(monkeypatch):
    with emulated("deep_ep"):
        torch.use_deterministic_algorithms(True)
        try:
            assert "fill_uninitialized_memory" in (DeepEpV1Dispatcher.supports(SPEC) or "")
        finally:
            torch.use_deterministic_algorithms(False)
        monkeypatch.delattr(sys.modules["deep_ep"], "ElasticBuffer")
        assert "2.0 or newer needed" in (DeepEpV2Dispatcher.supports(SPEC) or "")


@pytest.mark.parametrize(
    ("num_ranks", "capacity", "alignment", "rounded"),
    [
        (2, 1, 1, 64),
        (2, 64, 1, 64),
        (2, 65, 128, 128),
        (4, 0, 1, 32),
        (8, 100, 128, 112),
        (16, 3, 256, 16),
        (24, 9, 1, 16),
        (128, 5, 128, 5),
    ],
)
def test_trap_08_rows_of_a_slot_are_whole_blocks(num_ranks, capacity, alignment, rounded):
    spec = replace(SPEC, num_ranks=num_ranks, capacity=capacity, row_alignment=alignment)
    assert rounded_capacity(spec) == rounded
    assert num_ranks * rounded % max(128, alignment) == 0


@pytest.mark.parametrize(
    ("capacity", "hidden", "num_ranks", "num_slots", "size"),
    [
        (128, 7168, 8, 256, 1_908_410_496),
        (64, 7168, 16, 256, 954_206_336),
        (128, 7168, 8, 288, 2_146_961_792),
        (128, 2048, 2, 64, 136_315_520),
    ],
)
def test_low_latency_bytes_are_those_measured(capacity, hidden, num_ranks, num_slots, size):
    spec = replace(
        SPEC,
        capacity=capacity,
        hidden=hidden,
        num_ranks=num_ranks,
        num_slots_per_rank=num_slots // num_ranks,
    )
    assert buffer_sizes(spec, 20).low_latency_rdma == size


@pytest.mark.parametrize(
    ("num_ranks", "nvl", "rdma"),
    [
        (2, 83_927_552, 0),
        (4, 167_854_976, 0),
        (8, 335_709_824, 0),
        (16, 377_673_984, 91_887_744),
        (32, None, 168_023_680),
    ],
)
def test_normal_mode_bytes_are_those_measured(num_ranks, nvl, rdma):
    sizes = buffer_sizes(replace(SPEC, num_ranks=num_ranks), 20)
    assert sizes.normal_rdma == rdma
    assert nvl in (None, sizes.nvl)
    total = DeepEpV1Dispatcher.buffer_bytes(replace(SPEC, num_ranks=num_ranks))
    shared = max if num_ranks > 8 else sum
    assert total == sizes.nvl + shared((sizes.normal_rdma, sizes.low_latency_rdma))


def test_trap_07_column_major_scales_are_for_sm90(monkeypatch):
    assert not _needs_row_major_scales()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for major, needs in ((9, False), (10, True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda major=major: (major, 0))
        assert _needs_row_major_scales() is needs


def test_rows_are_expanded_and_summed_as_worked_by_hand():
    # 4 rows, 3 slots, alignment 4; -1 is another rank's. Slot 1 has no row.
    slots = torch.tensor([[2, -1], [0, 2], [-1, -1], [2, 0]])
    expansion = expand(slots, num_slots=3, num_rows=8, alignment=4)
    assert expansion.psum.tolist() == [2, 4, 7]
    assert expansion.positions.tolist() == [[4, -1], [0, 5], [-1, -1], [6, 1]]
    assert expansion.sources.tolist() == [1, 3, 0, 0, 0, 1, 3, 0]
    received = torch.randn(4, 256).to(FP8)
    rows = copy_rows(received, expansion.sources)
    assert_bits_equal(rows[[0, 1, 4, 5, 6]].float(), received[[1, 3, 0, 1, 3]].float())
    y = torch.full((8, 2), float("nan"))
    infinite = float("inf")  # of one token, and stays with it
    y[[0, 1, 4, 5, 6]] = torch.tensor([infinite, 2.0, 3.0, 4.0, 5.0]).unsqueeze(1)
    weights = torch.tensor([[0.5, 9.0], [2.0, 1.0], [7.0, 7.0], [1.0, 10.0]])
    sums = weighted_row_sums(y, expansion.positions, weights)
    assert sums[:, 0].tolist() == [1.5, infinite, 0.0, 25.0]


def test_nothing_received_expands_to_nothing():
    slots = torch.full((3, 2), -1)
    for some in (slots, slots[:0]):
        expansion = expand(some, num_slots=2, num_rows=0, alignment=128)
        assert expansion.psum.tolist() == [0, 0]
        assert copy_rows(torch.empty(len(some), 4).to(FP8), expansion.sources).shape == (0, 4)
        sums = weighted_row_sums(torch.empty(0, 4), expansion.positions, torch.ones(some.shape))
        assert_bits_equal(sums, torch.zeros(len(some), 4))
