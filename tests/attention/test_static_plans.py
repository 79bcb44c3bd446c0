"""Decodes captured over a static plan, replayed for other requests, against plans made for them.

The cache is poisoned wherever no request wrote, and so is what a request before left in the plan.
"""

from array import array

import pytest
import torch

from attention import AttentionBatch, attention_capture_problem, create_attention
from attention import decode_items as items_module
from attention.decode_items import StaticItems
from tests.attention.cases import Case, flash_mla_spec, make_case, make_spec
from tests.compare import assert_bits_equal
from tests.emulators.cuda_graph import EmulatedGraphMaker
from tests.kernels.cases import DEVICE

pytestmark = pytest.mark.usefixtures("sm90")

NUM_REQUESTS, MAX_BLOCKS, NUM_BLOCKS = 4, 6, 24
# Contexts of the requests of one step after the other: all, fewer, none, and one.
STEPS = [[0, 63, 64, 130], [300, 3], [], [127]]


def case_of(name: str, contexts: list[int]) -> Case:
    spec = flash_mla_spec(2) if name == "flash_mla" else make_spec(num_heads=2)
    return make_case(spec, [(context, 1) for context in contexts], len(contexts))


@pytest.mark.parametrize("name", ["flash_mla", "triton"])
def test_replays_equal_plans_made_for_the_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items_module, "ITEM_ROWS", 128)  # requests of several items, cheaply
    spec = case_of(name, [1]).spec
    backend = create_attention(name, spec, device=DEVICE)
    static = backend.static_plan(
        num_requests=NUM_REQUESTS, max_blocks=MAX_BLOCKS, num_blocks=NUM_BLOCKS
    )
    cache = torch.full((NUM_BLOCKS, 64, 1, spec.latent_dim), torch.nan, dtype=spec.dtype)
    shape = (NUM_REQUESTS, spec.num_heads, spec.latent_dim)
    q = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(spec.dtype)

    def run() -> torch.Tensor:
        layers = [static.plan()] * 2
        first, second = (backend.decode(q=q, cache=cache, plan=plan) for plan in layers)
        return torch.stack([first, second])

    run()
    graph, out = EmulatedGraphMaker().capture(run)
    for contexts in STEPS:
        case = case_of(name, contexts)
        cache.fill_(torch.nan)
        cache[: len(case.cache)] = case.cache
        static.update(case.batch)
        graph.replay()
        if name == "flash_mla":
            assert not out[:, len(contexts) :].any(), "something was read for padding"
        if contexts:
            plan = backend.plan(case.batch)
            want = backend.decode(q=q[: len(contexts)], cache=cache, plan=plan)
            for layer in out[:, : len(contexts)]:
                assert_bits_equal(layer, want)


def test_the_plan_is_one_of_decodes_alone() -> None:
    for name in ("flash_mla", "triton"):
        backend = create_attention(name, case_of(name, [1]).spec, device=DEVICE)
        static = backend.static_plan(num_requests=3, max_blocks=2, num_blocks=4)
        plan = static.plan()
        assert (plan.num_tokens, plan.num_decode_tokens, plan.prefills) == (3, 3, ())


def test_items_have_room_for_the_worst_step() -> None:
    """All blocks with one request, and blocks spread so that most items are begun."""
    static = StaticItems(num_requests=4, max_blocks=3000, num_blocks=3000, device=DEVICE)
    for contexts in ([189_999, 0, 0, 0], [511, 1023, 512, 2048], [46_000] * 4):
        batch = AttentionBatch(
            num_decodes=4,
            query_lens=[1] * 4,
            context_lens=contexts,
            block_tables=[array("i", [7]) * (-(-(c + 1) // 64)) for c in contexts],
            num_padded_tokens=4,
        )
        static.update(batch)
        stops = static.items.item_stop
        assert stops.max() == max(contexts) + 1
    assert len(stops) == 4 * 32  # MAX_ITEMS each
    short = StaticItems(num_requests=4, max_blocks=3000, num_blocks=80, device=DEVICE)
    assert len(short.items.item_stop) == 4 + 10  # of 512 rows each, and one that is begun by each
    few = StaticItems(num_requests=4, max_blocks=8, num_blocks=3000, device=DEVICE)
    assert not few.items.is_split


def test_torch_says_why_it_cannot() -> None:
    assert "host" in (attention_capture_problem("torch") or "")
    backend = create_attention("torch", make_spec())
    with pytest.raises(NotImplementedError, match="host"):
        backend.static_plan(num_requests=1, max_blocks=1, num_blocks=1)
    assert attention_capture_problem("flash_mla") is attention_capture_problem("triton") is None
