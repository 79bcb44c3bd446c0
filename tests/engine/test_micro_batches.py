"""Splitting a step's tokens in two: nothing lost, order kept, cost balanced, cuts where allowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ep.config import ModelConfig
from moe_ep.engine.micro_batches import CUT_ROWS, MIN_ROWS, TokenCost, split
from moe_ep.engine.request import Request, SamplingParams
from moe_ep.engine.step_input import MicroBatch, Piece

# A token costs as much as 100 keys.
COST = TokenCost(token=100.0, decode_key=1.0, prefill_key=1.0)


def _request(name: str) -> Request:
    return Request(name, SamplingParams(), prompt_len=1, arrival=0, max_len=1, token_ids=[0])


def _batch(contexts: list[int], chunks: list[tuple[int, int]]) -> MicroBatch:
    decodes = [Piece(_request(f"d{i}"), start, 1) for i, start in enumerate(contexts)]
    prefills = [Piece(_request(f"p{i}"), *chunk) for i, chunk in enumerate(chunks)]
    return MicroBatch(decodes + prefills, len(decodes))


def _tokens(*batches: MicroBatch) -> list[tuple[str, int, bool]]:
    """(request, position, is a decode) of every token, in order."""
    return [
        (piece.request.request_id, position, index < batch.num_decodes)
        for batch in batches
        for index, piece in enumerate(batch.pieces)
        for position in range(piece.start, piece.start + piece.length)
    ]


def _cost(batch: MicroBatch) -> float:
    return sum(
        COST(piece.start, piece.length, is_decode=index < batch.num_decodes)
        for index, piece in enumerate(batch.pieces)
    )


def _lens(batch: MicroBatch) -> list[int]:
    return [piece.length for piece in batch.pieces]


starts = st.sampled_from((0, 1, CUT_ROWS - 1, CUT_ROWS, 2 * CUT_ROWS, 5000))
batches = st.builds(
    _batch,
    st.lists(st.integers(0, 3000), max_size=40),
    st.lists(st.tuples(starts, st.integers(1, 3 * CUT_ROWS)), max_size=5),
)


@given(batches)
def test_every_token_is_in_one_part_in_order(batch):
    first, second = split(batch, COST)
    assert _tokens(first, second) == _tokens(batch)


@given(batches)
def test_parts_cost_alike_within_one_piece(batch):
    parts = split(batch, COST)
    # The largest step between two places where a cut may fall, over which the half may lie; and as
    # many tokens more as a cut may move to leave no thin part.
    steps = [
        COST(piece.start, piece.length, is_decode=index < batch.num_decodes)
        for index, piece in enumerate(batch.pieces)
    ]
    allowed = (2 * MIN_ROWS + 1) * max(steps, default=0.0)
    assert abs(_cost(parts[0]) - _cost(parts[1])) <= allowed


@given(batches)
def test_prompts_are_cut_where_attention_begins_a_piece_of_keys(batch):
    first, second = split(batch, COST)
    if first.pieces and second.pieces:
        before, after = first.pieces[-1], second.pieces[0]
        if before.request is after.request:
            assert before.start % CUT_ROWS == 0
            assert before.length % CUT_ROWS == 0
            assert after.start == before.start + before.length


@given(batches)
def test_no_part_is_left_with_few_tokens_of_a_phase(batch):
    for count in (
        lambda part: part.num_decodes,
        lambda part: part.num_tokens - part.num_decodes,
    ):
        for part in split(batch, COST):
            assert count(part) >= min(MIN_ROWS, count(batch)) or count(part) == 0


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=40), st.integers(0, 9))
def test_padding_limits_both_parts(contexts, spare):
    most = -(-len(contexts) // 2) + spare
    parts = split(_batch(contexts, []), COST, max_rows=most)
    assert all(part.num_tokens <= most for part in parts)
    assert _tokens(*parts) == _tokens(_batch(contexts, []))


@pytest.mark.parametrize(
    ("contexts", "chunks", "expected"),
    [
        ([], [], ([], [])),
        ([500], [], ([], [1])),  # one request: one part stays empty
        ([99] * 8, [], ([1] * 4, [1] * 4)),
        ([99] * 9, [], ([1] * 4, [1] * 5)),
        # 8 x 1100 keys and tokens against 24 x 300
        ([999] * 8 + [199] * 24, [], ([1] * 7, [1] * 25)),
        ([99] * 3, [], ([], [1] * 3)),  # too few for two products
        ([], [(0, 64), (0, 64)], ([64], [64])),
        ([], [(0, 2 * CUT_ROWS)], ([CUT_ROWS], [CUT_ROWS])),
        ([], [(CUT_ROWS, 3 * CUT_ROWS)], ([2 * CUT_ROWS], [CUT_ROWS])),
        ([], [(7, 2 * CUT_ROWS)], ([], [2 * CUT_ROWS])),  # starts within a piece of keys
        ([9] * 4, [(0, CUT_ROWS)], ([1] * 4, [CUT_ROWS])),
    ],
)
def test_hand_worked_splits(contexts, chunks, expected):
    parts = split(_batch(contexts, chunks), COST)
    assert tuple(_lens(part) for part in parts) == expected


def test_the_cost_of_a_token_is_counted_from_the_model():
    cost = TokenCost.of(ModelConfig.from_path("deepseek-v3"))
    # 128 heads: 576 + 512 per cached latent; 192 + 128 per rebuilt key and value.
    assert (cost.decode_key, cost.prefill_key) == (128 * 1088, 128 * 320)
    # 37 billion parameters are active in a token: 58 layers like this one, the rest outside.
    assert 58 * cost.token == pytest.approx(37e9, rel=0.15)
    assert cost(start=3, length=1, is_decode=True) == cost.token + 4 * cost.decode_key
    assert cost(start=2, length=2, is_decode=False) == 2 * cost.token + 7 * cost.prefill_key
