"""The stand-in for graphs: it repeats what a device would repeat, and refuses what it would."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from moe_ep.fp8 import FP8
from tests.compare import assert_bits_equal
from tests.emulators import deep_gemm, flash_mla
from tests.emulators.cuda_graph import CaptureError, EmulatedGraphMaker, kernel, launch
from tests.emulators.device import emulated_kernels

WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
X = torch.arange(8.0)
INDEX, MASK = torch.tensor([1, 2]), torch.tensor([True] * 4 + [False] * 4)


def function(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Views, operations in place and out of place, another type, and state that stays."""
    counter += 1
    first, second = x.chunk(2)
    y = torch.cat([first * 2, second]).mul_(3)
    y[1:3].copy_(first[:2])
    y = F.linear(y, WEIGHT).to(FP8).float()
    return y.where(torch.arange(8) < counter, 0.0)[INDEX] + F.pad(y, (0, 0)).sum()


def test_a_replay_does_the_same_with_other_inputs() -> None:
    fixed, counter = X.clone(), torch.zeros(1)
    graph, result = EmulatedGraphMaker().capture(lambda: function(fixed, counter))
    assert result.isnan().all(), "nothing has run yet"
    counter.zero_()
    want_counter = torch.zeros(1)
    for scale in (1.0, -2.0, 0.5):
        fixed.copy_(X * scale)
        graph.replay()
        assert_bits_equal(result, function(X * scale, want_counter))


def test_what_python_decided_stays() -> None:
    factors = iter([2.0, 3.0])
    graph, result = EmulatedGraphMaker().capture(lambda: X * next(factors))
    graph.replay()
    graph.replay()
    assert_bits_equal(result, X * 2)


def test_a_kernel_runs_again_and_its_host_does_not() -> None:
    calls, runs = [], []

    @kernel
    def double(x: torch.Tensor, out: torch.Tensor) -> None:
        runs.append(x.tolist())
        out.copy_(torch.tensor(x.tolist()) * 2)

    def run() -> torch.Tensor:
        calls.append(None)
        out = torch.empty(8)
        double(fixed, out)
        return out + 1

    fixed = X.clone()
    graph, result = EmulatedGraphMaker().capture(run)
    fixed.copy_(X + 1)
    graph.replay()
    assert_bits_equal(result, (X + 1) * 2 + 1)
    assert (len(calls), len(runs)) == (1, 2)


def test_graphs_of_a_maker_share_their_memory() -> None:
    maker = EmulatedGraphMaker()
    first, one = maker.capture(lambda: X + 1)
    second, two = maker.capture(lambda: X + 2)
    first.replay()
    assert_bits_equal(one, X + 1)
    second.replay()
    assert one.isnan().all()
    assert_bits_equal(two, X + 2)


def test_memory_that_a_replay_does_not_write_is_not_what_it_was() -> None:
    kept: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        kept.append(torch.empty(4))
        return X[:4] + kept[0]

    graph, result = EmulatedGraphMaker().capture(run)
    kept[0].fill_(1)
    graph.replay()
    assert result.isnan().all()


@pytest.mark.parametrize(
    "refused",
    [
        lambda: X[0].item(),
        lambda: int(INDEX[0]),
        lambda: bool(X.sum() > 0),
        lambda: X.tolist(),
        lambda: X.numpy(),
        lambda: X.cpu(),
        lambda: torch.equal(X, X),
        lambda: X[INDEX[0]],
        lambda: MASK.nonzero(),
        lambda: X[MASK],
        lambda: X.clone().index_put_((MASK,), X[0]),
        lambda: X.masked_select(MASK),
        lambda: X.repeat_interleave(INDEX.repeat(4)),
        lambda: INDEX.bincount(),
        lambda: X.unique(),
        lambda: torch.tensor([1.0]),
        lambda: X[[0, 1]],
        lambda: X + torch.from_numpy(np.ones(8)),
        lambda: X + torch.frombuffer(bytearray(32), dtype=torch.float32),
    ],
    ids=lambda refused: "",
)
def test_what_cannot_be_captured_is_refused(refused: Callable[[], object]) -> None:
    with pytest.raises(CaptureError), torch.inference_mode():
        EmulatedGraphMaker().capture(refused)


def test_a_flash_mla_schedule_is_made_where_it_is_captured() -> None:
    """One from outside was filled from other lengths, and its kernel is not in the graph."""
    q = torch.zeros(2, 1, 1, 576, dtype=torch.bfloat16)
    cache = torch.zeros(3, 64, 1, 576, dtype=torch.bfloat16)
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    lengths = torch.tensor([5, 0], dtype=torch.int32)

    def attend(schedule: flash_mla.flash_mla_interface.FlashMLASchedMeta) -> torch.Tensor:
        for _ in range(2):  # layers
            out, _ = flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, schedule)
        return out

    with emulated_kernels():
        graph, out = EmulatedGraphMaker().capture(lambda: attend(flash_mla.get_mla_metadata()[0]))
        lengths.copy_(torch.tensor([64, 3]))
        graph.replay()
        assert_bits_equal(out, attend(flash_mla.get_mla_metadata()[0]))
        early = flash_mla.get_mla_metadata()[0]
        attend(early)
        graph, _ = EmulatedGraphMaker().capture(lambda: attend(early))
        lengths.copy_(torch.tensor([64, 4]))
        with pytest.raises(RuntimeError, match=r"for lengths \[64, 3\] was used again"):
            graph.replay()


def test_a_product_is_compiled_before_it_is_captured() -> None:
    a, b = (torch.ones(8, 64, dtype=torch.bfloat16) for _ in range(2))

    def multiply() -> torch.Tensor:
        d = torch.empty(8, 8, dtype=torch.bfloat16)
        deep_gemm.bf16_gemm_nt(a, b, d)
        return d

    with emulated_kernels():
        with pytest.raises(CaptureError, match="never used"):
            EmulatedGraphMaker().capture(multiply)
        multiply()
        graph, d = EmulatedGraphMaker().capture(multiply)
        a.fill_(2)
        graph.replay()
        assert (d == 128).all()


def test_a_capture_that_failed_leaves_nothing_behind() -> None:
    maker = EmulatedGraphMaker()
    with pytest.raises(CaptureError):
        maker.capture(lambda: X.tolist())
    launch(lambda: None)
    assert maker.graphs == []
    assert X.tolist()[1] == 1.0
