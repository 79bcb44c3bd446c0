"""What a rank tells of its re-placements: plain data for metrics, health and logs."""

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    COLLECTING = "collecting"
    COMPUTING = "computing"
    MOVING = "moving"
    OFF = "off"  # for good: the ranks' helpers cannot reach each other, or have no algorithm


@dataclass(frozen=True)
class EplbStatus:
    """One rank's account since the start of the engine; equal on all ranks but for bytes, stalls,
    errors and alarms.

    num_rebalances: re-placements with at least one layer switched. num_skipped: windows after which
    nothing moved. num_failures: re-placements given up, in part or whole. age_s: since the last
    one ended. layers_pending: still to be switched. bytes_moved: received by this rank.
    longest_stall_s: most that the loop was held up before one step.

    balancedness: mean over maximum of the ranks' tokens, per MoE layer, in the last window.
    balancedness_expected: what the placement computed from it makes of the same loads.
    saved_estimated: share of the slowest ranks' expert tokens that falls away by it, under those
    loads.

    The others are about the last re-placement whose effect is known, by the window before it and
    the one after it: balancedness in both; saved_measured: share of the slowest ranks' expert
    tokens that it takes off under the loads after it; step_s: median seconds from step to step.

    alarm: why experts are not moving though they should; None when all is well. last_error: what
    went wrong last, also when it was overcome.
    """

    phase: Phase = Phase.COLLECTING
    num_rebalances: int = 0
    num_skipped: int = 0
    num_failures: int = 0
    age_s: float | None = None
    layers_pending: int = 0
    bytes_moved: int = 0
    longest_stall_s: float = 0.0
    balancedness: tuple[float, ...] = ()
    balancedness_expected: tuple[float, ...] = ()
    saved_estimated: float | None = None
    balancedness_before: tuple[float, ...] = ()
    balancedness_after: tuple[float, ...] = ()
    saved_measured: float | None = None
    step_s_before: float | None = None
    step_s_after: float | None = None
    alarm: str | None = None
    last_error: str | None = None
