"""Messages between ranks, left in the group's store: a send waits for no one, as over RDMA.

A gloo send must be kept, and waited for, by a sender that may have gone on or left.

Every message says which call it belongs to and with which sizes; a receiver whose own call differs
refuses it. So a rank that passes other sizes, or makes its calls in another order, is found.
"""

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.emulators.deep_ep.checks import DeviceTrapError

Part = dict[str, torch.Tensor]
_num_channels = 0  # of this process; ranks agree on the largest


@dataclass(frozen=True)
class Ticket:
    """One collective call of this rank. number: among those of its channel. own: to itself."""

    call: str
    common: dict[str, Any]
    number: int
    own: Part


def agree(group: dist.ProcessGroup, what: str, value: Any) -> None:
    """All ranks pass the same value; collective."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group)
    if any(other != value for other in values):
        raise DeviceTrapError(f"{what} differs between ranks: {values}")


class Channel:
    """The messages of one buffer. Construction is collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        global _num_channels
        counts: list[Any] = [None] * group.size()
        dist.all_gather_object(counts, _num_channels, group)
        _num_channels = max(counts) + 1
        self._rank, self._num_ranks = group.rank(), group.size()
        self._store = dist.PrefixStore(f"deep_ep {_num_channels}", _store_of(group))
        self._num_calls = 0

    def post(self, call: str, common: dict[str, Any], parts: Iterable[Part]) -> Ticket:
        """Send one part to each rank, in rank order."""
        self._num_calls += 1
        own: Part = {}
        for peer, part in enumerate(parts):
            if peer == self._rank:
                own = {name: tensor.clone() for name, tensor in part.items()}
                continue
            body = pickle.dumps((call, common, {n: _encode(t) for n, t in part.items()}))
            self._store.set(_key(self._num_calls, self._rank, peer), body)  # type: ignore[arg-type]
        return Ticket(call, common, self._num_calls, own)

    def collect(self, ticket: Ticket) -> list[Part]:
        """What each rank sent to this one in the same call; waits for all of them."""
        return [
            ticket.own if peer == self._rank else self._receive(ticket, peer)
            for peer in range(self._num_ranks)
        ]

    def barrier(self, call: str, common: dict[str, Any]) -> None:
        self.collect(self.post(call, common, [{} for _ in range(self._num_ranks)]))

    def _receive(self, ticket: Ticket, peer: int) -> Part:
        key = _key(ticket.number, peer, self._rank)
        call, common, part = pickle.loads(self._store.get(key))
        self._store.delete_key(key)
        if (call, common) != (ticket.call, ticket.common):
            raise DeviceTrapError(
                f"rank {peer} calls {call} with {common}, "
                f"rank {self._rank} calls {ticket.call} with {ticket.common}"
            )
        return {name: _decode(*encoded) for name, encoded in part.items()}


def _store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store that the group was made from."""
    return dist.distributed_c10d._world.pg_map[group][1]


def _key(number: int, source: int, target: int) -> str:
    return f"{number} {source} {target}"


def _encode(tensor: torch.Tensor) -> tuple[bytes, torch.dtype, tuple[int, ...]]:
    flat = tensor.contiguous().flatten().view(torch.uint8)
    return flat.numpy().tobytes(), tensor.dtype, tuple(tensor.shape)


def _decode(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)
