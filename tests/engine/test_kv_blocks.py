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
        pool.share(blocks)
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
    pool.share(blocks[:1])
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


def test_a_named_block_is_found_until_its_room_is_needed():
    pool = BlockPool(3)
    first, second, third = pool.allocate(3)
    pool.publish(first, b"1")
    pool.publish(second, b"2")
    pool.free([first, second])  # the second one is freed before the first
    pool.free([third])
    assert pool.find([b"1", b"2", b"3"]) == [first, second]
    assert pool.find([b"3", b"1"]) == []
    assert pool.num_kept([first, second, third]) == 2
    assert pool.allocate(1) == [third]  # nobody knows what is in it
    assert pool.allocate(1) == [second]
    assert (pool.find([b"1", b"2"]), pool.num_free) == ([first], 1)
    pool.share([first])
    assert (pool.num_free, pool.ref_count(first)) == (0, 1)
    pool.check_integrity()


def test_the_first_block_of_a_name_keeps_it():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"1")
    pool.publish(second, b"1")
    pool.publish(first, b"2")
    assert (pool.find([b"1"]), pool.find([b"2"])) == ([first], [])
    pool.free([second])
    with pytest.raises(ValueError, match="has no owner"):
        pool.publish(second, b"3")
    pool.check_integrity()


def test_a_forgotten_block_is_found_no_more_and_stays_its_owners():
    pool = BlockPool(2)
    owned, free = pool.allocate(2)
    pool.publish(owned, b"1")
    pool.publish(free, b"2")
    pool.free([free])
    pool.forget([owned, free])
    assert (pool.find([b"1"]), pool.find([b"2"])) == ([], [])
    assert (pool.ref_count(owned), pool.num_free, pool.num_kept([free])) == (1, 1, 0)
    with pytest.raises(ValueError, match="has no owner"):
        pool.share([free])
    pool.check_integrity()


ACTIONS = st.lists(st.tuples(st.sampled_from("asfpn"), st.integers(0, 12)))


@given(st.integers(1, 12), ACTIONS)
def test_pool_agrees_with_a_model_of_owners(num_blocks, actions):
    pool, owned = BlockPool(num_blocks), Counter()
    names: dict[bytes, int] = {}
    for action, number in actions:
        owners, name = sorted(+owned), bytes([number])
        if action == "a" and number <= pool.num_free:
            blocks = pool.allocate(number)
            assert not set(blocks) & set(owners)
            owned.update(blocks)
            names = {n: block for n, block in names.items() if block not in blocks}
        elif action == "s" and name in names:
            assert pool.find([name]) == [names[name]]
            pool.share([names[name]])
            owned[names[name]] += 1
        elif owners and action in "fpn":
            block = owners[number % len(owners)]
            if action == "f":
                pool.free([block])
                owned[block] -= 1
            elif action == "p":
                pool.publish(block, name)
                if name not in names and block not in names.values():
                    names[name] = block
            else:
                pool.forget([block])
                names = {n: b for n, b in names.items() if b != block}
        assert pool.num_free == num_blocks - len(+owned)
        assert all(pool.ref_count(block) == owned[block] for block in range(num_blocks))
        assert all(
            pool.find([bytes([n])]) == ([names[bytes([n])]] if bytes([n]) in names else [])
            for n in range(13)
        )
        pool.check_integrity()
