"""Tables of plans, results, hops and sweeps, for terminals of any width and for pipes."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ringray.base import units
from ringray.lab.report import words
from ringray.lab.report.board import worst_error
from ringray.lab.report.verdict import winners
from ringray.lab.store.traces import path_of
from ringray.lab.trial.measurement import HOP
from ringray.lab.trial.metrics import METRICS, Metric, columns
from ringray.lab.trial.outcome import SweepRow, TrialRow

if TYPE_CHECKING:  # `ringray list` needs no plan, and starts fast
    from ringray.lab.plan.trial import Trial

STYLES = {
    "ok": "green",
    "oom": "magenta",
    "pruned": "bright_black",
    "timeout": "yellow",
    "failed": "bold red",
    "running": "cyan",
    "complete": "green",
    "interrupted": "yellow",
    "pending": "bright_black",
}
# Columns that a narrow terminal leaves out, the least important first.
_EXPENDABLE = ["balance", "FLOPs", "sent", "in nodes", "between"]
_EXPENDABLE += [metric.heading for metric in reversed(METRICS.values()) if metric.expendable]
_EXPENDABLE += ["#", "kind"]


def console(file: TextIO | None = None) -> Console:
    """Returns a console that prints brackets in names and reasons as they are."""
    return Console(file=file or sys.stdout, highlight=False, emoji=False, markup=False)


def show(table: Table, to: Console) -> None:
    """Prints ``table``: whole lines to a pipe, only the columns that fit to a terminal."""
    if to.is_terminal:
        for column in table.columns:
            if column.header == "why":
                column.max_width = max(20, to.width // 4)
        fit(table, to)
        to.print(table)
    else:
        width, to.width = to.width, max(_natural_width(table, to), to.width)
        to.print(table)
        to.width = width


def fit(table: Table, to: Console) -> None:
    """Removes the least important columns of ``table`` until it is as narrow as the terminal."""
    for heading in _EXPENDABLE:
        if _natural_width(table, to) <= to.width:
            break
        table.columns = [column for column in table.columns if column.header != heading]


def _natural_width(table: Table, to: Console) -> int:
    return Measurement.get(to, to.options.update(max_width=10_000), table).maximum


def bare_table(*headings: str, texts: Sequence[str] = ()) -> Table:
    """Returns a table without a frame; columns are aligned right, but for those of ``texts``."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.pad_edge = False
    for heading in headings:
        table.add_column(heading, no_wrap=heading != "why")
        column = table.columns[-1]
        column.justify = "left" if heading in (*texts, *words.TEXTS) else "right"
        # Reasons are long, and wrap; all else is cut.
        column.overflow = "fold" if heading == "why" else "ellipsis"
    return table


def plan_table(trials: Sequence[Trial]) -> Table:
    """Returns what each trial computes and its predicted cost."""
    fields = words.varying(trial.config.as_dict() for trial in trials)
    far = any(trial.predicted and trial.predicted.outer_bytes for trial in trials)
    traffic = ("in nodes", "between") if far else ("sent",)
    costs = ("predicted", "memory/rank", *traffic, "FLOPs", "balance")
    table = bare_table("#", *(words.HEADS[name] for name in fields), *costs)
    for trial in trials:
        cost = trial.predicted
        assert cost is not None
        config, ms = trial.config.as_dict(), cost.time_ms
        table.add_row(
            str(trial.index + 1),
            *(words.value(name, config.get(name)) for name in fields),
            units.duration(ms / 1e3) if ms >= 1e3 else units.digits(ms, " ms"),
            units.memory(cost.peak_memory_bytes),
            *map(units.memory, [cost.inner_bytes, cost.outer_bytes] if far else [cost.sent_bytes]),
            units.flops(cost.flops),
            f"{cost.balance:.0%}",
        )
    return table


def results_table(
    rows: Sequence[TrialRow], fields: Sequence[str], best: Sequence[TrialRow] = ()
) -> Table:
    """Returns how each trial ended, with the config fields ``fields``.

    Those of the points ``best`` are bold. Columns without a number are left out, as is the reason
    where every trial is ok.
    """
    bold = [{**row.config, "replica": 0} for row in best]
    heads, metrics, reasons = results_columns(rows, fields)
    table = bare_table(*heads, texts=("status", "why"))
    for row in rows:
        status = row.status or "pending"
        styles = {"median_ms": "bold green"} if {**row.config, "replica": 0} in bold else {}
        table.add_row(
            str(row.index + 1),
            *(words.value(name, row.config.get(name)) for name in fields),
            Text(status, STYLES[status]),
            *(metric_cell(metric, row.numbers, styles.get(metric.name, "")) for metric in metrics),
            *([row.reason or ""] if reasons else []),
            style="bright_black" if status in ("pending", "pruned") else "",
        )
    return table


def results_columns(
    rows: Sequence[TrialRow], fields: Sequence[str]
) -> tuple[list[str], list[Metric], bool]:
    """Returns the headings of the table of trials, on a terminal as on a page, the metrics that it
    has, which are those that a trial has, and whether reasons end it."""
    measured = {name for row in rows for name in row.numbers}
    metrics = [
        metric for metric in columns("results") if (metric.beside or metric.name) in measured
    ]
    reasons = any(row.reason for row in rows)
    heads = ["#", *(words.HEADS[name] for name in fields), "status"]
    heads += [metric.heading for metric in metrics]
    return [*heads, *(["why"] if reasons else [])], metrics, reasons


def metric_cell(metric: Metric, metrics: Mapping[str, float], style: str = "") -> Text:
    """Returns a metric of a trial as a cell, red where it is bad."""
    number = metrics.get(metric.name)
    if metric.name == "ratio" and number is not None:
        style = "green" if number <= 1 else "yellow" if number <= 1.25 else "red"
    elif metric.group == "error" and number is not None and number > 1:
        style = "bold red"
    return Text(words.metric(metric, metrics), style)


def most_telling(rows: Sequence[TrialRow], limit: int) -> list[TrialRow]:
    """Selects failures, then the largest errors, then the fastest of each problem and the fastest
    of all; returns them in plan order."""
    best = {row.key for row in winners(rows)}

    def rank(row: TrialRow) -> tuple[int, float]:
        if row.status in ("failed", "timeout", "oom"):
            return 0, row.index
        error = worst_error(row.metrics)
        if error is not None:
            return 1, -error
        pace = row.metrics.get("ratio", row.metrics.get("median_ms", 0.0))
        return 2 if row.key in best else 3 if row.status == "ok" else 4, pace

    return sorted(sorted(rows, key=rank)[:limit], key=lambda row: row.index)


def with_hops(rows: Sequence[TrialRow], limit: int) -> tuple[list[TrialRow], int]:
    """Returns the first trials with at most ``limit`` measured hops in all, but at least one, and
    how many further trials measured hops."""
    measured = [row for row in rows if _hops(row)]
    shown: list[TrialRow] = []
    for row in measured:
        limit -= len(_hops(row))
        if shown and limit < 0:
            break
        shown.append(row)
    return shown, len(measured) - len(shown)


def _hops(row: TrialRow) -> list[str]:
    return [name for name in row.samples if name.startswith(HOP)]


def hops_table(sweep: str, rows: Sequence[TrialRow]) -> Table:
    """Returns a line for each hop; ``sweep`` is the sweep's digest. The first line of a trial has
    its number and its trace."""
    heads = ("#", "hop", "compute ms", "transfer ms", "wait ms", "sent MiB", "trace")
    table = bare_table(*heads, texts=("hop", "trace"))
    for row in rows:
        trace = path_of(sweep, row.key)
        number, file = str(row.index + 1), trace.name if trace.exists() else ""
        for name in _hops(row):
            *times, sent = row.samples[name]
            table.add_row(
                number,
                name.removeprefix(HOP),
                *(units.digits(time) if time else "" for time in times),
                units.mib(sent) if sent else "",
                file,
            )
            number = file = ""
    return table


def sweeps_table(sweeps: Sequence[SweepRow]) -> Table:
    """Returns the sweeps of a store, one a line."""
    headings = ("name", "sweep", "kind", "status", "trials", "when")
    table = bare_table(*headings, texts=headings)
    for sweep in sweeps:
        table.add_row(
            sweep.name,
            sweep.digest[:12],
            sweep.kind,
            Text(sweep.status, STYLES.get(sweep.status, "")),
            words.counts(sweep.counts, sweep.total - sum(sweep.counts.values())),
            when(sweep.updated),
        )
    return table


def when(moment: float) -> str:
    """Writes a Unix time as local time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def heading(parts: Sequence[tuple[str, str]]) -> RenderableType:
    """Returns a line of styled parts with two spaces between them."""
    return Text("  ").join(Text(text, style) for text, style in parts)
