"""The dispatcher contract: how tokens reach their experts and come back.

Shape letters: T tokens on this rank, K choices per token, R ranks, S slots per rank, C capacity
(rows) per slot, H hidden, M rows received in the contiguous layout.

A dispatcher knows no weights, no router and no model. What ``dispatch`` returns is all that
``combine`` needs, so that dispatch, expert compute and combine are siblings in the layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.nn.functional as F

from moe_ep.config.exchange import NUM_SMS, Mode
from moe_ep.fp8 import ScaleFormat

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class Part(StrEnum):
    """Parts of an exchange that only the backend can tell apart, for whoever times them."""

    COUNTS = "dispatch counts"  # dispatch waits to learn what peers will send
    LAYOUT = "dispatch layout"  # what has arrived is laid out by slot
    SUMS = "combine sums"  # what has come back is added up


@dataclass(frozen=True)
class DispatchSpec:
    """Sizes that every rank agrees on before the first exchange.

    payload_dtype: dtype of the rows on the way out: ``float8_e4m3fn`` (with 1x128 scales),
        ``bfloat16`` or ``float32``.
    out_dtype: dtype of expert outputs and of the combined result: ``bfloat16`` or ``float32``.
    max_tokens_per_rank: most tokens one rank may bring to a normal-mode step.
    capacity: most tokens one rank may bring to a low-latency step; a slot then holds up to
        ``num_ranks * capacity`` rows.
    row_alignment: first row of every slot in the contiguous layout is a multiple of this, and so
        is C in the masked one.
    scale_format: of FP8 rows, as the experts want them. A backend that cannot send UE8M0 sends
        float32 scales as ever, which the experts then round up.
    num_sms: SMs that the exchange kernels may take, where a library asks; even. Experts and
        attention have the rest. The default is DeepEP's own.
    modes: those that steps will use. A backend need not be able to serve, nor have buffers for, any
        other; it may refuse one that comes all the same.
    """

    hidden: int
    num_topk: int
    num_ranks: int
    num_slots_per_rank: int
    max_tokens_per_rank: int
    capacity: int
    payload_dtype: torch.dtype
    out_dtype: torch.dtype
    row_alignment: int = 1
    scale_format: ScaleFormat = ScaleFormat.FLOAT32
    num_sms: int = NUM_SMS
    modes: frozenset[Mode] = frozenset(Mode)

    @property
    def num_slots(self) -> int:
        return self.num_ranks * self.num_slots_per_rank


@dataclass(frozen=True)
class ContiguousLayout:
    """Rows ``[M, H]`` grouped by slot.

    ``psum`` int32 ``[S]``: end of each slot's rows, without padding; slot i starts at
    ``align(psum[i - 1], alignment)`` (0 for the first). DeepGEMM calls this the psum layout.
    """

    psum: torch.Tensor
    alignment: int

    @property
    def num_slots(self) -> int:
        return len(self.psum)

    @property
    def counts(self) -> torch.Tensor:
        """int32 ``[S]``: rows of each slot."""
        starts = -(-self.psum // self.alignment) * self.alignment
        return self.psum - F.pad(starts[:-1], (1, 0))


@dataclass(frozen=True)
class MaskedLayout:
    """Rows ``[S, C, H]``; only the first ``counts[i]`` rows of slot i are valid (int32 ``[S]``).

    C is at least ``num_ranks * capacity`` and a multiple of the spec's ``row_alignment``.
    """

    counts: torch.Tensor

    @property
    def num_slots(self) -> int:
        return len(self.counts)


@dataclass(frozen=True)
class Dispatched:
    """GEMM-ready rows of this rank's slots.

    rows: ``[M, H]`` (contiguous) or ``[S, C, H]`` (masked), in the spec's payload dtype. Rows that
        the layout does not cover hold arbitrary values, NaN included.
    scales: None unless FP8; else in the spec's ``scale_format`` or in float32, of any strides, but
        UE8M0 in columns (``moe_ep.fp8.new_columns``).
    layout: which rows belong to which slot.
    row_weights: None when combine applies the gate weights; else float32, one weight per row,
        which the experts must apply. Exactly one of the two applies them.
    handle: private to the dispatcher that made it; pass the object back to ``combine`` once.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    layout: ContiguousLayout | MaskedLayout
    row_weights: torch.Tensor | None
    handle: Any


class Pending(ABC, Generic[T]):
    """An exchange that has started. ``wait`` finishes it and may be called once."""

    @abstractmethod
    def wait(self) -> T:
        """Return the result; raises ``RuntimeError`` when a peer died or the time limit passed."""


@dataclass(frozen=True)
class Ready(Pending[T]):
    """A result that needed no waiting."""

    value: T

    def wait(self) -> T:
        return self.value


class Dispatcher(ABC):
    """One rank's end of the expert all-to-all.

    listener: told as a part begins, in the thread of the caller of dispatch or of a wait.
    """

    spec: DispatchSpec
    listener: Callable[[Part], None] | None = None

    def enter(self, part: Part) -> None:
        """For backends: tell the listener, if there is one."""
        if self.listener is not None:
            self.listener(part)

    @abstractmethod
    def __init__(self, spec: DispatchSpec, group: "ProcessGroup | None") -> None:
        """group: all ranks in rank order; stays the caller's. None where no exchange is needed.

        Raises ValueError when ``supports`` gives a reason or the group does not fit the spec.
        """

    @classmethod
    @abstractmethod
    def supports(cls, spec: DispatchSpec) -> str | None:
        """None when this backend can serve the spec, else the reason why not."""

    @classmethod
    def buffer_bytes(cls, spec: DispatchSpec) -> int:
        """Device memory that one rank's buffers take from construction on; known without them."""
        return 0

    @classmethod
    def capture_problem(cls, mode: Mode) -> str | None:
        """None when steps of this mode can be captured as a graph, else the reason why not."""
        return "the host waits for the counts of every exchange"

    def prepare(self, mode: Mode) -> None:  # noqa: B027, for most there is nothing to do
        """Make ready for a step of this mode. ``dispatch`` does so itself; who replays a captured
        step, in which it does not run, calls this first. Collective where there is something to do,
        which all ranks know alike; not to be captured."""

    @abstractmethod
    def dispatch(
        self, *, x: torch.Tensor, topk_slots: torch.Tensor, topk_weights: torch.Tensor, mode: Mode
    ) -> Pending[Dispatched]:
        """Start sending each token to the ranks that hold its slots. Collective.

        x: ``[T, H]`` BF16 or float32, unquantised; the backend quantises when the spec says FP8.
        topk_slots: int64 ``[T, K]``, global physical slots (slot p lives on rank ``p // S``);
            -1 means "no expert". A row that is all -1 is padding: never read, may hold NaN.
        topk_weights: float32 ``[T, K]``; entries of -1 slots are never read.
        Raises ValueError before any exchange when T exceeds the limit of the mode.
        """

    @abstractmethod
    def combine(self, *, y: torch.Tensor, dispatched: Dispatched) -> Pending[torch.Tensor]:
        """Start the way back of the expert outputs. Collective.

        y: expert outputs, laid out as ``dispatched.rows``, in the spec's out dtype.
        The result is ``[T, H]`` in the out dtype and the original token order: for every token the
        weighted sum over its experts, added in float32 in an order that does not depend on
        arrival. Tokens without any expert give zeros.
        """

    @abstractmethod
    def destroy(self) -> None:
        """Release buffers and groups; may be called twice."""
