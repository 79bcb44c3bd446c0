"""A link that is slow without using the CPU: the exchange of another dispatcher, held back."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe_ep.dispatch import Dispatched, Dispatcher, DispatchSpec, Mode, Pending
from moe_ep.dispatch.base import T
from moe_ep.dispatch.collective import CollectiveDispatcher


@dataclass(frozen=True)
class _Held(Pending[T]):
    inner: Pending[T]
    arrives_at: float

    def wait(self) -> T:
        time.sleep(max(0.0, self.arrives_at - time.perf_counter()))
        return self.inner.wait()


class SlowLink(Dispatcher):
    """A dispatcher whose messages take a time per byte, one after another, and no CPU time."""

    def __init__(self, inner: Dispatcher) -> None:
        assert isinstance(inner, CollectiveDispatcher)
        self.inner = inner
        self.spec = inner.spec
        self.seconds_per_byte = 0.0
        self._free_at = 0.0

    @classmethod
    def supports(cls, spec: DispatchSpec) -> str | None:
        return CollectiveDispatcher.supports(spec)

    @property
    def sent_bytes(self) -> int:
        traffic = self.inner.traffic
        return traffic.count_bytes + traffic.dispatch_bytes + traffic.combine_bytes

    def dispatch(
        self, *, x: torch.Tensor, topk_slots: torch.Tensor, topk_weights: torch.Tensor, mode: Mode
    ) -> Pending[Dispatched]:
        return self._hold(
            lambda: self.inner.dispatch(
                x=x, topk_slots=topk_slots, topk_weights=topk_weights, mode=mode
            )
        )

    def combine(self, *, y: torch.Tensor, dispatched: Dispatched) -> Pending[torch.Tensor]:
        return self._hold(lambda: self.inner.combine(y=y, dispatched=dispatched))

    def destroy(self) -> None:
        self.inner.destroy()

    def _hold(self, start: Callable[[], Pending[T]]) -> Pending[T]:
        before = self.sent_bytes
        pending = start()
        seconds = (self.sent_bytes - before) * self.seconds_per_byte
        self._free_at = max(self._free_at, time.perf_counter()) + seconds
        return _Held(pending, self._free_at)
