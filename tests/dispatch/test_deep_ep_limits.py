"""What the DeepEP adapters refuse, and the sizes they know, without the library or a device."""

import re
import sys
from dataclasses import replace

import pytest
import torch

from moe_ep.config.exchange import v1_buffer_bytes, v1_limit, v1_rounded_capacity, v2_limit
from moe_ep.dispatch import DispatchSpec, Mode, deep_ep_library, resolve_backend
from moe_ep.dispatch.deep_ep_v1 import DeepEpV1Dispatcher
from moe_ep.dispatch.deep_ep_v2 import DeepEpV2Dispatcher
from moe_ep.fp8 import FP8
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


def v1_limits(spec: DispatchSpec) -> str | None:
    return deep_ep_library.common_problem(spec) or v1_limit(spec)


def v2_limits(spec: DispatchSpec) -> str | None:
    return deep_ep_library.common_problem(spec) or v2_limit(spec)


BOTH, V1, V2 = (v1_limits, v2_limits), (v1_limits,), (v2_limits,)


@pytest.mark.parametrize(
    ("limits", "change", "reason"),
    [
        (BOTH, {"payload_dtype": torch.float32}, "payload_dtype: torch.float32 given"),
        (BOTH, {"out_dtype": torch.float32}, "out_dtype: torch.float32 given"),
        (BOTH, {"num_ranks": 1}, "num_ranks: 1 given"),
        (BOTH, {"hidden": 0}, "hidden: 0 given"),
        (BOTH, {"num_sms": 7}, "num_sms: 7 given, an even number"),
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


@pytest.mark.parametrize(
    ("mode", "change"),
    [
        (Mode.NORMAL, {"hidden": 7424}),
        (Mode.NORMAL, {"num_topk": 12}),
        (Mode.NORMAL, {"capacity": 497}),
        (Mode.LOW_LATENCY, {"num_ranks": 3}),
        (Mode.LOW_LATENCY, {"num_slots_per_rank": 129}),
    ],
)
def test_trap_12_limits_are_those_of_the_modes_in_use(mode, change):
    spec = replace(SPEC, **change)
    assert v1_limits(spec) is not None
    for only in Mode:
        limit = v1_limits(replace(spec, modes=frozenset({only})))
        assert (limit is None) == (only is mode), limit


def test_low_latency_alone_needs_whole_nodes():
    spec = replace(SPEC, num_ranks=12, modes=frozenset({Mode.LOW_LATENCY}))
    assert "12 given, over several nodes a multiple of 8" in (v1_limits(spec) or "")
    assert v1_limits(replace(spec, num_ranks=40)) is None


@pytest.mark.parametrize("num_ranks", [8, 16])
def test_only_modes_in_use_take_memory(num_ranks):
    both = replace(SPEC, num_ranks=num_ranks)
    sizes = v1_buffer_bytes(both)
    normal = DeepEpV1Dispatcher.buffer_bytes(replace(both, modes=frozenset({Mode.NORMAL})))
    low = DeepEpV1Dispatcher.buffer_bytes(replace(both, modes=frozenset({Mode.LOW_LATENCY})))
    assert normal == sizes.nvl + sizes.normal_rdma
    assert low == sizes.low_latency_rdma
    assert max(normal, low) < DeepEpV1Dispatcher.buffer_bytes(both)


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
    assert v1_rounded_capacity(spec) == rounded
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
    assert v1_buffer_bytes(spec).low_latency_rdma == size


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
    sizes = v1_buffer_bytes(replace(SPEC, num_ranks=num_ranks))
    assert sizes.normal_rdma == rdma
    assert nvl in (None, sizes.nvl)
    total = DeepEpV1Dispatcher.buffer_bytes(replace(SPEC, num_ranks=num_ranks))
    shared = max if num_ranks > 8 else sum
    assert total == sizes.nvl + shared((sizes.normal_rdma, sizes.low_latency_rdma))
