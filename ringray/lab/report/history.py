"""The measurements of each trial of a sweep, the earlier ones included."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from ringray.base import provenance, units
from ringray.lab.report import tables, words
from ringray.lab.trial.outcome import TrialRow

_CODE = 7  # digits


class Measured(NamedTuple):
    """One measurement."""

    row: TrialRow
    current: bool  # the one that counts


def measurements(trials: Iterable[TrialRow], earlier: Iterable[TrialRow]) -> list[Measured]:
    """Returns all recordings in the order of the trials, those of one trial by time."""
    every = [Measured(row, False) for row in earlier]
    every += [Measured(row, True) for row in trials if row.status is not None]
    return sorted(every, key=lambda item: (item.row.index, item.row.key, item.row.ended or 0.0))


def history_table(measured: Sequence[Measured], fields: Sequence[str]) -> Table:
    """Returns a line for each measurement; hardware and versions only where they differ."""
    places = [_place(measurement.row) for measurement in measured]
    names = dict.fromkeys(name for place in places for name in place)
    differing = [name for name in names if len({place.get(name) for place in places}) > 1]
    texts = ("ended", "commit", "code", *differing, "status")
    heads = ("#", *(words.HEADS[name] for name in fields), *texts, "median ms", "current")
    table = tables.bare_table(*heads, texts=texts)
    for (row, current), place in zip(measured, places, strict=True):
        environment = row.environment or {}
        table.add_row(
            str(row.index + 1),
            *(words.value(name, row.config.get(name)) for name in fields),
            tables.when(row.ended or 0.0),
            provenance.commit(environment) or units.ABSENT,
            str(environment.get("kernels") or units.ABSENT)[:_CODE],
            *(place.get(name, units.ABSENT) for name in differing),
            Text(row.status or "", tables.STYLES.get(row.status or "", "")),
            units.digits(row.metrics.get("median_ms")),
            "yes" if current else "",
            style="" if current else "bright_black",
        )
    return table


def _place(row: TrialRow) -> dict[str, str]:
    """Returns the hardware and versions of a measurement as text."""
    parts = provenance.measured_parts(row.environment or {})
    both: dict[str, Any] = parts["hardware"] | parts["versions"]
    return {name: words.value(name, value) for name, value in both.items()}
