"""Rows of V1 normal mode: one for each (token, rank). Shape letters: T tokens, R ranks."""

import random

import torch

from tests.emulators.deep_ep.checks import check_tensor, host_assert, put, take
from tests.emulators.deep_ep.config import topk_idx_t
from tests.emulators.deep_ep.exchange import Part
from tests.emulators.unwritten import FP8, unwritten

I32 = torch.int32


class ReceivedRows:
    """The rows of all sources in rank order; the outputs are filled by ``publish``."""

    def __init__(self, sources: list[Part], num_local: int, rank: int) -> None:
        self._data = {
            name: torch.cat([_bytes_if_fp8(part[name]) for part in sources]) for name in sources[0]
        }
        topk_idx = self._data["topk_idx"] - rank * num_local
        is_local = (topk_idx >= 0) & (topk_idx < num_local)
        self._data["topk_idx"] = topk_idx.masked_fill(~is_local, -1)
        self._data["topk_weights"] = self._data["topk_weights"].masked_fill(~is_local, 0.0)
        self.src_idx = self._data.pop("src_idx")
        self.source_counts = [len(part["x"]) for part in sources]
        self.expert_counts = torch.bincount(topk_idx[is_local], minlength=num_local)
        dtypes = {name: part.dtype for name, part in sources[0].items()}
        self.out = {
            name: unwritten(tuple(data.shape), dtypes[name]) for name, data in self._data.items()
        }

    def publish(self) -> None:
        for name, data in self._data.items():
            put(self.out[name], slice(None), data.view(self.out[name].dtype))


def _bytes_if_fp8(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def check_rows(
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
) -> int:
    """The inputs of dispatch; returns the bytes that a token takes in the queues."""
    num_tokens, num_topk = topk_idx.shape
    check_tensor("x", rows, [torch.bfloat16] if scales is None else [FP8], (num_tokens, None))
    check_tensor("topk_idx", topk_idx, [topk_idx_t], (None, None))
    check_tensor("topk_weights", topk_weights, [torch.float32], (num_tokens, num_topk))
    host_assert(num_topk <= 32, "one lane for each choice")
    row_bytes = rows.shape[1] * rows.element_size()
    host_assert(row_bytes % 16 == 0, "row bytes % 16")
    num_scales = 0
    if scales is not None:
        # Stricter than the library, which copies whatever it is given: four exponents to an int32.
        num_scales = rows.shape[1] // (512 if scales.dtype == I32 else 128)
        dtypes = [torch.float32, I32]
        check_tensor("scales", scales, dtypes, (num_tokens, num_scales), is_contiguous=False)
    return row_bytes + 4 + num_topk * 12 + num_scales * 4


def sent_rows(inputs: Part, is_sent: torch.Tensor, order: random.Random) -> Part:
    """What one rank is sent of the inputs: the tokens in any order, and their indices."""
    tokens = is_sent.nonzero().flatten().tolist()
    order.shuffle(tokens)
    index = torch.tensor(tokens, dtype=torch.int64)
    part = {name: take(tensor, index) for name, tensor in inputs.items()}
    return {**part, "src_idx": index.to(I32)}


def dispatch_layout(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens per rank and per expert, and ``[T, R]`` whether a token goes to a rank."""
    is_chosen = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.bool)
    is_chosen.scatter_(1, topk_idx.where(topk_idx >= 0, num_experts), True)
    is_chosen = is_chosen[:, :num_experts]
    is_in_rank = is_chosen.unflatten(1, (num_ranks, -1)).any(dim=2)
    return is_in_rank.sum(0).to(I32), is_chosen.sum(0).to(I32), is_in_rank
