"""Messages between ranks over point-to-point gloo: a send waits for no one.

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
TAGS_PER_CHANNEL = 1 << 16
MAX_CHANNELS = 1 << 12
_num_channels = 0
# Sends and their data. Kept here, as one that is dropped before its receiver has come is lost.
_under_way: list[tuple[Any, torch.Tensor]] = []


@dataclass(frozen=True)
class Ticket:
    """One collective call of this rank. own: what it sends to itself."""

    call: str
    common: dict[str, Any]
    tag: int
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
        self._group = group
        self._tag = (_num_channels % MAX_CHANNELS) * TAGS_PER_CHANNEL
        self._last_tag = self._tag + TAGS_PER_CHANNEL

    def post(self, call: str, common: dict[str, Any], parts: Iterable[Part]) -> Ticket:
        """Send one part to each rank, in rank order."""
        self._tag += 2
        assert self._tag < self._last_tag, "more calls than this stand-in has tags for"
        _under_way[:] = [(work, data) for work, data in _under_way if not work.is_completed()]
        own: Part = {}
        for peer, part in enumerate(parts):
            if peer == self._group.rank():
                own = {name: tensor.clone() for name, tensor in part.items()}
                continue
            body = pickle.dumps((call, common, {n: _encode(t) for n, t in part.items()}))
            self._send(torch.tensor([len(body)]), peer, self._tag)
            self._send(torch.frombuffer(bytearray(body), dtype=torch.uint8), peer, self._tag + 1)
        return Ticket(call, common, self._tag, own)

    def collect(self, ticket: Ticket) -> list[Part]:
        """What each rank sent to this one in the same call; waits for all of them."""
        return [
            ticket.own if peer == self._group.rank() else self._receive(ticket, peer)
            for peer in range(self._group.size())
        ]

    def barrier(self, call: str, common: dict[str, Any]) -> None:
        self.collect(self.post(call, common, [{} for _ in range(self._group.size())]))
        for work, _ in _under_way[-2 * (self._group.size() - 1) :]:
            work.wait()  # this rank may be about to leave the group

    def _send(self, data: torch.Tensor, peer: int, tag: int) -> None:
        _under_way.append((self._group.send([data], peer, tag), data))

    def _receive(self, ticket: Ticket, peer: int) -> Part:
        size = torch.empty(1, dtype=torch.int64)
        self._group.recv([size], peer, ticket.tag).wait()
        body = torch.empty(int(size), dtype=torch.uint8)
        self._group.recv([body], peer, ticket.tag + 1).wait()
        call, common, part = pickle.loads(body.numpy().tobytes())
        if (call, common) != (ticket.call, ticket.common):
            raise DeviceTrapError(
                f"rank {peer} calls {call} with {common}, "
                f"rank {self._group.rank()} calls {ticket.call} with {ticket.common}"
            )
        return {name: _decode(*encoded) for name, encoded in part.items()}


def _encode(tensor: torch.Tensor) -> tuple[bytes, torch.dtype, tuple[int, ...]]:
    flat = tensor.contiguous().flatten().view(torch.uint8)
    return flat.numpy().tobytes(), tensor.dtype, tuple(tensor.shape)


def _decode(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)
