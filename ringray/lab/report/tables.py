"""Tables of plans, results and sweeps, for terminals of any width and for pipes."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Literal, NamedTuple

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ringray.base import units
from ringray.lab.report import words
from ringray.lab.report.board import worst_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import TextIO

    from rich.console import RenderableType

    from ringray.lab.plan.plan import Trial
    from ringray.lab.trial.outcome import SweepRow, TrialRow

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
# What is left out where the terminal is narrow, the least needed first.
_EXPENDABLE = (
    "balance", "FLOPs", "sent", "sent MiB", "TFLOP/s", "peak MiB", "p20–p80 ms", "p20–p80",
    "#", "kind",
)  # fmt: skip


def console(file: TextIO | None = None) -> Console:
    """For tables: a terminal's own width; in a pipe lines are as long as they must be."""
    # Without markup: a name or a reason may hold brackets, and they are no instructions.
    return Console(
        file=file or sys.stdout, highlight=False, soft_wrap=False, emoji=False, markup=False
    )


def show(table: Table, to: Console) -> None:
    """Prints ``table``, on a terminal without its least needed columns where it would not fit."""
    if to.is_terminal:
        for column in table.columns:
            if column.header == "why":
                column.max_width = max(20, to.width // 4)
        fit(table, to)
        to.print(table)
        return
    kept, to.width = to.width, max(_natural_width(table, to), to.width)
    to.print(table)
    to.width = kept


def fit(table: Table, to: Console) -> None:
    """Takes the least needed columns out of ``table`` until it is as narrow as the terminal."""
    for head in _EXPENDABLE:
        if _natural_width(table, to) <= to.width:
            break
        _drop(table, head)


def _natural_width(table: Table, to: Console) -> int:
    return Measurement.get(to, to.options.update(max_width=10_000), table).maximum


def _drop(table: Table, head: str) -> None:
    table.columns = [column for column in table.columns if str(column.header) != head]


def bare_table() -> Table:
    """A table with a line under its heads and no frame."""
    return Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )


def _table(*columns: tuple[str, str]) -> Table:
    table = bare_table()
    for head, justify in columns:
        table.add_column(
            head,
            justify="right" if justify == "right" else "left",
            no_wrap=head != "why",
            overflow="fold" if head == "why" else "ellipsis",
        )
    return table


def justify(name: str) -> Literal["left", "right"]:
    texts = ("partition", "transport", "dtype", "causal", "direction", "backward", "backend")
    return "left" if name in texts else "right"


def _field_columns(fields: Sequence[str]) -> list[tuple[str, str]]:
    return [(words.HEADS[name], justify(name)) for name in fields]


# Plans


def plan_table(trials: Sequence[Trial]) -> Table:
    """What each trial computes and what it is predicted to cost."""
    fields = words.varying(trial.config.as_dict() for trial in trials)
    table = _table(
        ("#", "right"),
        *_field_columns(fields),
        ("predicted", "right"),
        ("memory/rank", "right"),
        ("sent", "right"),
        ("FLOPs", "right"),
        ("balance", "right"),
    )
    for trial in trials:
        cost = trial.predicted
        assert cost is not None
        config = trial.config.as_dict()
        table.add_row(
            str(trial.index + 1),
            *(words.value(name, config[name]) for name in fields),
            units.duration(cost.time_ms / 1e3) if cost.time_ms >= 1e3 else _ms(cost.time_ms),
            units.memory(cost.peak_memory_bytes),
            units.memory(cost.sent_bytes),
            units.flops(cost.flops),
            f"{cost.balance:.0%}",
        )
    return table


def _ms(milliseconds: float) -> str:
    return units.digits(milliseconds, " ms")


# Results


class MetricColumn(NamedTuple):
    """A column of results: its head, the metrics it needs, how it shows them."""

    head: str
    needs: str
    show: Callable[[Mapping[str, float]], str]


def _spread(metrics: Mapping[str, float]) -> str:
    if "p20_ms" not in metrics or "p80_ms" not in metrics:
        return units.digits(None)
    return f"{units.digits(metrics['p20_ms'])}–{units.digits(metrics['p80_ms'])}"


def _number(name: str) -> Callable[[Mapping[str, float]], str]:
    return lambda metrics: units.digits(metrics.get(name))


def _mib(name: str) -> Callable[[Mapping[str, float]], str]:
    return lambda metrics: units.mib(metrics.get(name))


METRICS = (
    *(MetricColumn(f"error {name}", f"error_{name}", _number(f"error_{name}"))
      for name in ("out", "dq", "dk", "dv")),
    MetricColumn("median ms", "median_ms", _number("median_ms")),
    MetricColumn("p20–p80 ms", "p20_ms", _spread),
    MetricColumn("baseline ms", "baseline_ms", _number("baseline_ms")),
    MetricColumn("ratio", "ratio", lambda metrics: units.ratio(metrics.get("ratio"))),
    MetricColumn("TFLOP/s", "tflops", _number("tflops")),
    MetricColumn("compute ms", "compute_ms", _number("compute_ms")),
    MetricColumn("transfer ms", "transfer_ms", _number("transfer_ms")),
    MetricColumn("wait ms", "transfer_ms", _number("wait_ms")),
    MetricColumn("hidden", "transfer_ms", lambda metrics: units.share(metrics.get("hidden"))),
    MetricColumn("peak MiB", "peak_memory_bytes", _mib("peak_memory_bytes")),
    MetricColumn("sent MiB", "sent_bytes", _mib("sent_bytes")),
)  # fmt: skip


def results_table(rows: Sequence[TrialRow], fields: Sequence[str]) -> Table:
    """How each trial ended. ``fields`` are the config fields to show.

    The fastest of those that solve the same problem is bold; columns that no trial has a number
    for are left out, as is the reason where every trial is ok.
    """
    metrics = [one for one in METRICS if any(one.needs in row.metrics for row in rows)]
    reasons = any(row.reason for row in rows)
    table = _table(
        ("#", "right"),
        *_field_columns(fields),
        ("status", "left"),
        *((one.head, "right") for one in metrics),
        *([("why", "left")] if reasons else []),
    )
    best = _fastest(rows)
    for row in rows:
        status = row.status or "pending"
        table.add_row(
            str(row.index + 1),
            *(words.value(name, row.config.get(name)) for name in fields),
            Text(status, STYLES[status]),
            *(_cell(one, row, best) for one in metrics),
            *([row.reason or ""] if reasons else []),
            style="bright_black" if status in ("pending", "pruned") else "",
        )
    return table


def _cell(metric: MetricColumn, row: TrialRow, best: set[str]) -> Text:
    style = ""
    if metric.head == "median ms" and row.key in best:
        style = "bold green"
    elif metric.head == "ratio" and "ratio" in row.metrics:
        style = ratio_style(row.metrics["ratio"])
    elif metric.needs.startswith("error_") and row.metrics.get(metric.needs, 0.0) > 1:
        style = "bold red"
    return Text(metric.show(row.metrics), style)


def ratio_style(ratio: float) -> str:
    """Green where the ring is faster than what it is compared with, yellow where it is slower."""
    return "green" if ratio <= 1 else "yellow" if ratio <= 1.25 else "red"


def _fastest(rows: Iterable[TrialRow]) -> set[str]:
    """Keys of the trials that are fastest at their problem, where there is a choice."""
    by_problem: dict[str, list[TrialRow]] = {}
    for row in rows:
        if row.status == "ok" and "median_ms" in row.metrics:
            problem = repr([row.config.get(name) for name in words.PROBLEM])
            by_problem.setdefault(problem, []).append(row)
    return {
        min(same, key=lambda row: row.metrics["median_ms"]).key
        for same in by_problem.values()
        if len(same) > 1
    }


def most_telling(rows: Sequence[TrialRow], limit: int) -> list[TrialRow]:
    """At most ``limit`` rows: failures, then the largest errors or the fastest, in plan order."""
    if len(rows) <= limit:
        return list(rows)

    def rank(row: TrialRow) -> tuple[int, float]:
        if row.status in ("failed", "timeout", "oom"):
            return 0, row.index
        error = worst_error(row.metrics)
        if error is not None:
            return 1, -error
        pace = row.metrics.get("ratio", row.metrics.get("median_ms", 0.0))
        return 2 if row.status == "ok" else 3, pace

    return sorted(sorted(rows, key=rank)[:limit], key=lambda row: row.index)


# Sweeps


def sweeps_table(sweeps: Sequence[SweepRow]) -> Table:
    """What the store holds, the newest first."""
    table = _table(
        ("name", "left"), ("sweep", "left"), ("kind", "left"), ("status", "left"),
        ("trials", "left"), ("when", "left"),
    )  # fmt: skip
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
    """A Unix time as local time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def heading(parts: Sequence[tuple[str, str]]) -> RenderableType:
    """A line of styled parts with two spaces between them."""
    return Text("  ").join(Text(text, style) for text, style in parts)
