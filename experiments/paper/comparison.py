"""A table of printed values beside ours, and their ratio, for the commands of this folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ringray.base.units import digits
from ringray.lab.opening import open_store
from ringray.lab.report import tables
from ringray.lab.specs import model as specs
from ringray.lab.trial.outcome import TrialRow


class Row(NamedTuple):
    """One printed value. ``printed``: None where the document has none. ``note``: why it differs,
    or what is right."""

    cell: str
    printed: float | None
    ours: float
    note: str = ""

    @property
    def ratio(self) -> float:
        """Returns ours over the printed value."""
        return self.ours / self.printed if self.printed else float("nan")


def number(value: float | None) -> str:
    """Writes three digits, and one after the point below 1000."""
    return f"{value:.1f}" if value and 100 <= value < 1000 else digits(value)


def measured(name: str) -> list[TrialRow]:
    """Returns the trials of a spec of this folder; ``ringray run`` measures those that the store
    lacks, and writes all to MLflow."""
    path = Path(__file__).with_name(f"{name}.yaml")
    subprocess.run([sys.executable, "-m", "ringray", "run", str(path)], check=True)
    with open_store(None) as store:
        return store.trials(specs.load(path).digest)


def show(title: str, rows: Sequence[Row], unit: str) -> None:
    """Prints the table of ``rows``."""
    table = tables.bare_table("", "printed", "ours", "ratio", " ", texts=("", " "))
    for row in rows:
        table.add_row(row.cell, number(row.printed), number(row.ours), digits(row.ratio), row.note)
    console = tables.console()
    console.print(f"{title} ({unit})", soft_wrap=True)
    tables.show(table, console)
