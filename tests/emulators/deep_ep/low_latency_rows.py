"""Rows of the V1 low-latency calls: quantised, received in the masked layout, and summed.

Shape letters: R ranks, M = R * n rows for each expert, H hidden.
"""

import random

import torch

from tests.emulators.deep_ep.checks import device_assert, put, take
from tests.emulators.deep_ep.exchange import Part
from tests.emulators.unwritten import FP8, unwritten

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
FP8_MAX = 448.0


def quantize_in_kernel(
    x: torch.Tensor, *, round_scale: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 ``[N, H]`` to e4m3 and float32 scales ``[N, H / 128]``, multiplying as the kernel does:
    the last bit may differ from a division by the scale, unless that is rounded up to a power of
    two."""
    blocks = x.float().unflatten(1, (-1, 128))
    amax = blocks.abs().amax(dim=2).clamp_min(1e-4)
    scale, inverse = amax * torch.tensor(1 / FP8_MAX), FP8_MAX / amax
    if round_scale:
        exponent = torch.frexp(scale).exponent - (torch.frexp(scale).mantissa == 0.5).int()
        scale, inverse = torch.exp2(exponent.float()), torch.exp2(-exponent.float())
    return (blocks * inverse.unsqueeze(2)).to(FP8).flatten(1), scale


def as_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """float32 powers of two ``[N, H / 128]`` to int32 ``[N, H / 512]``, first block lowest."""
    exponents = torch.frexp(scales).exponent.int() + 126
    shifted = exponents.unflatten(1, (-1, 4)) << torch.arange(0, 32, 8, dtype=I32)
    return shifted.sum(2, dtype=torch.int64).to(I32)


class DispatchOut:
    def __init__(
        self,
        num_local: int,
        num_ranks: int,
        sizes: tuple[int, int, int],
        *,
        use_fp8: bool,
        use_ue8m0: bool,
    ) -> None:
        num_max_tokens, hidden, _ = sizes
        num_rows = num_ranks * num_max_tokens
        self.x = unwritten((num_local, num_rows, hidden), FP8 if use_fp8 else BF16)
        self.scales = None
        if use_fp8:
            shape = (num_local, hidden // (512 if use_ue8m0 else 128), num_rows)
            self.scales = unwritten(shape, I32 if use_ue8m0 else F32).transpose(1, 2)
        self.count = unwritten((num_local,), I32)
        self.src_info = unwritten((num_local, num_rows), I32)
        self.layout_range = unwritten((num_local, num_ranks), torch.int64)
        self.poisoned = [t for t in (self.x, self.scales, self.count) if t is not None]

    def fill(self, sources: list[Part], order: random.Random) -> None:
        for expert in range(len(self.count)):
            start = 0
            for source in order.sample(range(len(sources)), len(sources)):
                part = sources[source]
                chosen = (part["expert"] == expert).nonzero().flatten()
                rows = slice(start, start + len(chosen))
                put(self.x[expert], rows, take(part["x"], chosen))
                if self.scales is not None:
                    self.scales[expert, rows] = part["scales"][chosen]
                self.src_info[expert, rows] = part["token"][chosen].to(I32)
                self.layout_range[expert, source] = start << 32 | len(chosen)
                start = rows.stop
            self.count[expert] = start


def returned_rows(
    x: torch.Tensor, src_info: torch.Tensor, layout_range: torch.Tensor, source: int
) -> Part:
    """The outputs for tokens of one source rank."""
    pieces = []
    for expert, packed in enumerate(layout_range[:, source].tolist()):
        start, count = packed >> 32, packed & 0xFFFFFFFF
        rows = slice(start, start + count)
        experts = torch.full((count,), expert)
        pieces.append((x[expert, rows], src_info[expert, rows].long(), experts))
    rows_of, tokens, experts_of = zip(*pieces, strict=True)
    return {"x": torch.cat(rows_of), "token": torch.cat(tokens), "expert": torch.cat(experts_of)}


def reduce(
    combined: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    sources: list[Part],
    num_local: int,
) -> None:
    """Sum of weight times output over the choices, in float32 in order of k; -1 is skipped."""
    place: dict[tuple[int, int], torch.Tensor] = {}
    for source, part in enumerate(sources):
        experts = (part["expert"] + source * num_local).tolist()
        for row, key in enumerate(zip(part["token"].tolist(), experts, strict=True)):
            place[key] = part["x"][row]
    for token, experts in enumerate(topk_idx.tolist()):
        total = torch.zeros(combined.shape[1])
        for k, expert in enumerate(experts):
            if expert >= 0:
                device_assert((token, expert) in place, "an output that is waited for never comes")
                total += topk_weights[token, k] * place[token, expert].float()
        combined[token] = total.to(BF16)
