"""One test for each trap of DeepEP that its adapters guard against, over the stand-in.

The number is the trap's; taking away the guard that a test names makes it fail.
"""

import os
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from moe_ep.dispatch import Dispatcher, Mode, deep_ep_v1
from moe_ep.dispatch.deep_ep_v1 import DeepEpV1Dispatcher
from moe_ep.dispatch.deep_ep_v2 import DeepEpV2Dispatcher
from tests.compare import assert_bits_equal, assert_rows_close
from tests.dispatch.cases import (
    BF16,
    arguments,
    expected_output,
    inputs_of,
    run_in_turns,
    start_combine,
)
from tests.dispatch.deep_ep_cases import (
    BACKENDS,
    HIDDEN,
    RTOL,
    case,
    on_stand_in,
    quantizer_of,
)
from tests.emulators.install import emulated
from tests.ranks import RankInfo, RankPool


def _v1(dispatcher: Dispatcher) -> DeepEpV1Dispatcher:
    assert isinstance(dispatcher, DeepEpV1Dispatcher)
    return dispatcher


# 1


def _identity(info: RankInfo, backend: str) -> list[torch.Tensor]:
    one = case("uniform", (4, 4), payload_dtype=BF16)

    def work(dispatcher: Dispatcher) -> list[torch.Tensor]:
        outs = []
        for mode in Mode:
            given = {**arguments(one, info.rank, mode), "x": torch.ones(4, HIDDEN, dtype=BF16)}
            given["topk_weights"] = torch.full((4, 3), 0.25)
            dispatched = dispatcher.dispatch(**given).wait()
            y = dispatched.rows.clone()
            if dispatched.row_weights is not None:
                y = (y.float() * dispatched.row_weights.unsqueeze(1)).to(BF16)
            outs.append(dispatcher.combine(y=y, dispatched=dispatched).wait().clone())
        return outs

    return on_stand_in(info, backend, one.spec, work)


@pytest.mark.parametrize("backend", BACKENDS)
def test_trap_01_weights_are_applied_once(rank_pool: RankPool, backend):
    for outs in rank_pool.run(_identity, 2, backend):
        for out in outs:  # three experts that return their input, each with weight a quarter
            assert_bits_equal(out, torch.full((4, HIDDEN), 0.75, dtype=BF16))


# 10


def _constant_sizes(info: RankInfo, backend: str) -> int:
    """Steps of several sizes, each the same on all ranks, on one dispatcher; the low-latency calls
    of V1 would trap on another n."""
    one = case("uniform", (9, 9))
    given = vars(inputs_of(one, info.rank))

    def work(dispatcher: Dispatcher) -> int:
        for num_tokens in (1, 9, 0, 4):
            for mode in Mode:
                pending = dispatcher.dispatch(
                    **{name: value[:num_tokens] for name, value in given.items()}, mode=mode
                )
                start_combine(dispatcher, one, info.rank, pending).wait()
        if isinstance(dispatcher, DeepEpV2Dispatcher):
            return len(dispatcher._buffer.kernels)
        return 0

    return on_stand_in(info, backend, replace(one.spec, max_tokens_per_rank=12), work)


def test_trap_10_sizes_are_constants_of_the_spec(rank_pool: RankPool):
    rank_pool.run(_constant_sizes, 2, "deepep")
    # dispatch and combine, each for normal and for low-latency steps
    assert rank_pool.run(_constant_sizes, 2, "deepep_v2") == [4, 4]


# 11


PAIR = [case("uniform", (5, 5)), case("skewed", (5, 5))]


def _two_in_flight(info: RankInfo, backend: str, mode: Mode) -> list[torch.Tensor]:
    """Two micro-batches by turns; each send comes before the other's wait."""
    work = partial(run_in_turns, todo=PAIR, rank=info.rank, mode=mode)
    return on_stand_in(info, backend, PAIR[0].spec, work)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", list(Mode))
def test_trap_11_hook_called_before_next_send(rank_pool: RankPool, backend, mode):
    for rank, outs in enumerate(rank_pool.run(_two_in_flight, 2, backend, mode)):
        for one, out in zip(PAIR, outs, strict=True):
            expected = expected_output(one, rank, quantizer_of(backend, mode))
            assert_rows_close(out, expected, rtol=RTOL, atol=0.0)


def _hooks(info: RankInfo) -> str:
    one = case("uniform", (4, 4))

    def work(dispatcher: Dispatcher) -> str:
        given = arguments(one, info.rank, Mode.LOW_LATENCY)
        first = dispatcher.dispatch(**given)
        # Sent, not received: the phases are apart.
        assert bool(first._value.rows.float().isnan().all())  # type: ignore[attr-defined]
        second = dispatcher.dispatch(**given)
        with pytest.raises(RuntimeError, match="2 low-latency dispatches have not been combined"):
            dispatcher.dispatch(**given)
        for pending in (first, second):
            start_combine(dispatcher, one, info.rank, pending).wait()
        dispatcher.dispatch(**given)  # left open: destroy receives it
        return "done"

    return on_stand_in(info, "deepep", one.spec, work)


def test_trap_11_no_third_dispatch_and_no_hook_left_behind(rank_pool: RankPool):
    assert rank_pool.run(_hooks, 2) == ["done", "done"]


# With more slots than the library makes queue pairs by default.
SHARED = case("uniform", (4, 4), payload_dtype=BF16, num_slots_per_rank=26)


def _shared_buffer(info: RankInfo) -> list[torch.Tensor]:
    """As over several nodes: both modes in one buffer, in turns."""
    one = SHARED

    def work(dispatcher: Dispatcher) -> list[torch.Tensor]:
        assert len(_v1(dispatcher)._buffers) == 1
        outs = []
        for mode in (Mode.NORMAL, Mode.LOW_LATENCY, Mode.NORMAL):
            pending = dispatcher.dispatch(**arguments(one, info.rank, mode))
            outs.append(start_combine(dispatcher, one, info.rank, pending).wait().clone())
        _v1(dispatcher).prepare(Mode.LOW_LATENCY)
        pending = dispatcher.dispatch(**arguments(one, info.rank, Mode.LOW_LATENCY))
        outs.append(start_combine(dispatcher, one, info.rank, pending).wait().clone())
        return outs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deep_ep_v1, "v1_has_one_buffer", lambda spec: True)
        return on_stand_in(info, "deepep", one.spec, work)


def test_trap_11_a_shared_buffer_is_cleaned_between_the_modes(rank_pool: RankPool):
    for rank, outs in enumerate(rank_pool.run(_shared_buffer, 2)):
        expected = expected_output(SHARED, rank)
        for out in outs:
            assert_rows_close(out, expected, rtol=RTOL, atol=0.0)


# 12, 18, 19


def _one_mode(info: RankInfo, mode: Mode) -> int:
    one = case("uniform", (4, 4))
    other = next(m for m in Mode if m is not mode)

    def work(dispatcher: Dispatcher) -> int:
        with pytest.raises(ValueError, match=f"mode: {other.value} given"):
            dispatcher.dispatch(**arguments(one, info.rank, other))
        dispatcher.prepare(other)
        pending = dispatcher.dispatch(**arguments(one, info.rank, mode))
        start_combine(dispatcher, one, info.rank, pending).wait()
        return sum(b.num_nvl_bytes + b.num_rdma_bytes for b in _v1(dispatcher)._buffers)

    return on_stand_in(info, "deepep", replace(one.spec, modes=frozenset({mode})), work)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_mode_that_is_not_used_has_no_buffer(rank_pool: RankPool, mode):
    spec = replace(case("uniform", (4, 4)).spec, modes=frozenset({mode}))
    size = DeepEpV1Dispatcher.buffer_bytes(spec)
    assert rank_pool.run(_one_mode, 2, mode) == [size, size]


def _many_slots(info: RankInfo, backend: str) -> int:
    """More slots than the library's default of 24 queue pairs; a low-latency call asks for them."""
    one = case("own rank", (2, 2), num_slots_per_rank=32, num_topk=8)

    def work(dispatcher: Dispatcher) -> int:
        pending = dispatcher.dispatch(**arguments(one, info.rank, Mode.LOW_LATENCY))
        start_combine(dispatcher, one, info.rank, pending).wait()
        if isinstance(dispatcher, DeepEpV1Dispatcher):
            return sum(b.num_nvl_bytes + b.num_rdma_bytes for b in dispatcher._buffers)
        assert isinstance(dispatcher, DeepEpV2Dispatcher)
        return dispatcher._buffer.num_bytes

    return on_stand_in(info, backend, one.spec, work)


def test_trap_12_a_queue_pair_for_every_slot_and_the_bytes_that_were_told(rank_pool: RankPool):
    spec = case("own rank", (2, 2), num_slots_per_rank=32, num_topk=8).spec
    v1, v2 = DeepEpV1Dispatcher.buffer_bytes(spec), DeepEpV2Dispatcher.buffer_bytes(spec)
    assert rank_pool.run(_many_slots, 2, "deepep") == [v1, v1]
    assert rank_pool.run(_many_slots, 2, "deepep_v2") == [v2 - (14 << 20)] * 2


def _construct_without_network(info: RankInfo) -> str:
    os.environ.pop("EP_DISABLE_GIN", None)
    on_stand_in(info, "deepep_v2", case("uniform", (4, 4)).spec, lambda dispatcher: None)
    return os.environ.pop("EP_DISABLE_GIN", "")


@pytest.mark.skipif(os.path.exists("/sys/class/infiniband"), reason="the machine has RDMA")
def test_trap_18_a_machine_without_rdma_disables_gin(rank_pool: RankPool):
    assert rank_pool.run(_construct_without_network, 2) == ["1", "1"]


def _change_sms(info: RankInfo) -> str:
    one = case("uniform", (4, 4))

    def work(dispatcher: Dispatcher) -> str:
        pending = dispatcher.dispatch(**arguments(one, info.rank, Mode.NORMAL))
        sys.modules["deep_ep"].Buffer.set_num_sms(8)  # another user of the process-wide value
        start_combine(dispatcher, one, info.rank, pending).wait()
        return "done"

    return on_stand_in(info, "deepep", one.spec, work)


def test_trap_19_combine_has_the_sms_of_its_dispatch(rank_pool: RankPool):
    assert rank_pool.run(_change_sms, 2) == ["done", "done"]


def _odd_sms(info: RankInfo) -> str:
    spec = replace(case("uniform", (4, 4)).spec, num_sms=7)
    with emulated("deep_ep"):
        for dispatcher in (DeepEpV1Dispatcher, DeepEpV2Dispatcher):
            with pytest.raises(ValueError, match="num_sms: 7 given, an even number"):
                dispatcher(spec, info.group)
    return "done"


def test_trap_19_an_odd_number_of_sms_is_refused(rank_pool: RankPool):
    assert rank_pool.run(_odd_sms, 2) == ["done", "done"]
