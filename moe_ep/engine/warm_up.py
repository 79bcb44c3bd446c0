"""Steps that are run before the first request, for what they leave behind.

GPU libraries make kernels when they are first used, which takes seconds to minutes: longer than
ranks wait for each other in a step, and than a user does.
"""

from array import array

import torch

from attention import BLOCK_SIZE
from moe_ep.engine.batch import PrefillChunk, ScheduledBatch
from moe_ep.engine.request import Request, SamplingParams
from moe_ep.engine.runner import Runner
from moe_ep.engine.step_shape import StepRules, Vote, derive
from moe_ep.progress import Stage

NUM_TOKENS = 2 * BLOCK_SIZE


@torch.inference_mode()
def warm_up(runner: Runner, rules: StepRules, *, num_ranks: int, most_tokens: int) -> None:
    """Run a prefill and a decode whose results nobody reads. Collective.

    most_tokens: of a step. Blocks of the cache are written, as if by a request that has left.
    """
    num_tokens = min(NUM_TOKENS, most_tokens, runner.cache.num_blocks * BLOCK_SIZE - 1)
    request = Request(
        request_id="warm-up",
        params=SamplingParams(temperature=0.0, seed=0),
        prompt_len=num_tokens,
        arrival=0,
        max_len=num_tokens + 1,
        token_ids=[0] * num_tokens,
        block_table=array("i", range(num_tokens // BLOCK_SIZE + 1)),
    )
    prefill = ScheduledBatch(prefills=[PrefillChunk(request, 0, num_tokens, is_last=True)])
    _run(runner, rules, num_ranks, prefill)
    request.token_ids.append(0)
    request.num_computed_tokens = num_tokens
    _run(runner, rules, num_ranks, ScheduledBatch(decodes=[request]))
    for layer in runner.decoder.moe_layers:
        layer.slot_tokens.zero_()
    runner.decoder.progress.enter(Stage.LOADING)


def _run(runner: Runner, rules: StepRules, num_ranks: int, batch: ScheduledBatch) -> None:
    vote = Vote(
        step=0,
        num_decode_tokens=batch.num_decode_tokens,
        num_prefill_tokens=batch.num_prefill_tokens,
        num_largest_part=runner.largest_part(batch),
    )
    runner.run(batch, derive([vote] * num_ranks, rules))
