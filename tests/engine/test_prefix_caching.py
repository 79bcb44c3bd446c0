"""Hand-worked schedules with a cache that knows what it holds. Blocks have four tokens."""

import pytest

from moe_ep.engine.prefix import extend_names
from moe_ep.engine.request import EngineRequest, SampledToken, SamplingParams
from tests.engine.test_scheduler import make_scheduler, plan, run


def add(scheduler, name, tokens, **params):
    params = {"temperature": 0.0, "max_tokens": None} | params
    scheduler.add(EngineRequest(name, tuple(tokens), SamplingParams(**params)))


def finish(scheduler, name):
    scheduler.abort(name)
    scheduler.check_integrity()


def caching(**sizes):
    return make_scheduler(prefix_caching=True, **sizes)


def test_equal_names_mean_equal_tokens_from_the_start():
    names = {}
    for tokens in ([1, 2, 3, 4], [1, 2, 3, 5], [3, 4, 1, 2], [1, 2], [257, 2]):
        names[tuple(tokens)] = []
        extend_names(names[tuple(tokens)], tokens, 2, len(tokens) // 2)
    assert names[1, 2, 3, 4][:1] == names[1, 2, 3, 5][:1] == names[1, 2]
    every = {name for blocks in names.values() for name in blocks}
    assert len(every) == 6  # (1 2), (1 2 3 4), (1 2 3 5), (3 4), (3 4 1 2), (257 2)
    again = list(names[1, 2])
    extend_names(again, [1, 2, 3, 4], 2, 2)
    assert again == names[1, 2, 3, 4]


def test_a_request_starts_after_what_a_running_one_has_computed():
    scheduler = caching()
    add(scheduler, "a", range(10))
    assert run(scheduler)[0] == [("a!", 0, 10)]
    add(scheduler, "b", [*range(8), 77, 78])
    add(scheduler, "c", [*range(4), 66, *range(5, 8)])
    steps, outputs = run(scheduler)
    assert steps == ["a", ("b!", 8, 2), ("c!", 4, 4)]
    assert {o.request_id: o.num_cached_tokens for o in outputs} == {"a": None, "b": 8, "c": 4}
    tables = {r.request_id: r.block_table for r in scheduler._running}
    assert tables["b"][:2] == tables["a"][:2]
    assert tables["c"][:1] == tables["a"][:1]
    assert len({*tables["a"], *tables["b"], *tables["c"]}) == 3 + 1 + 1


def test_what_a_request_has_left_is_found_with_its_output():
    scheduler = caching()
    add(scheduler, "a", range(6))
    for _ in range(4):
        run(scheduler, token_id=5)
    finish(scheduler, "a")  # nine tokens are in the cache: two full blocks
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    add(scheduler, "b", [*range(6), 5, 5, 5, 5, 9])
    steps, outputs = run(scheduler)
    assert (steps, outputs[0].num_cached_tokens) == ([("b!", 8, 3)], 8)


def test_one_token_of_a_known_prompt_is_computed():
    scheduler = caching()
    add(scheduler, "a", range(8))
    run(scheduler)
    add(scheduler, "b", range(8))
    assert run(scheduler)[0] == ["a", ("b!", 4, 4)]
    add(scheduler, "c", range(9))
    assert run(scheduler)[0] == ["a", "b", ("c!", 8, 1)]


def test_a_resumed_request_is_no_decode_in_its_first_step():
    scheduler = caching(num_blocks=3, budget=8)
    add(scheduler, "a", range(3))
    add(scheduler, "b", range(20, 24))
    run(scheduler)  # 4 and 5 known tokens
    assert run(scheduler)[0] == ["a", "b"]
    add(scheduler, "c", [1])
    while scheduler._requests["b"].num_preemptions == 0:
        run(scheduler)
    known = len(scheduler._requests["b"].token_ids)
    finish(scheduler, "a")
    batch = scheduler.schedule()
    chunk = batch.prefills[0]
    assert (chunk.request.request_id, chunk.start) == ("b", 4)
    assert (batch.decodes, chunk.start + chunk.length) == ([], known)
    assert chunk.length >= 2


def test_logits_of_a_prompt_are_never_skipped():
    scheduler = caching()
    add(scheduler, "a", range(8))
    run(scheduler)
    add(scheduler, "b", range(9), prompt_logprobs=0)
    assert plan(scheduler.schedule()) == ["a", ("b!", 0, 9)]


def test_blocks_of_a_failed_request_are_not_found():
    scheduler = caching()
    add(scheduler, "a", range(9))
    run(scheduler)
    scheduler.update(scheduler.schedule(), {"a": SampledToken(1, error="NaN")})
    add(scheduler, "b", range(9))
    assert run(scheduler)[0] == [("b!", 0, 9)]


def test_known_blocks_give_way_to_new_ones_oldest_first():
    scheduler = caching(num_blocks=4)
    for name, first in (("a", 0), ("b", 20)):
        add(scheduler, name, range(first, first + 5))
        run(scheduler)
        finish(scheduler, name)
    add(scheduler, "c", range(40, 51))
    run(scheduler)  # takes three blocks: the two unknown ones and that of a
    finish(scheduler, "c")
    add(scheduler, "d", range(20, 25))
    assert run(scheduler)[0] == [("d!", 4, 1)]
    finish(scheduler, "d")
    add(scheduler, "e", range(5))
    assert run(scheduler)[0] == [("e!", 0, 5)]


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_known_prefix_counts_as_room(prefix_caching):
    scheduler = make_scheduler(num_blocks=4, prefix_caching=prefix_caching)
    add(scheduler, "a", range(9), max_tokens=2)
    run(scheduler)  # holds three blocks
    add(scheduler, "b", range(9), max_tokens=2)
    assert run(scheduler)[0] == (["a", ("b!", 8, 1)] if prefix_caching else ["a"])


def test_nothing_is_found_when_it_is_off():
    scheduler = make_scheduler()
    add(scheduler, "a", range(9))
    run(scheduler)
    add(scheduler, "b", range(9))
    steps, outputs = run(scheduler)
    assert steps == ["a", ("b!", 0, 9)]
    assert [output.num_cached_tokens for output in outputs] == [None, 0]
