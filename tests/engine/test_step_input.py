"""Rows and plans of steps against a look at each token, while block tables grow and are given back.

What was made of a step stays as it was: its tables go on, and its blocks go to others.
"""

from array import array

import pytest
import torch

from attention import AttentionBackend, create_attention
from attention.base import BLOCK_SIZE
from attention.block_tables import joined
from moe_ep.dispatch.base import Mode
from moe_ep.engine.kv_blocks import BlockPool
from moe_ep.engine.micro_batches import CUT_ROWS, TokenCost, split
from moe_ep.engine.request import EngineRequest, Request, SampledToken, SamplingParams
from moe_ep.engine.scheduler import Scheduler
from moe_ep.engine.step_input import (
    MicroBatch,
    Piece,
    attention_batch,
    make_step_input,
    token_rows,
    whole_batch,
)
from moe_ep.model.decoder import StepInput
from tests.attention.cases import make_spec


def naive_rows(batch: MicroBatch, num_padding: int) -> list[tuple[int, int, int]]:
    """(token id, position, slot) of each row."""
    rows = [
        (
            request.token_ids[position],
            position,
            request.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE,
        )
        for request, start, length in batch.pieces
        for position in range(start, start + length)
    ]
    return rows + [(0, 0, -1)] * num_padding


def rows_of(batch: MicroBatch, num_padding: int) -> list[tuple[int, ...]]:
    padded = batch.num_tokens + num_padding
    rows = token_rows(batch, attention_batch(batch, padded))
    assert rows.dtype is torch.int64
    return list(map(tuple, rows.T.tolist()))


def attended(batch: MicroBatch) -> set[int]:
    """Slots that hold the contexts and new tokens of the decodes."""
    return {
        request.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for request, start, _ in batch.pieces[: batch.num_decodes]
        for position in range(start + 1)
    }


def planned(step: StepInput) -> tuple[list[int], set[int]]:
    """The slots that a step writes, and those that its decodes read, as the torch backend plans."""
    work = step.attention_plan.decode
    groups = () if work is None else work.groups
    return step.slot_mapping.tolist(), {row for g in groups for row in g.cache_rows.tolist()}


def make_input(batch: MicroBatch, attention: AttentionBackend) -> StepInput:
    return make_step_input(
        batch,
        attention=attention,
        mode=Mode.NORMAL,
        num_padded_tokens=batch.num_tokens + 2,
        device=torch.device("cpu"),
    )


def test_rows_and_plans_while_tables_grow_and_requests_are_preempted() -> None:
    scheduler = Scheduler(
        pool=BlockPool(7),
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=100,
        max_model_len=4 * BLOCK_SIZE,
        eos_token_ids=(),
        prefix_caching=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=100)
    for i in range(4):
        prompt = tuple(range(1000 * i, 1000 * i + 40 + 25 * i))
        scheduler.add(EngineRequest(f"{i}", prompt, params))
    attention = create_attention("torch", make_spec())
    made, grown, num_preemptions = [], set(), 0
    while scheduler.has_work:
        batch = scheduler.schedule()
        whole = whole_batch(batch)
        assert rows_of(whole, 2) == naive_rows(whole, 2)
        step = make_input(whole, attention)
        assert planned(step)[1] == attended(whole)
        made.append((step, planned(step)))
        grown |= {len(piece.request.block_table) for piece in whole.pieces}
        running = [piece.request for piece in whole.pieces]
        tokens = {r.request_id: SampledToken(7) for r in batch.sampling_requests}
        scheduler.update(batch, tokens)
        scheduler.check_integrity()
        num_preemptions = max([num_preemptions, *(r.num_preemptions for r in running)])
    assert grown == {1, 2, 3, 4}
    assert num_preemptions > 0
    assert all(planned(step) == then for step, then in made)


def test_rows_of_a_prompt_that_is_cut_across_micro_batches() -> None:
    prompt, decode = (
        Request(name, SamplingParams(), 1, arrival=0, max_len=1, token_ids=list(range(length)))
        for name, length in (("prompt", 3 * CUT_ROWS), ("decode", 70))
    )
    blocks = torch.randperm(100, generator=torch.Generator().manual_seed(0)).tolist()
    decode.block_table.extend(blocks[:2])
    prompt.block_table.extend(blocks[2:50])
    whole = MicroBatch([Piece(decode, 69, 1), Piece(prompt, CUT_ROWS, 2 * CUT_ROWS)], 1)
    first, second = split(whole, TokenCost(100.0, 1.0, 1.0))
    assert [piece.request for piece in first.pieces] == [decode, prompt]
    assert [piece.request for piece in second.pieces] == [prompt]
    assert rows_of(first, 0) + rows_of(second, 3) == naive_rows(whole, 3)


def test_no_tokens_are_all_padding() -> None:
    assert rows_of(MicroBatch([], 0), 3) == [(0, 0, -1)] * 3


def test_tables_of_other_types_are_not_misread() -> None:
    with pytest.raises(TypeError):
        joined([[1, 2]])
    with pytest.raises(AssertionError, match="int32"):
        joined([array("q", [1, 2])])


def test_a_table_that_is_too_short_does_not_go_on_in_the_next_one() -> None:
    first, second = (
        Request(name, SamplingParams(), 1, arrival=0, max_len=1, token_ids=[0] * 65)
        for name in ("first", "second")
    )
    first.block_table.append(3)
    second.block_table.extend([4, 5])
    with pytest.raises(AssertionError, match=r"\[65 65\] tokens in \[1 2\] blocks"):
        rows_of(MicroBatch([Piece(first, 64, 1), Piece(second, 64, 1)], 2), 0)
