"""One mixture-of-experts layer: router, dispatch, experts, combine, plus the shared expert.

Written once, as a generator that yields after each start of communication; ``moe_ep.overlap``
drives it. Knows neither the wire nor the kernels.

Shape letters: T tokens on this rank, H hidden, S slots of this rank.
"""

from collections.abc import Callable, Generator

import torch

from moe_ep.dispatch.base import Dispatcher, Mode
from moe_ep.experts.base import Experts
from moe_ep.progress import Stage, Track
from moe_ep.router import Router


class MoELayer:
    """slot_tokens: int64 ``[S]``, tokens that each of this rank's slots has processed since the
    start.
    """

    def __init__(
        self,
        *,
        router: Router,
        dispatcher: Dispatcher,
        experts: Experts,
        shared_expert: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self.router = router
        self.dispatcher = dispatcher
        self.experts = experts
        self.shared_expert = shared_expert
        self.slot_tokens = torch.zeros(
            dispatcher.spec.num_slots_per_rank,
            dtype=torch.int64,
            device=router.slot_table.device,
        )

    def forward(
        self, x: torch.Tensor, is_padding: torch.Tensor, mode: Mode, track: Track
    ) -> Generator[None, None, torch.Tensor]:
        """Return ``[T, H]`` in the dispatcher's out dtype; yields twice. Collective.

        x: ``[T, H]``. is_padding: bool ``[T]``; such rows go to no expert, may hold NaN, and are
        unspecified in the result.
        """
        track.enter(Stage.GATE)
        topk_slots, topk_weights = self.router(x, is_padding)
        track.enter(Stage.DISPATCH_SEND)
        to_experts = self.dispatcher.dispatch(
            x=x, topk_slots=topk_slots, topk_weights=topk_weights, mode=mode
        )
        yield
        shared = self._shared(x, track)
        track.enter(Stage.DISPATCH_WAIT)
        dispatched = to_experts.wait()
        track.enter(Stage.EXPERTS)
        self.slot_tokens += dispatched.layout.counts
        y = self.experts(dispatched)
        track.enter(Stage.COMBINE_SEND)
        to_source = self.dispatcher.combine(y=y, dispatched=dispatched)
        yield
        track.enter(Stage.COMBINE_WAIT)
        out = to_source.wait()
        track.enter(Stage.NORMS)
        return out if shared is None else out + shared

    def _shared(self, x: torch.Tensor, track: Track) -> torch.Tensor | None:
        if self.shared_expert is None:
            return None
        track.enter(Stage.SHARED_EXPERT)
        return self.shared_expert(x)
