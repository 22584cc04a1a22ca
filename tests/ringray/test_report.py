"""What a person sees of plans, running sweeps and results."""

from __future__ import annotations

import io
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ringray import plan, spec
from ringray.records import Outcome, SweepRow, TrialRow
from ringray.report import live, replicas, tables, words
from ringray.report.board import Board, trial_line

TEXT = """\
version: 1
name: looks
kind: latency
problem: {seq_len: [2048, 8192], heads: 2, dtype: float32, direction: [forward, forward+backward]}
strategy: {partition: [contiguous, striped, zigzag, zigzag-token]}
"""
UTF8, ASCII = live._glyphs("utf-8"), live._glyphs("ascii")


def planned(text: str = TEXT) -> plan.Plan:
    return plan.build(spec.parse(text))


def outcome(median: float = 12.34, **changes: Any) -> Outcome:
    metrics = {"median_ms": median, "p20_ms": median * 0.98, "p80_ms": median * 1.05}
    metrics |= {"baseline_ms": 13.0, "ratio": median / 13.0, "tflops": 0.161}
    metrics |= {"peak_memory_bytes": 4.0 * 2**20, "sent_bytes": 1.5 * 2**20}
    return Outcome(**{"status": "ok", "metrics": metrics, **changes})


def row(trial: plan.Trial, ended: Outcome | None) -> TrialRow:
    return TrialRow(
        key=trial.key, index=trial.index, config=trial.config.as_dict(), predicted={},
        status=ended.status if ended else None, reason=ended.reason if ended else None,
        metrics=dict(ended.metrics) if ended else {}, samples={}, point=None, attempts=1,
        started=None, ended=None, environment=None,
    )  # fmt: skip


def console(width: int = 120, height: int = 40, terminal: bool = True) -> Console:
    return Console(
        file=io.StringIO(), record=True, width=width, height=height, force_terminal=terminal
    )


def printed(renderable: Any, width: int = 120) -> str:
    to = console(width)
    to.print(renderable)
    return to.export_text()


# Words


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "–"), (float("nan"), "–"), (0.0, "0.00"), (0.0123, "0.0123"), (1e-9, "0.000000"),
        (0.95, "0.950"),
        (1.234, "1.23"), (12.345, "12.3"), (99.96, "100.0"), (123.4, "123"), (12345.6, "12,346"),
    ],
)  # fmt: skip
def test_three_digits(number: float | None, text: str) -> None:
    assert words.digits(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.84, "840 ms"), (1.25, "1.2 s"), (59.4, "59 s"), (59.6, "1:00"), (205, "3:25"),
     (3725, "1:02:05")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 << 30, "3.00 GiB"),
        (1 << 50, "1,024 TiB"),
    ],
)
def test_memory(count: int, text: str) -> None:
    assert words.memory(count) == text


def test_flops() -> None:
    assert words.flops(999) == "999 FLOP"
    assert words.flops(1.5e12) == "1.50 TFLOP"


def test_a_label_names_what_does_not_explain_itself() -> None:
    config = planned().trials[0].config.as_dict() | {"window": 17, "documents": [3, 4]}
    fields = ("ring_size", "partition", "seq_len", "causal", "window", "documents", "direction")
    assert words.label(config, fields) == (
        "ring 2 contiguous 2048 causal window 17 docs 2 given forward"
    )
    assert words.label(config | {"window": None, "causal": False}, ("causal", "window")) == (
        "full no window"
    )


def test_every_config_field_that_can_vary_has_a_head() -> None:
    assert {name for _, _, name in plan.AXES} == set(words.HEADS)


# Plain lines


def test_a_plain_line_says_what_ended_and_how() -> None:
    made = planned()
    board = Board(made, {})
    for trial in made.trials[:2]:
        board.end(trial, outcome())
    third = made.trials[2]
    board.end(third, outcome())
    assert trial_line(board, third, outcome()) == (
        "[ 3/16] zigzag 2048 forward  ok  12.3 ms (12.1-13.0)  sdpa 13.0 ms  ratio 0.95"
    )
    failed = Outcome("failed", "rank 1 ended: SIGKILL\nmore", attempts=3)
    assert trial_line(board, third, failed) == (
        "[ 3/16] zigzag 2048 forward  failed  3 attempts  rank 1 ended: SIGKILL"
    )
    right = Outcome("ok", None, {"error_out": 0.2, "error_dq": 0.431})
    assert trial_line(board, third, right).endswith("ok  worst error 0.431 of its budget")


def follow(observer: Any, made: plan.Plan, ended: int, done: dict[str, TrialRow]) -> None:
    observer.sweep_started(made, done, {})
    observer.note("starting 2 cpu actors")
    for trial in made.trials:
        if trial.pruned is not None:
            observer.trial_ended(trial, Outcome("pruned", str(trial.pruned)))
    for trial in [one for one in made.runnable if one.key not in done][:ended]:
        observer.trial_started(trial, 1)
        observer.trial_ended(trial, outcome())
    observer.sweep_ended(SimpleNamespace())
    observer.close()


def test_plain_lines_of_a_sweep() -> None:
    made = planned(TEXT.replace("heads: 2,", "heads: 2, window: [null, 3], causal: [true, false],"))
    file = io.StringIO()
    done = {made.runnable[0].key: row(made.runnable[0], outcome())}
    follow(live.observer(file), made, 3, done)
    lines = file.getvalue().splitlines()
    assert lines[0] == f"looks {made.digest[:8]}: 48 trials, 1 trial measured before, 16 pruned"
    assert lines[1].startswith("ring of 2, device auto, 1 thread per rank, 2 heads × 64, float32")
    assert lines[2].startswith("16 points pruned: problem.window: ")
    assert lines[3] == "starting 2 cpu actors"
    assert [line[:7] for line in lines[4:]] == ["[ 2/48]", "[ 3/48]", "[ 4/48]"]


class Gone(io.StringIO):
    """A pipe whose reader has left."""

    def write(self, _: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_leaves_does_not_end_the_sweep() -> None:
    follow(live.PlainLines(Gone()), planned(), 16, {})


# The board


def test_replicas_that_are_ok_are_one_row_of_the_results() -> None:
    made = planned(TEXT + "measure: {replicas: 3}\n")
    first = [t for t in made.trials if t.config.as_dict() | {"replica": 0} == made.trials[
        0].config.as_dict()]  # fmt: skip
    ends = [outcome(10.0), Outcome("timeout", "too slow"), outcome(30.0)]
    others = [row(made.trials[1], outcome(7.0))]
    rows = [row(trial, end) for trial, end in zip(first, ends, strict=True)]
    one, lost, other = replicas.merged([*rows, *others])
    assert one.metrics["median_ms"] == 20.0
    assert (one.metrics["p20_ms"], one.metrics["p80_ms"]) == (10.0 * 0.98, 30.0 * 1.05)
    assert (one.status, lost.reason, other) == ("ok", "too slow", others[0])


def test_replicas_are_one_row() -> None:
    made = planned(TEXT + "measure: {replicas: 3}\n")
    board = Board(made, {})
    assert (len(board.groups), board.total) == (16, 48)
    first = [trial for trial in made.trials if trial.key in board.groups[0].keys]
    for trial, median in zip(first, (10.0, 30.0, 12.0), strict=True):
        board.end(trial, outcome(median))
    metrics = board.groups[0].metrics()
    assert metrics["median_ms"] == 12.0
    assert (metrics["p20_ms"], metrics["p80_ms"]) == (10.0 * 0.98, 30.0 * 1.05)
    assert board.label(first[2]).endswith(" #3")
    assert board.groups[0].status == "ok"
    board.end(first[1], Outcome("timeout", "too slow"))
    assert board.groups[0].status == "timeout"
    assert board.groups[0].reason == "too slow"
    assert (board.done, board.counts) == (3, {"ok": 2, "timeout": 1})


def test_the_rest_is_guessed_from_what_was_predicted() -> None:
    made = planned()
    board = Board(made, {})
    assert board.remaining_s is None
    board.start(made.trials[0], 1)
    board.end(made.trials[0], outcome())
    assert board.remaining_s is not None
    assert board.remaining_s >= 0
    for trial in made.trials:
        board.end(trial, outcome())
    assert board.remaining_s == pytest.approx(0, abs=1e-6)


# The live table


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("glyphs", [UTF8, ASCII], ids=["utf8", "ascii"])
def test_the_live_table_shows_what_runs_and_what_was_found(
    width: int, glyphs: dict[str, str]
) -> None:
    made = planned()
    board = Board(made, {}, "cpu")
    board.end(made.trials[0], outcome(12.34))
    board.end(made.trials[1], Outcome("failed", "rank 1 ended: SIGKILL"))
    board.start(made.trials[2], 1)
    board.note = "starting 2 cpu actors"
    text = printed(live.render(board, 30, console(width), glyphs), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert re.match(rf"looks +{made.digest[:8]} +ring of 2 on cpu", lines[0])
    assert "2/16" in text
    assert "1 ok · 1 failed · 14 pending" in text
    if width >= 80:
        assert re.search(rf"{re.escape(glyphs['ok'])} +contiguous .* 12\.3 .* 0\.95", text)
        assert re.search(rf"{glyphs['failed']} +striped .* failed", text)
        assert re.search(rf"{glyphs['running']} +zigzag .* measuring", text)
    if width >= 140:
        assert "12.1–13.0" in text
        assert re.search(r"0\.161 +4\.00 +1\.50", text)


def test_the_bar_is_half_full_where_both_are_equally_fast() -> None:
    for ratio, full in (
        (0.0, ""),
        (1.0, "█████"),
        (0.9, "████▌"),
        (2.0, "█" * 10),
        (9.0, "█" * 10),
    ):
        assert live._bar(ratio, UTF8, "green").plain == full.ljust(10, "─")


def test_more_rows_than_the_terminal_has_scroll_with_what_runs() -> None:
    made = planned()
    board = Board(made, {})
    for at in range(16):
        board.start(made.trials[at], 1)
        text = printed(live.render(board, 5, console(), UTF8))
        rows = [line for line in text.splitlines() if re.match(r"[✓▶·] ", line)]
        assert len(rows) == 5
        assert sum("measuring" in line for line in rows) == 1
        assert "(11 rows not shown)" in text
        board.end(made.trials[at], outcome())


def test_correctness_shows_errors() -> None:
    made = planned(
        TEXT.replace("kind: latency", "kind: correctness") + "measure: {baseline: null}\n"
    )
    board = Board(made, {})
    board.end(made.trials[0], Outcome("ok", None, {"error_out": 0.25, "error_dq": 0.5}))
    text = printed(live.render(board, 30, console(), UTF8))
    assert "worst error" in text
    assert "0.500" in text
    assert "vs " not in text


def test_nothing_is_drawn_while_a_trial_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn on events only, at most at the rate; what came too soon is drawn once, later."""
    clock = [100.0]
    timers: list[Any] = []

    class Timer:
        def __init__(self, seconds: float, action: Any) -> None:
            self.seconds, self.action, self.cancelled = seconds, action, False
            timers.append(self)

        def start(self) -> None:
            pass

        def cancel(self) -> None:
            self.cancelled = True

    monkeypatch.setattr(threading, "Timer", Timer)
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    drawn: list[str] = []
    view = live.LiveTable(console())
    monkeypatch.setattr(view._live, "update", lambda *_, **__: drawn.append("now"))
    made = planned()
    view.sweep_started(made, {}, {})
    assert len(drawn) == 1
    view.trial_started(made.trials[0], 1)
    assert len(drawn) == 1
    assert timers[-1].seconds == pytest.approx(0.25)
    clock[0] += 0.25
    timers[-1].action()
    assert len(drawn) == 2
    clock[0] += 60  # a long trial: nobody draws
    assert all(timer.cancelled or timer is timers[-1] for timer in timers)
    view.trial_ended(made.trials[0], outcome())
    assert len(drawn) == 2
    clock[0] += 0.01
    view.trial_started(made.trials[1], 1)
    assert len(drawn) == 3
    assert timers[-1].cancelled
    view.close()
    assert not view._live.is_started


def test_a_terminal_gets_a_table_and_is_left_clean() -> None:
    to = console()
    view = live.LiveTable(to)
    follow(view, planned(), 16, {})
    assert not view._live.is_started
    assert view._timer is None
    written = to.file.getvalue()  # type: ignore[attr-defined]
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")  # the cursor is back


# Tables


def results(made: plan.Plan) -> list[TrialRow]:
    rows = [row(trial, outcome(10.0 + trial.index)) for trial in made.trials]
    rows[3] = row(made.trials[3], Outcome("failed", "rank 1 ended: SIGKILL"))
    rows[15] = row(made.trials[15], None)
    return rows


def test_the_results_table_ends_with_the_numbers() -> None:
    made = planned()
    table = tables.results_table(results(made), ("partition", "seq_len", "direction"))
    heads = [column.header for column in table.columns]
    assert heads == [
        "#", "partition", "length", "direction", "status", "median ms", "p20–p80 ms",
        "baseline ms", "ratio", "TFLOP/s", "peak MiB", "sent MiB", "why",
    ]  # fmt: skip
    to = console(200, terminal=False)
    tables.show(table, to)
    text = to.export_text()
    assert re.search(r"3 +zigzag +2048 +fwd +ok +12\.0 +11\.8–12\.6 +13\.0 +0\.92 +0\.161 ", text)
    assert re.search(r"4 +zigzag-token +2048 +fwd +failed +– .*rank 1 ended: SIGKILL", text)
    assert re.search(r"16 +zigzag-token +8192 +fwd\+bwd +pending", text)


def test_the_fastest_of_each_problem_stands_out() -> None:
    made = planned()
    rows = results(made)
    assert tables._fastest(rows) == {made.trials[index].key for index in (0, 4, 8, 12)}
    assert tables._fastest(rows[:1]) == set()


@pytest.mark.parametrize("width", [60, 80, 100, 130])
def test_a_narrow_terminal_keeps_what_matters(width: int) -> None:
    made = planned()
    to = console(width)
    rows = [one for one in results(made) if one.status == "ok"]
    tables.show(tables.results_table(rows, ("partition", "seq_len", "direction")), to)
    text = to.export_text()
    assert max(map(len, text.splitlines())) <= width
    if width >= 80:
        assert re.search(r"zigzag +2048 +fwd +ok +12\.0 .* 0\.92", text)


def test_a_pipe_gets_whole_lines() -> None:
    made = planned()
    to = Console(file=io.StringIO(), width=40)
    tables.show(tables.plan_table(made.trials), to)
    text = to.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert len(text.splitlines()) == 18
    assert to.width == 40


def test_large_results_are_shortened_to_what_tells_most() -> None:
    made = planned()
    rows = results(made)
    shown = tables.most_telling(rows, 3)
    assert [one.index for one in shown] == [0, 1, 3]
    assert tables.most_telling(rows, 16) == rows
    wrong = row(made.trials[9], Outcome("ok", None, {"error_out": 0.9}))
    rows[9] = wrong
    assert wrong in tables.most_telling(rows, 2)


def test_sweeps_are_listed() -> None:
    sweep = SweepRow(
        "0123456789abcdef", "looks", "latency", {}, "", {}, "complete", 0.0, 0.0, 16, {"ok": 16}
    )
    text = printed(tables.sweeps_table([sweep]))
    assert re.search(r"looks +0123456789ab +latency +complete +16 ok +19", text)
