"""A model that needs no tensors: the next token is a hash of what the paged cache really holds.

A block handed to two requests, or a table that points at stale tokens, changes the text.
"""

from moe_ep.engine.batch import ScheduledBatch
from moe_ep.engine.request import EngineRequest, Request, SampledToken, TokenLogprobs

VOCAB = 11


def next_token(prefix: list[int | None]) -> int:
    return hash(tuple(prefix)) % VOCAB


def prompt_entry(prefix: list[int | None], token_id: int) -> TokenLogprobs:
    """Something that depends on all tokens before the one it is about."""
    return TokenLogprobs(token_id, float(hash(tuple(prefix))), 1)


class FakeModel:
    """Writes tokens into blocks and reads them back through the block table."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._cache: list[int | None] = [None] * (num_blocks * block_size)

    def run(self, batch: ScheduledBatch) -> dict[str, SampledToken]:
        sampled: dict[str, SampledToken] = {}
        for request in batch.decodes:
            self._write(request, request.num_computed_tokens, 1)
        for chunk in batch.prefills:
            self._write(chunk.request, chunk.start, chunk.length)
        for chunk in batch.prefills:
            entries = tuple(
                self._entry(chunk.request, chunk.start + row + 1)
                for row in chunk.prompt_logprob_rows
            )
            if entries:
                sampled[chunk.request.request_id] = SampledToken(None, prompt_logprobs=entries)
        for request in batch.sampling_requests:
            token_id = next_token(self._read(request, len(request.token_ids)))
            known = sampled.get(request.request_id, SampledToken(None))
            sampled[request.request_id] = SampledToken(
                token_id, prompt_logprobs=known.prompt_logprobs
            )
        return sampled

    def spoil(self, request: Request) -> None:
        """Nothing that lies in the request's blocks is right any more."""
        for position in range(len(request.block_table) * self._block_size):
            self._cache[self._slot(request, position)] = None

    def _entry(self, request: Request, position: int) -> TokenLogprobs:
        return prompt_entry(self._read(request, position), request.token_ids[position])

    def _slot(self, request: Request, position: int) -> int:
        block = request.block_table[position // self._block_size]
        return block * self._block_size + position % self._block_size

    def _write(self, request: Request, start: int, length: int) -> None:
        for position in range(start, start + length):
            self._cache[self._slot(request, position)] = request.token_ids[position]

    def _read(self, request: Request, length: int) -> list[int | None]:
        return [self._cache[self._slot(request, position)] for position in range(length)]


def expected_output(request: EngineRequest, eos_token_id: int, max_model_len: int) -> list[int]:
    """The text of a request that has the machine to itself."""
    params, tokens = request.params, list(request.prompt_token_ids)
    output: list[int] = []
    limit = max_model_len - len(tokens)
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {eos_token_id})
    while len(output) < min(limit, params.max_tokens or limit):
        output.append(next_token([*tokens, *output]))
        if output[-1] in ends and len(output) >= params.min_tokens:
            break
    return output
