"""What dispatch refuses before any exchange, and what happens when a peer dies or is late."""

import os
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moe_ep.dispatch import BACKENDS, DispatchSpec, Mode, create_dispatcher, resolve_backend
from moe_ep.fp8 import FP8
from tests.dispatch.cases import Case, arguments, run_experts
from tests.ranks import RankInfo, RankPool, run_ranks

SPEC = DispatchSpec(
    hidden=8,
    num_topk=2,
    num_ranks=1,
    num_slots_per_rank=3,
    max_tokens_per_rank=4,
    capacity=2,
    payload_dtype=torch.float32,
    out_dtype=torch.float32,
)


def _arguments(num_tokens: int, slot: int = 0) -> dict[str, torch.Tensor]:
    return {
        "x": torch.ones(num_tokens, 8),
        "topk_slots": torch.full((num_tokens, 2), slot),
        "topk_weights": torch.ones(num_tokens, 2),
    }


@pytest.mark.parametrize(
    ("mode", "num_tokens", "message"),
    [
        (Mode.NORMAL, 5, r"x: 5 tokens given, at most max_tokens_per_rank = 4 .*normal mode"),
        (Mode.LOW_LATENCY, 3, r"x: 3 tokens given, at most capacity = 2 .*low_latency mode"),
    ],
)
def test_too_many_tokens_are_refused(mode, num_tokens, message):
    with pytest.raises(ValueError, match=message):
        create_dispatcher("local", SPEC, None).dispatch(**_arguments(num_tokens), mode=mode)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_slots": torch.tensor([[0, 3]])}, r"topk_slots: 0 to 3 given, slots 0 to 2"),
        ({"topk_slots": torch.tensor([[-2, 0]])}, r"topk_slots: -2 to 0 given"),
        ({"topk_slots": torch.tensor([[0, 0]], dtype=torch.int32)}, r"topk_slots: torch.int32"),
        ({"topk_weights": torch.ones(2, 2)}, r"topk_weights: torch.float32 \[2, 2\] given"),
        ({"x": torch.ones(1, 7)}, r"x: shape \[1, 7\] given, \[T, 8\] needed"),
        ({"x": torch.ones(1, 8, dtype=torch.float64)}, r"x: torch.float64 given"),
    ],
)
def test_bad_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        create_dispatcher("local", SPEC, None).dispatch(
            **{**_arguments(1), **change}, mode=Mode.NORMAL
        )


def test_outputs_of_another_shape_or_dtype_are_refused():
    dispatcher = create_dispatcher("local", SPEC, None)
    dispatched = dispatcher.dispatch(**_arguments(1), mode=Mode.NORMAL).wait()
    with pytest.raises(ValueError, match=r"y: shape \[2, 8\] given"):
        dispatcher.combine(y=torch.ones(2, 8), dispatched=dispatched)
    with pytest.raises(ValueError, match=r"y: torch.bfloat16 given, out_dtype = torch.float32"):
        dispatcher.combine(y=dispatched.rows.bfloat16(), dispatched=dispatched)


def test_auto_takes_local_for_one_rank_and_collective_for_more():
    assert resolve_backend("auto", SPEC)[0] == "local"
    backend, reason = resolve_backend("auto", replace(SPEC, num_ranks=2))
    assert backend == "collective"
    assert "2 ranks" in reason


@pytest.mark.parametrize("name", ["deepep", "local"])
def test_a_backend_that_cannot_work_fails_with_the_list(name):
    with pytest.raises(ValueError, match=f"'{name}' given") as failure:
        resolve_backend(name, replace(SPEC, num_ranks=2))
    assert "local: num_ranks: 2 given" in str(failure.value)
    assert "collective: works" in str(failure.value)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": 0},
        {"row_alignment": 0},
        {"payload_dtype": torch.float16},
        {"out_dtype": FP8},
    ],
)
def test_no_backend_supports_a_spec_without_sense(change):
    field = next(iter(change))
    for load in BACKENDS.values():
        assert field in (load().supports(replace(SPEC, **change)) or "")


def test_collective_needs_a_group_and_rows_of_whole_words():
    with pytest.raises(ValueError, match="group: None given"):
        create_dispatcher("collective", replace(SPEC, num_ranks=2), None)
    odd = replace(SPEC, num_ranks=2, hidden=130, payload_dtype=FP8)
    with pytest.raises(ValueError, match="no multiple of 4"):
        resolve_backend("auto", odd)


def _refuse_then_go_on(info: RankInfo, case: Case) -> torch.Tensor:
    """Only rank 0 is over the limit; had it sent anything, the next exchange would be off."""
    dispatcher = create_dispatcher("collective", case.spec, info.group)
    if info.rank == 0:
        x = torch.zeros(case.spec.capacity + 1, case.hidden)
        slots = torch.zeros(len(x), case.num_topk, dtype=torch.int64)
        with pytest.raises(ValueError, match="capacity"):
            dispatcher.dispatch(
                x=x, topk_slots=slots, topk_weights=slots.float(), mode=Mode.LOW_LATENCY
            )
    pending = dispatcher.dispatch(**arguments(case, info.rank, Mode.LOW_LATENCY))
    return pending.wait().layout.counts


def test_capacity_exceeded_is_refused_before_the_exchange(rank_pool: RankPool):
    counts = rank_pool.run(_refuse_then_go_on, 2, Case("uniform", (4, 4)))
    assert sum(int(c.sum()) for c in counts) == 2 * 4 * 3


def _lose_rank_one(info: RankInfo, stage: str, is_dead: bool) -> str:
    case = Case("uniform", (4, 4))
    group = dist.new_group(timeout=timedelta(seconds=3))
    dispatcher = create_dispatcher("collective", case.spec, group)
    if info.rank == 0:
        info.store.set("rank 0 is connected", "")
    info.store.wait(["rank 0 is connected"])

    def stop_here(now: str) -> None:
        if info.rank == 1 and stage == now:
            if is_dead:
                os._exit(1)
            time.sleep(5)

    try:
        stop_here("counts")
        dispatched = dispatcher.dispatch(**arguments(case, info.rank, Mode.NORMAL)).wait()
        stop_here("combine")
        y = run_experts(case, info.rank, dispatched)
        dispatcher.combine(y=y, dispatched=dispatched).wait()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("stage", ["counts", "combine"])
@pytest.mark.parametrize("is_dead", [True, False])
def test_a_lost_peer_gives_an_error_in_time(stage, is_dead):
    start = time.monotonic()
    message = run_ranks(_lose_rank_one, 2, stage, is_dead, timeout_s=30, may_die=(1,))[0]
    assert f"rank 0: the {stage} exchange failed" in message
    assert time.monotonic() - start < 20
