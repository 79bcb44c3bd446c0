"""Would re-placing experts help? A replay in plain words, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from eplb.replay import BALANCED, NONE, ORACLE, OURS, PolicyReplay

WORTH = 0.05  # share of the slowest ranks' tokens; below it nobody would notice
EVEN = 0.95  # balancedness above which ranks count as balanced


@dataclass(frozen=True)
class Verdict:
    """flags: what to start the engine with; empty where nothing helps."""

    helps: bool
    reason: str
    flags: str = ""

    def __str__(self) -> str:
        return f"It {'would help' if self.helps else 'would not help'}, because {self.reason}"


def judge(policies: Sequence[PolicyReplay], num_redundant: int) -> Verdict:
    """policies: what ``replay`` gives."""
    found = {policy.name: policy for policy in policies}
    none, ours, balanced, oracle = (found[name] for name in (NONE, OURS, BALANCED, ORACLE))
    possible = oracle.saved(none)
    best = balanced if balanced.saved(none) > ours.saved(none) + WORTH / 2 else ours
    saved, even = best.saved(none), float(none.balancedness.mean())
    if not none.work:
        return Verdict(False, "no tokens were recorded in the windows that are judged.")
    if saved >= WORTH:
        reason = (
            f"the slowest ranks would compute {saved:.0%} fewer expert tokens: balancedness"
            f" {float(best.balancedness.mean()):.2f} instead of {even:.2f}"
            f" ({possible:.0%} fewer if the future were known)."
        )
        flags = f"--enable-eplb --ep-num-redundant-experts {num_redundant}"
        return Verdict(True, reason, flags + " --ep-dispatch-algorithm balanced" * (best != ours))
    if possible >= WORTH:
        return Verdict(
            False,
            "loads change too much from one window to the next: a placement that knew them would"
            f" take {possible:.0%} off the slowest ranks, one from the window before"
            f" {_share(saved)}. Longer windows have less chance in them, shorter ones are fresher.",
        )
    if even >= EVEN:
        return Verdict(
            False,
            f"ranks are balanced as they are: balancedness {even:.2f}, and the best placement"
            f" would take {_share(possible)} off the slowest ranks.",
        )
    return Verdict(
        False,
        f"{num_redundant} redundant experts leave no room for a better placement: balancedness is"
        f" {even:.2f}, and one that knew the loads would take {_share(possible)} off the slowest"
        " ranks. Try more.",
    )


def _share(share: float) -> str:
    return f"{share:.1%}" if share > 0 else "nothing"
