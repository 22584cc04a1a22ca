"""The live view of a sweep that runs."""

from __future__ import annotations

import io
import re
import time

import pytest

from ringray.lab.driver.events import SweepStarted, TrialEnded, TrialStarted
from ringray.lab.report import board as board_module
from ringray.lab.report import live
from ringray.lab.report.board import Board, trial_line
from ringray.lab.trial.outcome import Outcome
from tests.support.report_rows import (
    INFO,
    TEXT,
    console,
    follow,
    outcome,
    planned,
    printed,
    row,
)

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


def test_plain_lines_of_a_sweep() -> None:
    made = planned(TEXT.replace("heads: 2,", "heads: 2, window: [null, 3], causal: [true, false],"))
    file = io.StringIO()
    done = {made.runnable[0].key: row(made.runnable[0], outcome())}
    follow(live.view(file), made, 3, done)
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


# The live table


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize(("encoding", "marks"), [("utf-8", "✓✗▶"), ("ascii", "+x>")])
def test_the_live_table_shows_what_runs_and_what_was_found(
    width: int, encoding: str, marks: str
) -> None:
    made = planned()
    board = Board(made, {})
    board.end(made.trials[0], outcome(12.34))
    board.end(made.trials[1], Outcome("failed", "rank 1 ended: SIGKILL"))
    board.start(made.trials[2], 1)
    board.note = "starting 2 cpu actors"
    to = console(width, encoding=encoding)
    text = printed(live.render(board, 30, to), width, encoding)
    ok, failed, running = map(re.escape, marks)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert re.match(rf"looks +{made.digest[:8]} +ring of 2 on auto", lines[0])
    assert "2/16" in text
    assert "1 ok · 1 failed · 14 pending" in text
    assert not re.search("score|MFU|loss", text), "nothing that this kind does not measure"
    if width >= 80:
        assert "vs sdpa" in text
        assert re.search(rf"{ok}[ |]+contiguous .* 12\.3 .* 0\.95", text)
        assert re.search(rf"{failed}[ |]+striped .*failed", text)
        assert re.search(rf"{running}[ |]+zigzag .*measuring", text)
    if width >= 140:
        assert "12.1–13.0" in text
        assert re.search(r"0\.161[ |]+4\.00[ |]+1\.50", text)


def test_more_rows_than_the_terminal_has_scroll_with_what_runs() -> None:
    made = planned()
    board = Board(made, {})
    for at in range(16):
        board.start(made.trials[at], 1)
        text = printed(live.render(board, 5, console()))
        rows = [line for line in text.splitlines() if re.match(r"[✓▶·] ", line)]
        assert len(rows) == 5
        assert sum("measuring" in line for line in rows) == 1
        assert "(11 rows not shown)" in text
        board.end(made.trials[at], outcome())


def test_a_terminal_gets_a_table_and_is_left_clean() -> None:
    to = console()
    view = live.LiveTable(to)
    follow(view, planned(), 16, {})
    written = to.file.getvalue()  # type: ignore[attr-defined]
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")  # the cursor is back


def test_plain_lines_say_what_runs_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "QUIET_S", 0.02)
    made, file = planned(), io.StringIO()
    view = live.PlainLines(file)
    view.take(SweepStarted(made, INFO, {}))
    view.take(TrialStarted(made.trials[0], 1))
    until = time.monotonic() + 600
    while file.getvalue().count("measuring 1 of 16, ") < 2 and time.monotonic() < until:
        time.sleep(0.01)
    view.take(TrialEnded(made.trials[0], outcome()))
    view.close()
    assert file.getvalue().count("measuring 1 of 16, ") >= 2
    said = file.getvalue()
    time.sleep(0.1)
    assert file.getvalue() == said


def test_trials_side_by_side_have_times_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(board_module.time, "monotonic", lambda: now[0])
    board = Board(planned(), {})
    first, second, *_ = board.plan.trials
    board.start(first, 1)
    now[0] = 10.0
    board.start(second, 2)
    now[0] = 12.0
    said = printed(live.render(board, 30, console()))
    assert "measuring 12 s" in said
    assert "attempt 2 2.0 s" in said
    board.end(second, Outcome("ok", started=1.0, ended=3.0))
    assert [one.took_s for one in board.running.values()] == [12.0]
    board.end(first, Outcome("ok", started=1.0, ended=13.0))
    alone = Board(planned(), {})
    for trial, took in ((first, 12.0), (second, 2.0)):
        alone.start(trial, 1)
        now[0] += took
        alone.end(trial, Outcome("ok", started=1.0, ended=1.0 + took))
    assert board.remaining_s == pytest.approx(alone.remaining_s / 2)
