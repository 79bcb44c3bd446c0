"""Which rank gets the next request: the one that holds the least KV.

Pure bookkeeping of what this front end has sent: a request weighs its prompt plus the tokens that
have come back so far, whether it is running or still queued on its rank. Tokens and not requests
are counted, because in decode a rank's step time follows the latents it has to read.
"""


class Balancer:
    """Loads of ``num_ranks`` ranks; deterministic, ties go to the lowest rank."""

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks: {num_ranks} given; at least 1 is needed")
        self._loads = [0] * num_ranks
        self._requests: dict[str, tuple[int, int]] = {}  # request_id -> (rank, tokens)

    @property
    def loads(self) -> tuple[int, ...]:
        """Tokens held or queued, per rank."""
        return tuple(self._loads)

    def assign(self, request_id: str, num_tokens: int) -> int:
        """Give the request to the least loaded rank and count its ``num_tokens`` there."""
        if request_id in self._requests:
            raise ValueError(f"request_id: {request_id!r} is already open")
        rank = min(range(len(self._loads)), key=self._loads.__getitem__)
        self._requests[request_id] = (rank, num_tokens)
        self._loads[rank] += num_tokens
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
