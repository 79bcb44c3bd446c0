"""Real engines that start after what they know give the logits of engines that compute it all."""

import pytest

from moe_ep.config import EngineConfig
from moe_ep.engine.request import EngineRequest
from tests.compare import assert_rows_close
from tests.engine.driver import engine_worker, greedy
from tests.tiny import SIZES, tiny_checkpoint

VOCAB = SIZES["vocab_size"]


def conversation(rank: int) -> list[EngineRequest]:
    """A prompt of three blocks and a bit; one with two of them, one that it and its answer begin,
    one that is it; and one of its own."""
    first = [(7 * i + rank) % VOCAB for i in range(200)]
    prompts = [first, first[:150] + [3] * 10, [*first, 1, 2, 3], first, first[1:]]
    return [
        EngineRequest(f"{rank} {number}", tuple(prompt), greedy(6, ignore_eos=True))
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    "flags", [{"max_num_seqs": 1}, {"max_num_batched_tokens": 70, "max_num_seqs": 3}], ids=str
)
def test_what_is_known_is_as_if_computed(rank_pool, flags):
    config = {"model": str(tiny_checkpoint("v3").path), "ep_size": 2, "num_kv_blocks": 24} | flags

    def run(**more) -> dict:
        requests = [conversation(rank) for rank in range(2)]
        args = (EngineConfig(**config, **more), requests)
        results = rank_pool.run(engine_worker, 2, *args, timeout_s=120)
        return {name: r for result in results for name, r in result.requests.items()}

    known, computed = run(), run(enable_prefix_caching=False)
    for name, result in known.items():
        assert result.token_ids == computed[name].token_ids
        for logits, expected in zip(result.logits, computed[name].logits, strict=True):
            assert_rows_close(logits[None], expected[None])
    cached = [known[f"1 {number}"].outputs[0].num_cached_tokens for number in range(5)]
    assert cached == [0, 128, 192, 192, 0]
    assert all(result.outputs[0].num_cached_tokens == 0 for result in computed.values())
