"""Block accounting against a plain model of owners."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ep.engine.kv_blocks import BlockPool, blocks_needed


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)]
)
def test_blocks_needed(num_tokens, expected):
    assert blocks_needed(num_tokens, 64) == expected


def test_allocation_is_all_or_nothing():
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(ValueError, match="2 blocks asked for; 1 are free"):
        pool.allocate(2)
    with pytest.raises(ValueError, match="-1 blocks"):
        pool.allocate(-1)
    assert pool.num_free == 1


def test_double_free_is_an_error():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(ValueError, match=f"block {blocks[0]} has no owner"):
        pool.free(blocks)
    with pytest.raises(ValueError, match="has no owner"):
        pool.incref(blocks)
    pool.check_integrity()


@pytest.mark.parametrize("block", [-1, 2])
def test_unknown_blocks_are_refused(block):
    pool = BlockPool(2)
    pool.allocate(2)
    with pytest.raises(ValueError, match=f"block {block} does not exist"):
        pool.free([block])


def test_a_shared_block_lives_until_its_last_owner():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.incref(blocks[:1])
    pool.free(blocks)
    assert (pool.num_free, pool.ref_count(blocks[0])) == (1, 1)
    pool.free(blocks[:1])
    assert pool.num_free == 2


def test_empty_pools_are_refused():
    with pytest.raises(ValueError, match="num_blocks: 0"):
        BlockPool(0)


def test_integrity_check_sees_corruption():
    pool = BlockPool(3)
    pool.allocate(1)
    pool._free.append(0)
    with pytest.raises(AssertionError):
        pool.check_integrity()
    pool._free[-1] = pool._free[0]
    with pytest.raises(AssertionError, match="twice"):
        pool.check_integrity()


@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from("ais"), st.integers(0, 12))))
def test_pool_agrees_with_a_model_of_owners(num_blocks, actions):
    pool, owned = BlockPool(num_blocks), Counter()
    for action, number in actions:
        if action == "a" and number <= pool.num_free:
            blocks = pool.allocate(number)
            assert not set(blocks) & set(+owned)
            owned.update(blocks)
        elif +owned and action != "a":
            block = sorted(+owned)[number % len(+owned)]
            (pool.incref if action == "i" else pool.free)([block])
            owned[block] += 1 if action == "i" else -1
        assert pool.num_free == num_blocks - len(+owned)
        assert all(pool.ref_count(block) == owned[block] for block in range(num_blocks))
        pool.check_integrity()
