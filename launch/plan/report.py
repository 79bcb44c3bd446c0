"""The validation as a page: errors by source, every end-to-end record, and what is not compared."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from launch.plan.targets import DECODE, PREFILL, excluded
from launch.plan.validate import KINDS, Outcome, leave_one_source_out, median_error


def print_report(console: Console) -> None:
    outcomes = leave_one_source_out()
    console.print(
        "Each source is predicted by a fit that has seen no record of it; errors are of the time,"
        " predicted relative to published. The form of the model was chosen in sight of these"
        " records; imbalances are published ones (balance.py) and are not fitted. Where it is"
        " worst, and why: docs/plan.md.\n"
    )
    console.print(_by_source(outcomes), "")
    console.print(_records([o for o in outcomes if o.target.kind in (DECODE, PREFILL)]), "")
    console.print(_not_compared())


def _by_source(outcomes: Sequence[Outcome]) -> Table:
    table = _table("Errors", "kind", "source", "records", "median", "from", "to")
    for kind in KINDS:
        of_kind = [o for o in outcomes if o.target.kind == kind]
        for group in sorted({o.target.group for o in of_kind}):
            table.add_row(kind, group, *_errors([o for o in of_kind if o.target.group == group]))
        table.add_row(kind, "all", *_errors(of_kind), style="bold", end_section=True)
    return table


def _errors(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    errors = [outcome.error for outcome in outcomes]
    ends = (f"{min(errors):+.0%}", f"{max(errors):+.0%}")
    return (str(len(errors)), f"{median_error(outcomes):.1%}", *ends)


def _records(outcomes: Sequence[Outcome]) -> Table:
    table = _table("Whole steps", "source", "record", "published", "predicted", "error")
    for o in sorted(outcomes, key=lambda o: (o.target.kind, o.target.group)):
        assumed = f" ({o.target.note})" if o.target.note else ""
        table.add_row(
            o.target.group, o.target.what + assumed, f"{o.target.published:,.1f}",
            f"{o.predicted:,.1f}", f"{o.error:+.0%}",
        )  # fmt: skip
    return table


def _not_compared() -> Table:
    table = _table("Not compared", "source", "records", "because")
    for group, reason, count in sorted(excluded()):
        table.add_row(group, str(count), reason)
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        is_number = heading in ("published", "predicted", "error", "records", "median")
        table.add_column(heading, justify="right" if is_number else "left")
    return table
