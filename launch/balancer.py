"""Which rank gets the next request: the one that then has least to hold and to compute.

Pure bookkeeping of what this front end has sent. A request weighs its prompt plus the tokens that
have come back so far, whether it is running or still queued on its rank. Tokens and not requests
are counted, because in decode a rank's step time follows the latents it has to read. A rank that
was sent a prompt with the same beginning may still know it: each such token, which need not be
computed, outweighs one that is held. So a conversation stays where it is, and a prompt that
everybody shares is soon known to all ranks.
"""

from collections import OrderedDict
from collections.abc import Sequence

from moe_ep.engine.prefix import Name

MOST_NAMES = 2**18  # some 50 MB; 16 million tokens of prompts in blocks of 64


class Balancer:
    """Loads of ``num_ranks`` ranks; deterministic, ties go to the lowest rank.

    block_size: tokens of a cache block. num_blocks: of all ranks' caches; as many names are
    remembered, up to MOST_NAMES, and the longest unused go first.
    """

    def __init__(self, num_ranks: int, *, block_size: int, num_blocks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks: {num_ranks} given; at least 1 is needed")
        self._block_size = block_size
        self._num_names = min(num_blocks, MOST_NAMES)
        self._loads = [0] * num_ranks
        self._requests: dict[str, tuple[int, int]] = {}  # request_id -> (rank, tokens)
        # That were sent a block; the latest come last.
        self._ranks: OrderedDict[Name, tuple[int, ...]] = OrderedDict()

    @property
    def loads(self) -> tuple[int, ...]:
        """Tokens held or queued, per rank."""
        return tuple(self._loads)

    def assign(self, request_id: str, num_tokens: int, names: Sequence[Name] = ()) -> int:
        """Choose a rank for the request and count its ``num_tokens`` there.

        names: of the full blocks of its prompt; none where ranks do not keep what they know.
        """
        if request_id in self._requests:
            raise ValueError(f"request_id: {request_id!r} is already open")
        known = self._known_tokens(names)
        rank = min(range(len(self._loads)), key=lambda rank: self._loads[rank] - known[rank])
        self._requests[request_id] = (rank, num_tokens)
        self._loads[rank] += num_tokens
        self._remember(names, rank)
        return rank

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Count ``num_tokens`` more for an open request."""
        rank, held = self._requests[request_id]
        self._requests[request_id] = (rank, held + num_tokens)
        self._loads[rank] += num_tokens

    def finish(self, request_id: str) -> None:
        """Forget a request and the tokens it held."""
        rank, held = self._requests.pop(request_id)
        self._loads[rank] -= held

    def _known_tokens(self, names: Sequence[Name]) -> list[int]:
        """Per rank, how much of the beginning it was sent before."""
        known = [0] * len(self._loads)
        for number, name in enumerate(names, start=1):
            ranks = self._ranks.get(name)
            if ranks is None:
                break
            for rank in ranks:
                known[rank] = number * self._block_size
        return known

    def _remember(self, names: Sequence[Name], rank: int) -> None:
        for name in reversed(names):  # without the first block none is found: it goes last
            ranks = self._ranks.pop(name, ())
            self._ranks[name] = ranks if rank in ranks else (*ranks, rank)
        while len(self._ranks) > self._num_names:
            self._ranks.popitem(last=False)
