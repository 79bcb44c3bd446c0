"""How the decodes of a step are cut into items for kernels, and the tensors that tell them.

An item is a range of cache positions of one request. How a request is cut depends on its own length
alone, so that its result does not depend on its batch mates. Everything travels to the device in
one copy.

Shape letters: B requests, I items.
"""

from dataclasses import dataclass

import numpy as np
import torch

from attention.base import BLOCK_SIZE, AttentionBatch
from attention.block_tables import joined

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
        columns, stop = _columns(batch), 0
        num_spare = self._sizes["blocks"] - len(columns["blocks"])
        values = np.zeros(len(self._packed) - num_spare, dtype=np.int32)
        for name, size in self._sizes.items():
            column, start = columns[name], stop
            assert len(column) <= size, f"{name}: {len(column)} values, room for {size}"
            values[start : start + len(column)] = column
            stop = start + size
            if name == "first_item":  # of a request of padding, that after the last: it has none
                values[start + len(column) : stop] = column[-1]
        self._packed[: len(values)].copy_(torch.from_numpy(values))


def plan_items(batch: AttentionBatch, device: torch.device) -> DecodeItems:
    """Cut the first ``num_decodes`` requests of the batch into items."""
    columns = _columns(batch)
    packed = torch.from_numpy(np.concatenate(list(columns.values()), dtype=np.int32))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    tensors = packed.split([len(column) for column in columns.values()])
    max_query_len = int(columns["query_lens"].max())
    return DecodeItems(**dict(zip(columns, tensors, strict=True)), max_query_len=max_query_len)


def _columns(batch: AttentionBatch) -> dict[str, np.ndarray]:
    """The tensors of ``DecodeItems``, as arrays, by name."""
    num = batch.num_decodes
    query_lens = np.array(batch.query_lens[:num], dtype=np.int64)
    context_lens = np.array(batch.context_lens[:num], dtype=np.int64)
    tables = batch.block_tables[:num]
    lengths = query_lens + context_lens
    item_rows = _item_rows(lengths)
    num_items = -(-lengths // item_rows)
    first_item = _starts(num_items)
    item_request = np.arange(num).repeat(num_items)
    item_start = np.arange(len(item_request)) - first_item[item_request]
    item_start *= item_rows[item_request]
    return {
        "item_request": item_request,
        "item_start": item_start,
        "item_stop": np.minimum(item_start + item_rows[item_request], lengths[item_request]),
        "first_item": first_item,
        "first_block": _starts(np.array(list(map(len, tables)), dtype=np.int64))[:-1],
        "blocks": joined(tables),
        "first_token": _starts(query_lens)[:-1],
        "query_lens": query_lens,
        "context_lens": context_lens,
    }


def _item_rows(lengths: np.ndarray) -> np.ndarray:
    """Cache positions of each item but the last of requests of these lengths: whole pages."""
    num_items = np.minimum(-(-lengths // ITEM_ROWS), MAX_ITEMS)
    return -(-lengths // (num_items * BLOCK_SIZE)) * BLOCK_SIZE


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Where pieces of these lengths start, and where the last one ends."""
    return np.concatenate([[0], lengths.cumsum()])
