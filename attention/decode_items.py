"""How the decodes of a step are cut into items for kernels, and the tensors that tell them.

An item is a range of cache positions of one request. How a request is cut depends on its own length
alone, so that its result does not depend on its batch mates. Everything travels to the device in
one copy.

Shape letters: B requests, I items.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch

from attention.base import BLOCK_SIZE, AttentionBatch

ITEM_ROWS = 512  # cache positions of an item of a short request
MAX_ITEMS = 32  # of one request: partial results must stay small beside the latents read


@dataclass(frozen=True)
class DecodeItems:
    """All int32, on the device.

    Per item ``[I]``: its request, and its cache positions ``start`` to ``stop``; an item without
    positions is padding. Per request: its first item and its first block (``[B + 1]`` and ``[B]``,
    the latter into ``blocks``, all block tables one after the other), its first token, new tokens,
    and tokens cached before (``[B]``). max_query_len: new tokens of any request, at most.
    """

    item_request: torch.Tensor
    item_start: torch.Tensor
    item_stop: torch.Tensor
    first_item: torch.Tensor
    first_block: torch.Tensor
    blocks: torch.Tensor
    first_token: torch.Tensor
    query_lens: torch.Tensor
    context_lens: torch.Tensor
    max_query_len: int

    @property
    def num_requests(self) -> int:
        return len(self.query_lens)

    @property
    def is_split(self) -> bool:
        """Whether some request is more than one item."""
        return len(self.item_request) > self.num_requests


class StaticItems:
    """Items of up to B requests with one new token each, at addresses that stay.

    There is room for as many items as requests can be cut into that hold ``num_blocks`` cache
    blocks together and ``max_blocks`` each; those that a step does not need are padding.
    """

    def __init__(
        self, *, num_requests: int, max_blocks: int, num_blocks: int, device: torch.device
    ) -> None:
        per_request = min(MAX_ITEMS, -(-max_blocks * BLOCK_SIZE // ITEM_ROWS))
        together = num_requests + num_blocks * BLOCK_SIZE // ITEM_ROWS
        num_items = min(num_requests * per_request, together)
        self._sizes = {
            "item_request": num_items,
            "item_start": num_items,
            "item_stop": num_items,
            "first_item": num_requests + 1,
            "first_block": num_requests,
            "first_token": num_requests,
            "query_lens": num_requests,
            "context_lens": num_requests,
            "blocks": max(num_blocks, num_requests),
        }
        sizes = list(self._sizes.values())
        self._packed = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        tensors = dict(zip(self._sizes, self._packed.split(sizes), strict=True))
        self.items = DecodeItems(**tensors, max_query_len=1)

    def update(self, batch: AttentionBatch) -> None:
        """Take over the decodes of the batch; one copy, of what a step of this size needs."""
        columns = _columns(batch)
        values: list[int] = []
        for name, size in self._sizes.items():
            column = columns[name]
            assert len(column) <= size, f"{name}: {len(column)} values, room for {size}"
            # Of a request of padding, the first item is the one after the last: it has none.
            filler = column[-1] if name == "first_item" else 0
            values += column if name == "blocks" else column + [filler] * (size - len(column))
        self._packed[: len(values)].copy_(torch.tensor(values, dtype=torch.int32))


def plan_items(batch: AttentionBatch, device: torch.device) -> DecodeItems:
    """Cut the first ``num_decodes`` requests of the batch into items."""
    columns = _columns(batch)
    packed = torch.tensor(
        [value for column in columns.values() for value in column], dtype=torch.int32
    )
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    tensors = packed.split([len(column) for column in columns.values()])
    max_query_len = max(columns["query_lens"])
    return DecodeItems(**dict(zip(columns, tensors, strict=True)), max_query_len=max_query_len)


def _columns(batch: AttentionBatch) -> dict[str, list[int]]:
    """The tensors of ``DecodeItems``, as lists, by name."""
    num = batch.num_decodes
    query_lens, context_lens = batch.query_lens[:num], batch.context_lens[:num]
    tables = batch.block_tables[:num]
    ranges = [cut(c + q) for c, q in zip(context_lens, query_lens, strict=True)]
    items = [(request, *item) for request, part in enumerate(ranges) for item in part]
    return {
        "item_request": [request for request, _, _ in items],
        "item_start": [start for _, start, _ in items],
        "item_stop": [stop for _, _, stop in items],
        "first_item": _starts(map(len, ranges)),
        "first_block": _starts(map(len, tables))[:-1],
        "blocks": [block for table in tables for block in table],
        "first_token": _starts(query_lens)[:-1],
        "query_lens": query_lens,
        "context_lens": context_lens,
    }


def cut(length: int) -> list[tuple[int, int]]:
    """Ranges that cover ``length`` cache positions, each but the last of whole pages."""
    num_items = min(MAX_ITEMS, -(-length // ITEM_ROWS))
    step = -(-length // (num_items * BLOCK_SIZE)) * BLOCK_SIZE
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def _starts(lengths: Iterable[int]) -> list[int]:
    """Where pieces of these lengths start, and where the last one ends."""
    return [0, *accumulate(lengths)]
