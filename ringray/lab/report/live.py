"""A sweep while it runs: a table that is redrawn on a terminal, plain lines otherwise.

Both are observers of the driver (``Observer``). The table is drawn when something
has changed and never by a clock, at most ``REFRESH_HZ`` times a second: it runs on the cores that
are being measured.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from ringray.base import units
from ringray.base.redaction import shown
from ringray.lab.report import words
from ringray.lab.report.board import Board, BoardGroup, trial_line, worst_error
from ringray.lab.trial.outcome import UNASKED

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO

    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from ringray.lab.driver.observer import Summary
    from ringray.lab.plan.plan import Plan, Trial
    from ringray.lab.trial.outcome import Outcome, TrialRow

REFRESH_HZ = 4.0
_BAR = 10  # cells
_BAR_WIDTH = 80  # of the terminal; a narrower one gets no bars
_BAR_TOP = 2.0  # the ratio at which the bar is full
_AROUND = 9  # lines that are no rows: header, column heads, counts, notes, air


def observer(file: TextIO | None = None) -> LiveTable | PlainLines:
    """The live table where ``file`` (stdout) is a terminal that can move its cursor, else lines."""
    file = file or sys.stdout
    if file.isatty():
        from ringray.lab.report.tables import console

        terminal = console(file)
        if terminal.is_terminal and not terminal.is_dumb_terminal:
            return LiveTable(terminal)
    return PlainLines(file)


class PlainLines:
    """One line per event. A reader that goes away does not end the sweep."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file: TextIO | None = file or sys.stdout
        self._board: Board | None = None

    def sweep_started(
        self, plan: Plan, done: Mapping[str, TrialRow], environment: dict[str, Any]
    ) -> None:
        self._board = board = Board(plan, done)
        first = plan.runnable[0].config.as_dict()
        said = words.constants([first], board.fields)
        known = f", {units.plural(board.known, 'trial')} measured before" if board.known else ""
        pruned = f", {board.pruned} pruned" if board.pruned else ""
        trials = units.plural(board.total, "trial")
        self._line(f"{plan.spec.name} {plan.digest[:8]}: {trials}{known}{pruned}")
        self._line(f"{said}; {words.measured(first)}")
        for line in words.pruned(plan):
            self._line(line)

    def note(self, text: str) -> None:
        self._line(text)

    def trial_started(self, trial: Trial, attempt: int) -> None:
        assert self._board is not None
        self._board.start(trial, attempt)
        if attempt > 1:
            self._line(f"{self._board.label(trial)}: attempt {attempt}")

    def trial_ended(self, trial: Trial, outcome: Outcome) -> None:
        assert self._board is not None
        self._board.end(trial, outcome)
        # Those that are pruned were told of at the start, those left out are in the summary.
        if trial.pruned is None and outcome.reason != UNASKED:
            self._line(trial_line(self._board, trial, outcome))

    def sweep_ended(self, summary: Summary) -> None:
        if self._board is not None:
            self._board.stop()

    def close(self) -> None:
        """Nothing to take down."""

    def _line(self, text: str) -> None:
        if self._file is None:
            return
        try:
            print(shown(text), file=self._file, flush=True)
        except BrokenPipeError:
            self._file = None


class LiveTable:
    """One table, redrawn in place."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._glyphs = _glyphs(console.encoding)
        self._board: Board | None = None
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._lock = threading.RLock()
        self._drawn = 0.0
        self._timer: threading.Timer | None = None

    def sweep_started(
        self, plan: Plan, done: Mapping[str, TrialRow], environment: dict[str, Any]
    ) -> None:
        self._board = Board(plan, done)
        self._live.start()
        self._changed()

    def note(self, text: str) -> None:
        text = shown(text)
        if self._board is None or not self._live.is_started:
            self._console.print(text, style="bright_black", markup=False)
            return
        self._board.note = text
        self._changed()

    def trial_started(self, trial: Trial, attempt: int) -> None:
        assert self._board is not None
        self._board.start(trial, attempt)
        self._changed()

    def trial_ended(self, trial: Trial, outcome: Outcome) -> None:
        assert self._board is not None
        with self._lock:
            self._board.end(trial, outcome)
            # The next trial mostly starts at once, and what is drawn then holds both.
            self._later(1 / REFRESH_HZ)

    def sweep_ended(self, summary: Summary) -> None:
        if self._board is not None:
            self._board.stop()
        self.close()

    def close(self) -> None:
        """Takes the table down, also after an error; the summary follows it."""
        with self._lock:
            self._cancel()
            if self._live.is_started:
                self._live.stop()

    def _changed(self) -> None:
        """Draws now, or as soon as the rate allows: a long trial must not hide the last change."""
        with self._lock:
            wait = self._drawn + 1 / REFRESH_HZ - time.monotonic()
            if wait <= 0:
                self._draw()
            else:
                self._later(wait)

    def _later(self, seconds: float) -> None:
        self._cancel()
        self._timer = threading.Timer(seconds, self._draw)
        self._timer.daemon = True
        self._timer.start()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _draw(self) -> None:
        with self._lock:
            self._cancel()
            if self._board is None or not self._live.is_started:
                return
            self._drawn = time.monotonic()
            rows = max(3, self._console.height - _AROUND)
            self._live.update(render(self._board, rows, self._console, self._glyphs), refresh=True)


def _glyphs(encoding: str) -> dict[str, str]:
    if encoding.lower().startswith("utf"):
        return {
            "ok": "✓", "oom": "▲", "timeout": "◷", "failed": "✗", "running": "▶", "pending": "·",
            "bar": "█", "half": "▌", "rest": "─",
        }  # fmt: skip
    return {
        "ok": "+", "oom": "M", "timeout": "T", "failed": "x", "running": ">", "pending": ".",
        "bar": "#", "half": "=", "rest": "-",
    }  # fmt: skip


def render(board: Board, rows: int, to: Console, glyphs: Mapping[str, str]) -> RenderableType:
    """The whole view: header, at most ``rows`` rows, counts."""
    from rich.console import Group as Lines
    from rich.text import Text

    shown, hidden = _visible(board, rows)
    parts: list[RenderableType] = [_header(board), Text(""), _rows(board, shown, to, glyphs)]
    waiting = board.total - board.done
    line = words.counts(board.counts, waiting)
    if hidden:
        line += f"   ({hidden} rows not shown)"
    parts += [Text(""), Text(line, "bright_black")]
    if board.note:
        parts.append(Text(board.note, "bright_black", no_wrap=True, overflow="ellipsis"))
    return Lines(*parts)


def _header(board: Board) -> RenderableType:
    from ringray.lab.report.tables import heading

    spec = board.plan.spec
    sizes = "/".join(map(str, spec.sweep("ring", "size")))
    left = board.remaining_s
    parts = [
        (spec.name, "bold cyan"),
        (board.plan.digest[:8], "bright_black"),
        (f"ring of {sizes} on {board.device}", ""),
        (f"{board.done}/{board.total}", "bold"),
        (f"elapsed {units.duration(board.elapsed_s)}", ""),
    ]
    if left is not None and board.done < board.total:
        parts.append((f"about {units.duration(left)} left", "cyan"))
    return heading(parts)


def _visible(board: Board, rows: int) -> tuple[list[BoardGroup], int]:
    """The rows around the running trial: mostly what has ended, and what comes next."""
    groups = board.groups
    if len(groups) <= rows:
        return groups, 0
    at = board.group(board.current) if board.current is not None else board.last
    focus = next((index for index, group in enumerate(groups) if group is at), 0)
    ahead = max(1, rows // 4)
    first = min(max(0, focus + ahead + 1 - rows), len(groups) - rows)
    return groups[first : first + rows], len(groups) - rows


def _rows(board: Board, shown: list[BoardGroup], to: Console, glyphs: Mapping[str, str]) -> Table:
    from ringray.lab.report.tables import bare_table, fit, justify

    correctness = any(
        worst_error(result.metrics) is not None
        for group in shown
        for result in group.ended.values()
    )
    compared = board.plan.spec.measure.baseline
    table = bare_table()
    table.add_column("", width=1)
    for name in board.fields or ("partition",):
        table.add_column(words.HEADS[name], justify=justify(name), no_wrap=True)
    heads = ["median ms", "p20–p80"]
    heads += ["worst error"] if correctness else []
    heads += [f"vs {compared.name}"] if compared else []
    heads += ["TFLOP/s", "peak MiB", "sent MiB"]
    for head in heads:
        numeric = not head.startswith("vs ")
        table.add_column(head, justify="right" if numeric else "left", no_wrap=True)
    for group in shown:
        table.add_row(*_row(board, group, glyphs, heads, bars=to.width >= _BAR_WIDTH))
    fit(table, to)
    return table


def _row(
    board: Board, group: BoardGroup, glyphs: Mapping[str, str], heads: list[str], bars: bool
) -> list[RenderableType]:
    from rich.text import Text

    from ringray.lab.report.tables import STYLES, ratio_style

    running = board.current is not None and board.group(board.current) is group
    status = "running" if running else group.status or "pending"
    quiet = "bright_black" if status == "pending" else "bold" if running else ""
    cells: list[RenderableType] = [Text(glyphs.get(status, "-"), STYLES[status])]
    cells += [
        Text(words.value(name, group.config.get(name)), quiet)
        for name in board.fields or ("partition",)
    ]
    metrics = group.metrics()
    if not metrics:
        said = ""
        if running:
            said = f"attempt {board.attempt}" if board.attempt > 1 else "measuring"
        elif group.status is not None:
            said = group.status
        return [*cells, Text(said, STYLES[status]), *(Text("") for _ in heads[1:])]
    replicas = f" ×{len(group.ended)}" if len(group.keys) > 1 else ""
    spread = ""
    if "p20_ms" in metrics and "p80_ms" in metrics:
        spread = f"{units.digits(metrics['p20_ms'])}–{units.digits(metrics['p80_ms'])}"
    median = units.digits(metrics.get("median_ms")) + replicas
    cells += [Text(median, "bold"), Text(spread, "bright_black")]
    for head in heads[2:]:
        if head == "worst error":
            worst = worst_error(metrics)
            right = worst is not None and worst <= 1
            cells.append(Text(units.digits(worst), "green" if right else "bold red"))
        elif head.startswith("vs "):
            ratio = metrics.get("ratio")
            text = Text(f"{units.ratio(ratio):>5}", ratio_style(ratio) if ratio is not None else "")
            if ratio is not None and bars:
                text.append(" ")
                text.append_text(_bar(ratio, glyphs, ratio_style(ratio)))
            cells.append(text)
        else:
            cells.append(Text(_wide_cell(head, metrics)))
    return cells


def _wide_cell(head: str, metrics: Mapping[str, float]) -> str:
    if head == "TFLOP/s":
        return units.digits(metrics.get("tflops"))
    return units.mib(metrics.get("peak_memory_bytes" if head == "peak MiB" else "sent_bytes"))


def _bar(ratio: float, glyphs: Mapping[str, str], style: str) -> Text:
    """A bar of the ring's time against the baseline's, which is half of the bar."""
    from rich.text import Text

    halves = round(2 * _BAR * min(ratio, _BAR_TOP) / _BAR_TOP)
    full, half = divmod(halves, 2)
    bar = Text(glyphs["bar"] * full + glyphs["half"] * half, style)
    bar.append(glyphs["rest"] * (_BAR - full - half), "bright_black")
    return bar
