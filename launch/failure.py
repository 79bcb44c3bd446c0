"""What to say when an engine is dead: the rank that is to blame, and where every rank stood.

Pure, but for recognising Ray's exceptions.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from launch.topology import TopologyRow

if TYPE_CHECKING:
    from moe_ep.engine.engine import RankStatus


class EngineDeadError(RuntimeError):
    """The engine runs no more; the message names the rank and the last state of all ranks."""


class LastWords(NamedTuple):
    """status: the last one known of the rank, None if it never gave one. error: why it gave none
    when asked just now, None if it did."""

    status: "RankStatus | None"
    error: BaseException | None


def root_cause(error: BaseException) -> str:
    """One line of text: what went wrong, without the remote traceback Ray wraps around it."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        error = cause
    if _is_dead(error):
        return "its process died"
    return str(error) or type(error).__name__


def describe_failure(
    reporter: int,
    error: BaseException,
    rows: Sequence[TopologyRow],
    words: Sequence[LastWords],
) -> str:
    """reporter: the rank whose call failed with ``error``, not always the one to blame: when a
    process dies, a peer that waits for it may be the first to complain."""
    dead = [rank for rank, word in enumerate(words) if word.error and _is_dead(word.error)]
    silent = [rank for rank, word in enumerate(words) if word.error and rank not in dead]
    lines = [f"{_name(rows[rank])} died" for rank in dead]
    lines += [f"{_name(rows[rank])} does not answer" for rank in silent]
    if reporter not in dead + silent:
        lines.append(f"{_name(rows[reporter])} reported: {root_cause(error)}")
    lines.append("last known state of all ranks:")
    lines += [f"  rank {rank}: {_state(word, rank in dead)}" for rank, word in enumerate(words)]
    return "\n".join(lines)


def _name(row: TopologyRow) -> str:
    return f"rank {row.rank} ({row.placed.host}, {row.placed.ip}, pid {row.placed.pid})"


def _state(word: LastWords, is_dead: bool) -> str:
    end = "" if word.error is None else " (dead)" if is_dead else f" ({root_cause(word.error)})"
    status = word.status
    if status is None:
        return f"nothing known{end}"
    counts = f"{status.num_running} running, {status.num_waiting} waiting"
    failure = "" if status.error is None else " (failed)"
    return f"{status.progress.describe()}, {counts}{end}{failure}"


def _is_dead(error: BaseException) -> bool:
    from ray.exceptions import RayActorError

    return isinstance(error, RayActorError)
