"""An expert that leaves one bank as tensors and enters another is the same expert, bit by bit."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from eplb.migrate import SlotLayout
from moe_ep.experts import Experts, ExpertSpec, create_experts
from moe_ep.fp8 import FP8
from tests.compare import assert_bits_equal
from tests.emulators.device import emulated_kernels
from tests.experts.cases import SlotInputs, random_weights, valid_rows
from tests.kernels.cases import DEVICE, to_device

BF16, FP32 = torch.bfloat16, torch.float32
COUNTS = [3, 20]

CASES = [
    ("torch", BF16, True, None),
    ("torch", BF16, False, None),
    ("torch", FP32, False, None),
    ("triton", BF16, True, None),
    ("triton", BF16, False, None),
    ("deep_gemm", BF16, True, 9),
    ("deep_gemm", BF16, False, 9),
    ("deep_gemm", BF16, True, 10),
]


@contextmanager
def bank(
    backend: str, dtype: torch.dtype, is_fp8: bool, sm: int | None
) -> Iterator[tuple[ExpertSpec, torch.device]]:
    device = DEVICE if backend == "triton" else torch.device("cpu")
    sizes = {"hidden": 256, "intermediate": 128}
    spec = ExpertSpec(2, dtype=dtype, is_fp8=is_fp8, device=device, **sizes)
    if sm is None:
        yield spec, device
        return
    with emulated_kernels(major=sm):
        yield spec, device


def loaded(backend: str, spec: ExpertSpec, seeds: tuple[int, int]) -> Experts:
    experts = create_experts(backend, spec)
    for slot, seed in enumerate(seeds):
        experts.load_slot(slot, to_device(random_weights(spec, seed)) if spec.device.type != "cpu"
                          else random_weights(spec, seed))  # fmt: skip
    return experts


@pytest.mark.parametrize(("backend", "dtype", "is_fp8", "sm"), CASES)
def test_a_slot_travels(backend: str, dtype: torch.dtype, is_fp8: bool, sm: int | None):
    with bank(backend, dtype, is_fp8, sm) as (spec, device):
        sender = loaded(backend, spec, (1, 2))
        receiver = loaded(backend, spec, (3, 4))
        addresses = [part.data_ptr() for part in receiver.slot_tensors(1)]
        layout = SlotLayout(sender.slot_tensors(1))
        layout.pack([part.cpu() for part in sender.slot_tensors(0)], message := layout.empty())
        inputs = SlotInputs.random(COUNTS, spec.hidden, FP8 if is_fp8 else dtype)
        dispatched = inputs.masked(256)
        if device.type != "cpu":
            dispatched = to_device(dispatched)
        before = valid_rows(receiver(dispatched), dispatched)
        staged = receiver.stage(layout.unpack(message))
        assert_bits_equal(valid_rows(receiver(dispatched), dispatched)[1], before[1])
        receiver.load_staged(1, staged)
        after = valid_rows(receiver(dispatched), dispatched)
        expected = loaded(backend, spec, (3, 1))
        assert_bits_equal(after[1], valid_rows(expected(dispatched), dispatched)[1])
        assert_bits_equal(after[0], before[0])
        if backend != "torch":  # captured steps know the addresses
            assert [part.data_ptr() for part in receiver.slot_tensors(1)] == addresses


def test_an_empty_slot_has_nothing_to_send():
    experts = create_experts("torch", ExpertSpec(2, 64, 64, FP32, is_fp8=False))
    with pytest.raises(RuntimeError, match="slot 1 holds no expert"):
        experts.slot_tensors(1)
