"""Places, message bytes and sums, worked by hand."""

import numpy as np
import pytest
import torch

from moe_ep.dispatch import ContiguousLayout, DispatchSpec, Mode
from moe_ep.dispatch.layout import Entries, place, sum_order, sums, weighted_sums
from moe_ep.dispatch.routing import Choices, plan_send
from moe_ep.dispatch.wire import WireFormat
from moe_ep.fp8 import FP8
from tests.compare import assert_bits_equal
from tests.ranks import RankInfo, RankPool


def _spec(**changes) -> DispatchSpec:
    sizes = {
        "hidden": 256,
        "num_topk": 2,
        "num_ranks": 2,
        "num_slots_per_rank": 3,
        "max_tokens_per_rank": 8,
        "capacity": 4,
        "payload_dtype": FP8,
        "out_dtype": torch.bfloat16,
    }
    return DispatchSpec(**{**sizes, **changes})


@pytest.mark.parametrize(
    ("counts", "psum", "num_rows"),
    [
        ([100, 122, 114], [100, 250, 370], 384),
        ([0, 1, 128, 129], [0, 1, 256, 385], 512),
        ([1, 0, 3], [1, 128, 131], 256),
        ([0, 0], [0, 0], 0),
    ],
)
def test_psum_layout(counts, psum, num_rows):
    slots = np.repeat(np.arange(len(counts)), counts)
    entries = Entries(np.arange(len(slots)), slots, np.ones(len(slots), dtype=np.float32))
    places = place(entries, _spec(num_slots_per_rank=len(counts), row_alignment=128), Mode.NORMAL)
    assert (places.starts + places.counts).tolist() == psum
    assert places.num_rows == num_rows
    layout = ContiguousLayout(torch.tensor(psum, dtype=torch.int32), 128)
    assert layout.counts.tolist() == counts


def test_a_slot_named_twice_by_a_row_holds_it_once():
    # row 0 -> slot 2 twice; row 1 -> slots 2, 0; row 3 -> slot 2
    rows, slots = np.array([0, 0, 1, 1, 3]), np.array([2, 2, 2, 0, 2])
    places = place(Entries(rows, slots, np.ones(5, dtype=np.float32)), _spec(), Mode.LOW_LATENCY)
    assert places.counts.tolist() == [1, 0, 3]
    assert places.positions.tolist() == [16, 16, 17, 0, 18]  # 2 ranks x capacity 4 = 8 a slot
    assert places.num_rows == 24


def test_send_plan_sends_a_token_once_per_rank():
    # 3 tokens, 2 ranks x 3 slots; token 1 goes nowhere, token 2 twice to rank 1
    tokens, slots = np.array([0, 0, 2, 2]), np.array([4, 1, 5, 3])
    weights = np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32)
    plan = plan_send(Choices(tokens, slots, weights), num_tokens=3, num_ranks=2, num_slots=3)
    assert plan.row_tokens.tolist() == [0, 0, 2]
    assert plan.row_counts.tolist() == [1, 2]
    assert plan.entry_counts.tolist() == [1, 3]
    assert plan.entry_rows.tolist() == [0, 0, 1, 1]
    assert plan.entry_slots.tolist() == [1, 1, 2, 0]
    assert plan.entry_weights.tolist() == weights[[1, 0, 2, 3]].tolist()
    wire = WireFormat(_spec())
    _, sizes = wire.pack(plan, torch.zeros(3, 256).to(FP8), torch.zeros(3, 2))
    row = 256 // 4 + 2
    assert sizes == [row + 2, 2 * row + 3 * 2]


def test_messages_are_read_as_they_were_written():
    spec, generator = _spec(num_ranks=4), np.random.default_rng(0)
    slots = generator.integers(0, 12, size=40)
    choices = Choices(np.repeat(np.arange(20), 2), slots, generator.random(40, dtype=np.float32))
    plan = plan_send(choices, num_tokens=20, num_ranks=4, num_slots=3)
    rows, scales = torch.randn(20, 256).to(FP8), torch.rand(20, 2)
    wire = WireFormat(spec)
    message, _ = wire.pack(plan, rows, scales)
    entries, sources = wire.unpack(message, plan.row_counts, plan.entry_counts)
    assert_bits_equal(torch.cat([s.rows for s in sources]), rows[plan.row_tokens])
    got_scales = torch.cat([s.scales for s in sources if s.scales is not None])
    assert_bits_equal(got_scales, scales[plan.row_tokens])
    # every entry names its token, slot and weight
    ranks = np.repeat(np.arange(4), plan.entry_counts)
    got = zip(
        plan.row_tokens[entries.rows], entries.slots + ranks * 3, entries.weights, strict=True
    )
    assert sorted(got) == sorted(zip(*choices, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_go_in_order_and_do_not_depend_on_other_rows(dtype):
    num_rows = 261
    counts = np.random.default_rng(1).integers(0, 4, size=num_rows)
    rows = np.repeat(np.arange(num_rows), counts)
    values = torch.randn(len(rows), 24, dtype=dtype)
    index = np.random.default_rng(2).permutation(len(rows))
    weights = np.random.default_rng(3).random(len(rows), dtype=np.float32)
    starts = sum_order(rows, num_rows)
    out = weighted_sums(values, index, starts, weights)
    assert out.dtype == dtype
    totals = torch.zeros(num_rows, 24)
    for row in range(num_rows):
        terms = slice(starts[row], starts[row + 1])
        alone = weighted_sums(values, index[terms], np.array([0, counts[row]]), weights[terms])
        assert_bits_equal(out[row : row + 1], alone)
        for i, weight in zip(index[terms], weights[terms], strict=True):
            totals[row] += float(weight) * values[i].float()
    assert_rounded_once(out, totals)


def assert_rounded_once(actual, exact):
    """Nothing but the last rounding, and that of float32 sums, is between them."""
    ulp = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.float(), exact, rtol=ulp / 2 + 1e-6, atol=1e-6)


def test_a_large_term_shows_the_order_of_the_sum():
    values = torch.tensor([[1e8], [1.0], [-1e8]])
    for order, expected in (([0, 1, 2], 0.0), ([0, 2, 1], 1.0)):
        index, starts = np.array(order), np.array([0, 3])
        ones = np.ones(3, dtype=np.float32)
        assert sums(values, index, starts).item() == expected
        assert weighted_sums(values, index, starts, ones).item() == expected


@pytest.mark.parametrize("width", [1, 3, 64, 1000])
def test_bf16_rows_are_added_in_float32(width):
    # In BF16 256 + 1 is 256, so adding there would never reach 258.
    values = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16).unsqueeze(1).repeat(1, width)
    index, starts = np.arange(3), np.array([0, 3])
    assert sums(values, index, starts).tolist() == [[258.0] * width]
    ones = np.ones(3, dtype=np.float32)
    assert weighted_sums(values, index, starts, ones).tolist() == [[258.0] * width]


@pytest.mark.parametrize("width", [1, 3, 64, 1000])
def test_bf16_rows_have_float32_weights(width):
    # What BF16 would leave of 1/3, taken away, leaves what it would drop.
    third = torch.tensor(1 / 3)
    weights = torch.stack([third, third.bfloat16().float()])
    values = torch.tensor([[1.0], [-1.0]], dtype=torch.bfloat16).repeat(1, width)
    out = weighted_sums(values, np.arange(2), np.array([0, 2]), weights.numpy())
    left = (weights[0] - weights[1]).bfloat16().item()
    assert left != 0.0
    assert out.tolist() == [[left] * width]


def test_sums_of_nothing_are_zero():
    empty, starts = np.empty(0, dtype=np.int64), np.zeros(4, dtype=np.int64)
    for values in (torch.full((2, 8), float("nan")), torch.empty(0, 8)):
        weights = np.empty(0, dtype=np.float32)
        assert sums(values, empty, starts).tolist() == [[0.0] * 8] * 3
        out = weighted_sums(values, empty, starts, weights)
        assert out.tolist() == [[0.0] * 8] * 3
        assert weighted_sums(values, empty, starts[:1], weights).shape == (0, 8)
        assert sums(values, empty, starts[:1]).shape == (0, 8)


def _traffic(info: RankInfo, tokens_to_peer: int) -> dict[str, int]:
    from moe_ep.dispatch.collective import CollectiveDispatcher

    spec = _spec()
    dispatcher = CollectiveDispatcher(spec, info.group)
    slots = torch.full((6, 2), info.rank * 3)  # own rank
    slots[:tokens_to_peer] = torch.tensor([3, 4]) - info.rank * 3  # twice the peer
    x, weights = torch.ones(6, 256), torch.ones(6, 2)
    dispatched = dispatcher.dispatch(
        x=x, topk_slots=slots, topk_weights=weights, mode=Mode.NORMAL
    ).wait()
    dispatcher.combine(y=dispatched.rows.bfloat16(), dispatched=dispatched).wait()
    return vars(dispatcher.traffic)


def test_traffic_counts_what_leaves_the_rank(rank_pool: RankPool):
    for traffic in rank_pool.run(_traffic, 2, 4):
        assert traffic == {
            "rows": 4,
            "entries": 8,
            "returned_rows": 4,
            "count_bytes": 8,
            "dispatch_bytes": 4 * (256 + 8) + 8 * 8,
            "combine_bytes": 4 * 256 * 2,
        }
