"""The hops of trials that measured them: what each costs, and what of it was waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringray.base import units
from ringray.lab.report.tables import bare_table
from ringray.lab.store.traces import path_of
from ringray.lab.trial.measurement import HOP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from ringray.lab.trial.outcome import TrialRow


def measured(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """The trials of which hops are known."""
    return [row for row in rows if any(name.startswith(HOP) for name in row.samples)]


def at_most(rows: Sequence[TrialRow], lines: int) -> list[TrialRow]:
    """The first trials, as many as have no more than so many hops, but one at least."""
    shown: list[TrialRow] = []
    for row in rows:
        lines -= sum(name.startswith(HOP) for name in row.samples)
        if shown and lines < 0:
            break
        shown.append(row)
    return shown


def hops_table(sweep: str, rows: Sequence[TrialRow]) -> Table:
    """A line for each hop; ``sweep`` is the sweep's digest. A trial's number and its trace, where
    there is one, stand in its first line."""
    table = bare_table()
    for head in ("#", "hop", "compute ms", "transfer ms", "wait ms", "sent MiB", "trace"):
        left = head in ("hop", "trace")
        table.add_column(head, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        trace = path_of(sweep, row.key)
        first = [str(row.index + 1), trace.name if trace.exists() else ""]
        for name, values in row.samples.items():
            if not name.startswith(HOP):
                continue
            number, file = first
            *times, sent = values
            table.add_row(
                number,
                name.removeprefix(HOP),
                *(units.digits(time) if time else "" for time in times),
                units.mib(sent) if sent else "",
                file,
            )
            first = ["", ""]
    return table
