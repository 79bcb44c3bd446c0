"""One mixture-of-experts layer: gate, dispatch, experts, combine, plus the shared expert.

Written once, as a generator that yields after each start of communication; ``moe_ep.overlap``
drives it. Knows neither the wire nor the kernels.

Shape letters: T tokens on this rank, H hidden, K choices per token, E logical experts, S slots of
this rank.
"""

from collections.abc import Callable, Generator

import torch

from moe_ep.dispatch.base import Dispatcher, Mode
from moe_ep.experts.base import Experts
from moe_ep.gate import Gate
from moe_ep.progress import Progress


class MoELayer:
    """slot_table: int64 ``[E]``, the slot to which this rank sends tokens of each expert
    (``Placement.slot_table``); may be replaced between steps.

    slot_tokens: int64 ``[S]``, tokens that each of this rank's slots has processed since the start.
    """

    def __init__(
        self,
        *,
        gate: Gate,
        dispatcher: Dispatcher,
        experts: Experts,
        shared_expert: Callable[[torch.Tensor], torch.Tensor] | None,
        slot_table: torch.Tensor,
        progress: Progress,
    ) -> None:
        self.gate = gate
        self.dispatcher = dispatcher
        self.experts = experts
        self.shared_expert = shared_expert
        self.slot_table = slot_table
        self.progress = progress
        self.slot_tokens = torch.zeros(
            dispatcher.spec.num_slots_per_rank, dtype=torch.int64, device=slot_table.device
        )

    def forward(
        self, x: torch.Tensor, num_tokens: int, mode: Mode
    ) -> Generator[None, None, torch.Tensor]:
        """Return ``[T, H]`` in the dispatcher's out dtype; yields twice. Collective.

        x: ``[T, H]``. Rows from ``num_tokens`` on are padding: they go to no expert, may hold NaN,
        and are unspecified in the result.
        """
        layer = self.progress.layer  # another micro-batch may move it while this one waits
        self.progress.stage = "dispatch"
        topk_slots, topk_weights = self._route(x, num_tokens)
        to_experts = self.dispatcher.dispatch(
            x=x, topk_slots=topk_slots, topk_weights=topk_weights, mode=mode
        )
        yield
        shared = None if self.shared_expert is None else self.shared_expert(x)
        self._stand_at(layer, "wait for dispatch")
        dispatched = to_experts.wait()
        self._stand_at(layer, "experts")
        self.slot_tokens += dispatched.layout.counts
        y = self.experts(dispatched)
        self._stand_at(layer, "combine")
        to_source = self.dispatcher.combine(y=y, dispatched=dispatched)
        yield
        self._stand_at(layer, "wait for combine")
        out = to_source.wait()
        return out if shared is None else out + shared

    def _route(self, x: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Physical slots ``[T, K]``, -1 for padding rows, and their weights."""
        topk_idx, topk_weights = self.gate(x)
        topk_slots = self.slot_table.take(topk_idx)
        topk_slots[num_tokens:] = -1
        return topk_slots, topk_weights

    def _stand_at(self, layer: int | None, stage: str) -> None:
        self.progress.layer, self.progress.stage = layer, stage
