"""Views of a running sweep: a table that is redrawn on a terminal, plain lines elsewhere.

The table is drawn once a second, because it runs on the cores that are being measured. Plain lines
say every ``QUIET_S`` seconds what is being measured.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ringray.base import units
from ringray.base.redaction import shown
from ringray.lab.driver.events import (
    Event,
    Note,
    SweepEnded,
    SweepStarted,
    TrialEnded,
    TrialStarted,
)
from ringray.lab.plan.plan import Plan
from ringray.lab.report import verdict, words
from ringray.lab.report.board import Board, BoardGroup, RunningTrial, trial_line, worst_error
from ringray.lab.report.tables import STYLES, bare_table, console, fit, heading, metric_cell
from ringray.lab.trial.metrics import Metric, columns
from ringray.lab.trial.outcome import NOT_REQUESTED

REFRESH_HZ = 1.0
QUIET_S = 30.0  # longest silence of the plain lines while a trial runs, seconds
_BAR = 10  # width of a bar, cells
_BAR_WIDTH = 80  # least width of a terminal that gets bars, cells
_BAR_TOP = 2.0  # ratio at which a bar is full
_AROUND = 12  # lines around the rows: header, column heads, counts, now, best, fault, note
# Marks of a row by status, in UTF-8 and in ASCII.
_MARKED = ("ok", "oom", "timeout", "failed", "running", "pending")
_MARKS = dict(zip(_MARKED, zip("✓▲◷✗▶·", "+MTx>.", strict=True), strict=True))


def view(file: TextIO) -> View:
    """Returns a live table for a terminal with a cursor, plain lines for any other ``file``."""
    if file.isatty():
        terminal = console(file)
        if terminal.is_terminal and not terminal.is_dumb_terminal:
            return LiveTable(terminal)
    return PlainLines(file)


class View:
    """A listener that shows a sweep."""

    board: Board  # from the start of the sweep on

    def __init__(self) -> None:
        self._lock = threading.RLock()  # other threads draw, too

    def take(self, event: Event) -> None:
        if isinstance(event, SweepEnded):
            self.close()  # which may wait for a drawing
            return
        with self._lock:
            match event:
                case SweepStarted(plan=plan, done=done, ago=ago):
                    self.board = Board(plan, done, ago)
                case TrialStarted(trial, attempt, ago):
                    self.board.start(trial, attempt, ago)
                case TrialEnded(trial, outcome):
                    self.board.end(trial, outcome)
            self._show(event)

    def close(self) -> None:
        """Ends the view, also after an error; the summary follows it."""

    def _show(self, event: Event) -> None:
        """Shows an event that the board knows already."""


class PlainLines(View):
    """One line per event. A closed pipe or a full disk does not end the sweep."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file: TextIO | None = file
        self._quiet: threading.Timer | None = None

    def _show(self, event: Event) -> None:
        match event:
            case SweepStarted(plan=plan):
                self._begin(plan)
            case TrialStarted(trial, attempt):
                if attempt > 1:
                    self._note(f"{self.board.labels[trial.key]}: attempt {attempt}")
                self._listen()
            # The first lines count the pruned trials, the summary those that a search left out.
            case TrialEnded(trial, outcome) if not trial.pruned and outcome.reason != NOT_REQUESTED:
                self._note(trial_line(self.board, trial, outcome))
            case Note(text):
                self._note(text)

    def _begin(self, plan: Plan) -> None:
        board, first = self.board, plan.runnable[0].config.as_dict()
        earlier = board.measured_before
        before = f", {units.plural(earlier, 'trial')} measured before" if earlier else ""
        pruned = f", {board.pruned} pruned" if board.pruned else ""
        trials = units.plural(board.total, "trial")
        self._note(f"{plan.spec.name} {plan.digest[:8]}: {trials}{before}{pruned}")
        self._note(f"{words.constants(first, board.fields)}; {words.measured(first)}")
        for line in (*words.pruned(plan), *words.warnings(plan)):
            self._note(line)

    def _note(self, text: str) -> None:
        if self._file is None:
            return
        try:
            print(shown(text), file=self._file, flush=True)
        except OSError:
            self._file = None

    def close(self) -> None:
        with self._lock:
            if self._quiet is not None:
                self._quiet.cancel()
                self._quiet = None

    def _listen(self) -> None:
        self.close()
        self._quiet = threading.Timer(QUIET_S, self._still_there)
        self._quiet.daemon = True
        self._quiet.start()

    def _still_there(self) -> None:
        with self._lock:
            board = self.board
            if self._quiet is None:
                return
            if running := list(board.running.values()):
                which = f"{board.done + 1} of {board.total}"
                if len(running) > 1:
                    which = f"{len(running)} at a time, {board.done} of {board.total} done"
                remaining_s = board.remaining_s
                about = "" if remaining_s is None else f"; about {units.duration(remaining_s)} left"
                self._note(f"measuring {which}, {units.duration(running[0].took_s)}{about}")
            self._listen()


class LiveTable(View):
    """One table, redrawn in place once a second."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._live: Live | None = None  # from the start of the sweep to its end

    def _show(self, event: Event) -> None:
        match event:
            case SweepStarted(plan=plan):
                for line in words.warnings(plan):
                    self._note(line)
                how: dict[str, Any] = {"refresh_per_second": REFRESH_HZ, "transient": True}
                self._live = Live(console=self._console, get_renderable=self._render, **how)
                self._live.start()
            case Note(text):
                self._note(text)

    def _note(self, text: str) -> None:
        if self._live is None:
            self._console.print(shown(text), style="bright_black", markup=False)
        else:
            self.board.note = shown(text)

    def _render(self) -> RenderableType:
        with self._lock:
            return render(self.board, max(3, self._console.height - _AROUND), self._console)

    def close(self) -> None:
        view, self._live = self._live, None
        if view is not None:
            view.stop()


def render(board: Board, rows: int, to: Console) -> RenderableType:
    """Returns the whole view: header, at most ``rows`` rows, counts."""
    visible = _visible(board, rows)
    line = words.counts(board.counts, board.total - board.done)
    if hidden := len(board.groups) - len(visible):
        line += f"   ({hidden} rows not shown)"
    parts = [_header(board), Text(""), _rows(board, visible, to), Text("")]
    parts.append(Text(line, "bright_black"))
    best = board.best(partial(verdict.answer, board.plan.spec.kind))
    now = [
        f"{board.labels[key]} on a ring of {trial.group.config['ring_size']}, {_measuring(trial)}"
        for key, trial in list(board.running.items())
    ]
    now_line = f"now: {'; '.join(now)}" if now else ""
    texts = (now_line, best, board.fault, board.note)
    for text, style in zip(texts, ("bold", "", STYLES["failed"], "bright_black"), strict=True):
        if text:
            parts.append(Text(shown(text), style, no_wrap=True, overflow="ellipsis"))
    return Lines(*parts)


def _header(board: Board) -> RenderableType:
    spec = board.plan.spec
    sizes = "/".join(map(str, spec.sweep("ring", "size")))
    remaining_s = board.remaining_s
    parts = [
        (spec.name, "bold cyan"),
        (board.plan.digest[:8], "bright_black"),
        (f"ring of {sizes} on {spec.ring.device}", ""),
        (f"{board.done}/{board.total}", "bold"),
        (f"elapsed {units.duration(board.elapsed_s)}", ""),
    ]
    if remaining_s is not None and board.done < board.total:
        parts.append((f"about {units.duration(remaining_s)} left", "cyan"))
    return heading(parts)


def _visible(board: Board, rows: int) -> list[BoardGroup]:
    """Returns ``rows`` rows around the running trial, a quarter of them after it."""
    groups = board.groups
    focused = next((trial.group for trial in list(board.running.values())), board.last)
    focus = next((index for index, group in enumerate(groups) if group is focused), 0)
    ahead = max(1, rows // 4)
    first = max(0, min(focus + ahead + 1 - rows, len(groups) - rows))
    return groups[first : first + rows]


def _rows(board: Board, shown: list[BoardGroup], to: Console) -> Table:
    fields = board.fields or ("partition",)
    results = [result for group in shown for result in group.ended.values()]
    errors = any(worst_error(result.metrics) is not None for result in results)
    compared, bars = board.plan.spec.measure.baseline, to.width >= _BAR_WIDTH
    measured = {*board.plan.spec.trial_kind.measures} - (set() if compared else {"baseline"})
    metrics = [metric for metric in columns("live") if metric.group in measured]
    headings = ["worst error"] if errors else []
    for metric in metrics:
        if compared and metric.group == "baseline":
            headings += [f"vs {compared.name}", *([""] if bars else [])]
        else:
            headings.append(metric.heading)
    table = bare_table("", *(words.HEADS[name] for name in fields), *headings)
    ascii_only = not to.encoding.lower().startswith("utf")
    for group in shown:
        trials = [trial for trial in list(board.running.values()) if trial.group is group]
        running = trials[0] if trials else None
        status = "running" if running else group.status or "pending"
        quiet = "bright_black" if status == "pending" else "bold" if running else ""
        cells: list[RenderableType] = _metric_cells(group, metrics, errors, bars)
        if not cells:
            cells = [Text(_measuring(running) if running else group.status or "", STYLES[status])]
        table.add_row(
            Text(_MARKS[status][ascii_only] if status in _MARKS else "-", STYLES[status]),
            *(Text(words.value(name, group.config.get(name)), quiet) for name in fields),
            *cells,
        )
    fit(table, to)
    return table


def _measuring(trial: RunningTrial) -> str:
    attempt = f"attempt {trial.attempt}" if trial.attempt > 1 else "measuring"
    return f"{attempt} {units.duration(trial.took_s)}" if trial.took_s >= 1 else attempt


def _metric_cells(
    group: BoardGroup, metrics: Sequence[Metric], errors: bool, bars: bool
) -> list[RenderableType]:
    """Returns the cells of a row's metrics; none where nothing is measured yet."""
    values = group.metrics()
    if not values:
        return []
    cells: list[RenderableType] = []
    if errors:
        worst = worst_error(values)
        right = worst is not None and worst <= 1
        cells.append(Text(units.digits(worst), "green" if right else "bold red"))
    for metric in metrics:
        style = {"median_ms": "bold", "p20_ms": "bright_black"}.get(metric.name, "")
        cell = metric_cell(metric, values, style)
        cells.append(cell)
        if metric.name == "median_ms" and len(group.keys) > 1:
            cell.append(f" ×{len(group.ended)}")
        elif metric.group == "baseline" and bars:  # half a bar is the baseline's time
            ratio = min(values.get(metric.name, 0.0), _BAR_TOP)
            bar = ProgressBar(
                total=_BAR_TOP,
                completed=ratio,
                width=_BAR,
                style="",
                complete_style=cell.style,
                finished_style=cell.style,
            )
            cells.append(bar if metric.name in values else "")
    return cells
