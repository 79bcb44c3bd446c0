"""Hand-worked schedules: order, budget, chunks, preemption, ends of requests, admission."""

import pytest

from moe_ep.engine.admission import AdmissionLimits, admission_error
from moe_ep.engine.kv_blocks import BlockPool
from moe_ep.engine.request import (
    EngineRequest,
    FinishReason,
    SampledToken,
    SamplingParams,
    TokenLogprobs,
)
from moe_ep.engine.scheduler import Scheduler

EOS = 99


def make_scheduler(
    *, num_blocks=100, block_size=4, seqs=8, budget=16, max_model_len=64, prefix_caching=False
):
    return Scheduler(
        pool=BlockPool(num_blocks),
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        eos_token_ids=(EOS,),
        prefix_caching=prefix_caching,
    )


def add(scheduler, name, prompt_len, **params):
    params = {"temperature": 0.0, "max_tokens": None} | params
    scheduler.add(EngineRequest(name, tuple(range(prompt_len)), SamplingParams(**params)))


def plan(batch):
    """The batch as text: decode names, then (name, start, length), '!' on a last chunk."""
    chunks = [(c.request.request_id + "!" * c.is_last, c.start, c.length) for c in batch.prefills]
    return [request.request_id for request in batch.decodes] + chunks


def run(scheduler, token_id=5):
    """One step in which every request samples the same token."""
    batch = scheduler.schedule()
    sampled = {request.request_id: SampledToken(token_id) for request in batch.sampling_requests}
    outputs = scheduler.update(batch, sampled)
    scheduler.check_integrity()
    return plan(batch), outputs


def test_decodes_go_first_then_prefills_in_order_of_arrival():
    scheduler = make_scheduler(budget=8)
    add(scheduler, "a", 6)
    add(scheduler, "b", 7)
    add(scheduler, "c", 3)
    assert run(scheduler)[0] == [("a!", 0, 6), ("b", 0, 2)]
    assert run(scheduler)[0] == ["a", ("b!", 2, 5), ("c", 0, 2)]
    assert run(scheduler)[0] == ["a", "b", ("c!", 2, 1)]
    assert run(scheduler)[0] == ["a", "b", "c"]


def test_no_more_requests_than_allowed_run_at_a_time():
    scheduler = make_scheduler(seqs=2)
    for name in "abc":
        add(scheduler, name, 3, max_tokens=2)
    assert run(scheduler)[0] == [("a!", 0, 3), ("b!", 0, 3)]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert run(scheduler)[0] == ["a", "b"]
    assert run(scheduler)[0] == [("c!", 0, 3)]


def test_the_youngest_gives_way_and_resumes_with_what_it_had():
    scheduler = make_scheduler(num_blocks=4)
    add(scheduler, "old", 7, max_tokens=4)
    add(scheduler, "young", 7, max_tokens=4)
    assert run(scheduler)[0] == [("old!", 0, 7), ("young!", 0, 7)]
    assert run(scheduler)[0] == ["old", "young"]  # the eighth position fills both blocks
    assert run(scheduler)[0] == ["old"]  # the ninth needs a block, and there is none
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    plan_, outputs = run(scheduler)
    assert (plan_, outputs[0].finish_reason) == (["old"], FinishReason.LENGTH)
    assert run(scheduler)[0] == [("young!", 0, 9)]  # seven of the prompt, two of its own
    plan_, outputs = run(scheduler)
    assert (plan_, outputs[0].finish_reason) == (["young"], FinishReason.LENGTH)
    assert (scheduler.has_work, scheduler.pool.num_free) == (False, 4)


def test_an_older_prefill_takes_the_blocks_of_a_younger_decode_not_the_reverse():
    scheduler = make_scheduler(num_blocks=6, budget=9)
    add(scheduler, "old", 14, max_tokens=2)
    add(scheduler, "young", 3, max_tokens=20)
    assert run(scheduler)[0] == [("old", 0, 9)]  # three blocks; 4 + 1 fit as well
    assert run(scheduler)[0] == [("old!", 9, 5), ("young!", 0, 3)]
    assert run(scheduler)[0] == ["old", "young"]
    assert scheduler.num_running == 1


def test_the_youngest_keeps_its_blocks_while_nobody_older_needs_them():
    scheduler = make_scheduler(num_blocks=4)
    add(scheduler, "old", 9, max_tokens=3)
    add(scheduler, "young", 3, max_tokens=3)
    assert run(scheduler)[0] == [("old!", 0, 9), ("young!", 0, 3)]
    assert run(scheduler)[0] == ["old", "young"]
    assert run(scheduler)[0] == ["old"]  # young lacks a block; its own is left alone
    assert scheduler.num_running == 1
    plan_, _ = run(scheduler)
    assert plan_ == ["young"]  # goes on where it was, nothing computed twice


def test_a_new_request_waits_until_all_its_prompt_has_room():
    scheduler = make_scheduler(num_blocks=4, budget=8)
    add(scheduler, "a", 7, max_tokens=4)
    add(scheduler, "b", 9, max_tokens=2)
    add(scheduler, "c", 1, max_tokens=2)
    assert run(scheduler)[0] == [("a!", 0, 7)]  # b needs three blocks; c does not overtake it
    assert scheduler.num_waiting == 2


def test_a_new_request_leaves_room_for_the_next_token_of_all():
    scheduler = make_scheduler(num_blocks=3)
    add(scheduler, "a", 4, max_tokens=2)
    add(scheduler, "b", 4, max_tokens=2)
    assert run(scheduler)[0] == [("a!", 0, 4)]  # both would need a second block at once
    assert run(scheduler)[0] == ["a"]
    assert run(scheduler)[0] == [("b!", 0, 4)]


def test_a_batch_that_is_not_run_is_picked_again():
    scheduler = make_scheduler(num_blocks=5, seqs=4, budget=6)
    add(scheduler, "a", 5, max_tokens=9)
    run(scheduler)
    add(scheduler, "b", 9, max_tokens=9)
    first, free = scheduler.schedule(), scheduler.pool.num_free
    for _ in range(3):
        assert plan(scheduler.schedule()) == plan(first) == ["a", ("b", 0, 5)]
        assert scheduler.pool.num_free == free
        scheduler.check_integrity()


def test_a_one_token_prompt_is_a_prefill():
    scheduler = make_scheduler()
    add(scheduler, "a", 1)
    assert run(scheduler)[0] == [("a!", 0, 1)]
    assert run(scheduler)[0] == ["a"]


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop_reason"),
    [
        ({"max_tokens": 3}, [1, 2, 3], FinishReason.LENGTH, None),
        ({"max_tokens": 500}, [1] * 12, FinishReason.LENGTH, None),
        ({"max_tokens": None}, [1] * 12, FinishReason.LENGTH, None),
        ({"max_tokens": 3}, [1, EOS], FinishReason.STOP, None),
        ({"max_tokens": 2}, [1, EOS], FinishReason.STOP, None),
        ({"max_tokens": 3, "ignore_eos": True}, [1, EOS, 1], FinishReason.LENGTH, None),
        ({"max_tokens": 3, "stop_token_ids": (7, 8)}, [1, 8], FinishReason.STOP, 8),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, [EOS], FinishReason.STOP, EOS),
        ({"stop_token_ids": (7,), "min_tokens": 3}, [7, EOS, 7], FinishReason.STOP, 7),
        ({"max_tokens": 2, "min_tokens": 5}, [1, EOS], FinishReason.LENGTH, None),
    ],
)
def test_ends_of_a_request(params, tokens, reason, stop_reason):
    scheduler = make_scheduler(max_model_len=16)
    add(scheduler, "a", 4, **params)
    outputs = [run(scheduler, token_id)[1][0] for token_id in tokens]
    assert [output.token_ids for output in outputs] == [(token_id,) for token_id in tokens]
    assert {output.finish_reason for output in outputs[:-1]} <= {None}
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (reason, stop_reason)
    assert (scheduler.has_work, scheduler.pool.num_free) == (False, 100)


def test_abort():
    scheduler = make_scheduler(seqs=1)
    add(scheduler, "running", 5)
    add(scheduler, "waiting", 5)
    run(scheduler)
    for name in ("running", "waiting"):
        output = scheduler.abort(name)
        assert (output.request_id, output.token_ids) == (name, ())
        assert output.finish_reason is FinishReason.ABORT
        scheduler.check_integrity()
        assert scheduler.abort(name) is None
    assert (scheduler.has_work, scheduler.kv_tokens, scheduler.pool.num_free) == (False, 0, 100)


def test_abort_between_schedule_and_update_drops_only_that_request():
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    add(scheduler, "b", 3)
    batch = scheduler.schedule()
    scheduler.abort("a")
    outputs = scheduler.update(batch, {"a": SampledToken(1), "b": SampledToken(1)})
    assert [output.request_id for output in outputs] == ["b"]
    scheduler.check_integrity()


def test_a_request_with_an_error_is_aborted_and_the_others_go_on(caplog):
    scheduler = make_scheduler(budget=9)
    add(scheduler, "decode", 3)
    add(scheduler, "fails early", 2)
    run(scheduler)
    add(scheduler, "fails late", 3)
    add(scheduler, "chunk", 8, prompt_logprobs=0)
    batch = scheduler.schedule()
    assert plan(batch) == ["decode", "fails early", ("fails late!", 0, 3), ("chunk", 0, 4)]
    entries = (TokenLogprobs(0, float("nan"), 1),) * 4
    failed = SampledToken(None, error="no token is possible")
    outputs = scheduler.update(
        batch,
        {
            "decode": SampledToken(7),
            "fails early": failed,
            "fails late": failed,
            "chunk": SampledToken(None, prompt_logprobs=entries, error="a NaN"),
        },
    )
    scheduler.check_integrity()
    ends = [(o.request_id, o.token_ids) for o in outputs if o.finish_reason is FinishReason.ABORT]
    assert ends == [("fails early", ()), ("fails late", ()), ("chunk", ())]
    assert [(o.request_id, o.token_ids) for o in outputs[3:]] == [("decode", (7,))]
    assert "request fails late aborted: no token is possible" in caplog.text
    assert "request chunk aborted: a NaN" in caplog.text
    assert (scheduler.kv_tokens, scheduler.pool.num_free) == (5, 99)
    assert run(scheduler)[0] == ["decode"]


def test_an_error_of_a_request_that_was_aborted_meanwhile_ends_no_namesake():
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    batch = scheduler.schedule()
    scheduler.abort("a")
    add(scheduler, "a", 3)
    assert scheduler.update(batch, {"a": SampledToken(None, error="a NaN")}) == []
    assert run(scheduler)[0] == [("a!", 0, 3)]


def test_kv_tokens_counts_running_and_queued():
    scheduler = make_scheduler(seqs=1)
    add(scheduler, "a", 5)
    add(scheduler, "b", 7)
    assert scheduler.kv_tokens == 12
    run(scheduler)
    assert scheduler.kv_tokens == 13
    scheduler.abort("b")
    assert scheduler.kv_tokens == 6


LIMITS = AdmissionLimits(max_model_len=20, num_blocks=4, block_size=4)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "limits", "error"),
    [
        (0, 1, LIMITS, "prompt: 0 tokens given; at least 1"),
        (3, 0, LIMITS, "max_tokens: 0 given; at least 1"),
        (20, 1, LIMITS, "prompt: 20 tokens given; at most 19"),
        (15, 1, LIMITS, None),
        (15, 2, LIMITS, "15 prompt and 2 output tokens given; together at most 16"),
        (3, 14, LIMITS, "3 prompt and 14 output tokens given; together at most 16"),
        (3, None, LIMITS, None),
        (15, None, LIMITS, None),
        (16, None, LIMITS, "prompt: 16 tokens given; at most 15"),
        (3, None, AdmissionLimits(16, 4, 4), None),
        (15, 10**9, AdmissionLimits(16, 4, 4), None),
        (3, 13, LIMITS, None),
    ],
)
def test_what_can_never_run_is_refused(prompt_len, max_tokens, limits, error):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    found = admission_error(prompt_len, params, limits)
    scheduler = make_scheduler(num_blocks=4, max_model_len=limits.max_model_len)
    assert scheduler.limits == limits
    request = EngineRequest("a", tuple(range(prompt_len)), params)
    if error is None:
        assert found is None
        scheduler.add(request)
    else:
        assert error in found
        with pytest.raises(ValueError, match=r"given; "):
            scheduler.add(request)
        assert not scheduler.has_work


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"max_num_seqs: 17 given; from 1 to .* \(16\)"):
        make_scheduler(seqs=17, budget=16)
    scheduler = make_scheduler()
    with pytest.raises(ValueError, match="seed: None given"):
        add(scheduler, "a", 3, temperature=1.0)
    add(scheduler, "a", 3)
    with pytest.raises(ValueError, match="request_id: 'a' given; it is already in use"):
        add(scheduler, "a", 3)
