"""Prompt log-probabilities of a chunk: few rows of logits at a time, and what a NaN does."""

from types import SimpleNamespace

import pytest
import torch

from moe_ep.engine.batch import PrefillChunk, ScheduledBatch
from moe_ep.engine.request import Request, SampledToken, SamplingParams
from moe_ep.engine.runner import _LOGPROB_ROWS, Runner, _with_prompt_logprobs

HIDDEN, VOCAB = 8, 40


class Head:
    """Stands for the decoder: a projection that keeps the number of rows of every call."""

    def __init__(self) -> None:
        self.weight = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(0))
        self.num_rows: list[int] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_rows.append(len(hidden))
        return hidden @ self.weight


def make_runner(head: Head) -> Runner:
    rest = dict.fromkeys(("attention", "dispatcher", "sampler", "token_cost"))
    return Runner(decoder=head, cache=SimpleNamespace(tensor=torch.empty(0)), **rest)


def make_chunk(start: int, length: int, prompt_len: int) -> PrefillChunk:
    """Of a request whose prompt is known up to ``start``, with its first entries computed."""
    request = Request(
        request_id="p",
        params=SamplingParams(prompt_logprobs=2),
        prompt_len=prompt_len,
        arrival=0,
        max_len=1000,
        token_ids=[i * 7 % VOCAB for i in range(prompt_len)],
        prompt_logprobs=[None] * (start + 1),
    )
    return PrefillChunk(request, start, length, is_last=start + length == prompt_len)


@pytest.mark.parametrize(
    ("start", "length", "prompt_len"),
    [(0, 2 * _LOGPROB_ROWS + 5, 2 * _LOGPROB_ROWS + 5), (3, _LOGPROB_ROWS, 200), (10, 5, 15)],
)
def test_few_rows_at_a_time_give_the_entries_of_all_at_once(start, length, prompt_len):
    head, chunk = Head(), make_chunk(start, length, prompt_len)
    num_decodes = 3
    hidden = torch.randn(num_decodes + length, HIDDEN)
    batch = ScheduledBatch(decodes=[chunk.request] * num_decodes, prefills=[chunk])
    entries = make_runner(head)._prompt_logprobs(hidden, batch)["p"]
    num_entries = min(length, prompt_len - 1 - start)
    assert sum(head.num_rows) == len(entries) == num_entries
    assert max(head.num_rows) <= _LOGPROB_ROWS
    exact = (hidden[num_decodes:].double() @ head.weight.double()).log_softmax(dim=1)
    for row, entry in enumerate(entries):
        assert entry.token_id == chunk.request.token_ids[start + row + 1]
        assert entry.logprob == pytest.approx(exact[row, entry.token_id].item(), abs=1e-5)
        assert entry.top_ids == tuple(exact[row].topk(2).indices.tolist())


def test_a_nan_among_them_is_the_error_of_the_request():
    head, chunk = Head(), make_chunk(0, 5, 6)
    hidden = torch.randn(5, HIDDEN)
    for value, error in ((1.0, None), (float("nan"), "its prompt logits hold a NaN")):
        hidden[4, 2] = value
        entries = make_runner(head)._prompt_logprobs(hidden, ScheduledBatch(prefills=[chunk]))
        found = _with_prompt_logprobs(SampledToken(None), entries["p"])
        assert (len(found.prompt_logprobs), found.error) == (5, error)
    earlier = SampledToken(None, error="its logits hold a NaN")
    assert _with_prompt_logprobs(earlier, entries["p"]).error == "its logits hold a NaN"
