"""From hidden states to the slots that will serve them: the gate, then the placement.

On a GPU two kernels follow the gate's product, with the same choices; elsewhere the gate does it.

Shape letters: T tokens on this rank, H hidden, K choices per token, E logical experts.
"""

import torch

from moe_ep import kernels
from moe_ep.gate import Gate


class Router:
    """slot_table: int64 ``[E, W]``, the slot to which this rank sends its token number t that chose
    expert e, ``[e, t % W]`` (``eplb.dispatch``). It may change between steps, in place: a captured
    step holds its address.
    """

    def __init__(self, gate: Gate, slot_table: torch.Tensor) -> None:
        self.gate = gate
        self.slot_table = slot_table

    def __call__(
        self, x: torch.Tensor, is_padding: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route ``x [T, H]`` to topk_slots int64 and topk_weights float32, ``[T, K]``.

        is_padding: bool ``[T]``, on the device, so that a captured step serves any number of
        tokens. Padding rows may hold NaN; their slots are -1 and their weights unspecified.
        """
        if kernels.are_used(x.device):
            return self._by_kernels(x, is_padding)
        topk_idx, topk_weights = self.gate(x)
        num_ways = self.slot_table.shape[1]
        way = torch.arange(len(topk_idx), device=topk_idx.device).remainder_(num_ways)
        topk_slots = self.slot_table.take(topk_idx * num_ways + way.unsqueeze(1))
        return topk_slots.masked_fill_(is_padding.unsqueeze(1), -1), topk_weights

    def _by_kernels(
        self, x: torch.Tensor, is_padding: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from moe_ep.kernels.routing import map_to_slots, route

        topk_idx, topk_weights = route(self.gate.logits(x), self.gate)
        topk_slots = map_to_slots(
            topk_idx, self.slot_table, is_padding=is_padding, expert_tokens=None
        )
        return topk_slots, topk_weights
