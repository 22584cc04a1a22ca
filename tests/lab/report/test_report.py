"""Reports of plans and results; the answer of a sweep, and words that say how sure it is."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from ringray.lab.cli import results as results_view
from ringray.lab.kinds import KINDS
from ringray.lab.plan import plan
from ringray.lab.report import replicas, sweep_report, tables, verdict
from ringray.lab.report.board import Board
from ringray.lab.tracking import mlflow_record as show
from ringray.lab.trial.outcome import Outcome, SweepRow, Tracked, TrialRow
from tests.support.figure_rows import row as drawn_row
from tests.support.figure_rows import timed
from tests.support.report_rows import (
    TEXT,
    console,
    outcome,
    planned,
    row,
)

# The board


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
    assert board.labels[first[2].key].endswith(" replica2")
    assert board.groups[0].status == "ok"
    board.end(first[1], Outcome("timeout", "too slow"))
    assert board.groups[0].status == "timeout"
    assert (board.done, board.counts) == (3, {"ok": 2, "timeout": 1})


def test_the_rest_is_guessed_from_what_was_predicted() -> None:
    made = planned()
    board = Board(made, {})
    assert board.remaining_s is None
    board.start(made.trials[0], 1)
    board.end(made.trials[0], outcome(started=100.0, ended=101.0))
    assert board.remaining_s >= 0
    for trial in made.trials:
        board.end(trial, outcome())
    assert board.remaining_s == pytest.approx(0, abs=1e-6)


# Tables


def results(made: plan.Plan, apart: float = 0.0) -> list[TrialRow]:
    times = [10.0 + trial.index + apart * trial.index**2 for trial in made.trials]
    rows = [row(trial, outcome(ms)) for trial, ms in zip(made.trials, times, strict=True)]
    rows[3] = row(made.trials[3], Outcome("failed", "rank 1 ended: SIGKILL"))
    rows[15] = row(made.trials[15], None)
    return rows


def test_the_results_table_ends_with_the_numbers() -> None:
    made = planned()
    table = tables.results_table(results(made), ("partition", "seq_len", "direction"))
    to = console(200, terminal=False)
    tables.show(table, to)
    text = to.export_text()
    assert re.search(r"# +partition +length +direction +status +median ms +p20–p80 ms", text)
    assert re.search(r" baseline ms +ratio +TFLOP/s +peak MiB +sent MiB +why *\n", text)
    assert re.search(r"3 +zigzag +2048 +fwd +ok +12\.0 +11\.8–12\.6 +13\.0 +0\.92 +0\.161 ", text)
    assert re.search(r"4 +zigzag-token +2048 +fwd +failed +– .*rank 1 ended: SIGKILL", text)
    assert re.search(r"16 +zigzag-token +8192 +fwd\+bwd +pending", text)


def test_the_results_say_what_was_predicted() -> None:
    rows = [
        replace(one, predicted={"time_ms": 8.0, "peak_memory_bytes": 4 << 20})
        for one in results(planned())
    ]
    fields = ("partition", "seq_len", "direction")
    assert re.search(r"3 +zigzag .* 1\.50 *\n", shown_on(200, rows[:3], fields))
    assert "÷ predicted" not in shown_on(80, rows[:3], fields)
    # Ten, eleven and twelve ms where eight were predicted.
    assert verdict.predictions(rows[:3]) == (
        "median error 38%, 90th percentile 48% over 3 trials (memory 0%)"
    )
    assert verdict.predictions(rows[3:4]) is None
    assert verdict.predictions(results(planned())) is None
    point = replicas.merged([replace(one, config=rows[0].config) for one in rows[:3]])
    assert point[0].numbers["prediction_ratio"] == 11.0 / 8


def shown_on(width: int, rows: list[TrialRow], fields: tuple[str, ...]) -> str:
    to = console(width)
    tables.show(tables.results_table(rows, fields), to)
    return to.export_text()


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
    rows = results(made, apart=10.0)
    shown = tables.most_telling(rows, 3)
    assert [one.index for one in shown] == [0, 3, 4]
    assert [one.index for one in tables.most_telling(rows, 6)] == [0, 1, 3, 4, 8, 12]
    assert tables.most_telling(rows, 16) == rows
    wrong = row(made.trials[9], Outcome("ok", None, {"error_out": 0.9}))
    rows[9] = wrong
    assert wrong in tables.most_telling(rows, 2)


# The answer

SWEEP = SweepRow("ab" * 32, "quick", "latency", {}, "", {}, "complete", 0.0, 0.0, 2, {"ok": 2})


def ran(index: int, times: list[float], **config: object) -> TrialRow:
    """A point with its runs; the baseline took 10 ms in each."""
    ordered = sorted(times)
    middle, fifth = ordered[len(ordered) // 2], len(ordered) // 5
    metrics = timed(middle, baseline=10.0)
    metrics |= {"p20_ms": ordered[fifth], "p80_ms": ordered[-1 - fifth]}
    samples = {"ms": times, "ratio": [ms / 10 for ms in times]}
    return replace(drawn_row(index, metrics, **config), samples=samples)


def test_the_answer_names_the_fastest_the_next_and_the_baseline() -> None:
    slow, fast = ran(0, [12.0, 12.5, 12.2]), ran(1, [8.0, 8.1, 7.9], partition="zigzag")
    (line,) = verdict.lines([slow, fast])
    assert line == (
        "zigzag is the fastest, 8.00 ms and 10.0 MiB per rank; next contiguous, slower by 52.5%; "
        "0.80 × the time of SDPA with 2 threads"
    )
    near = ran(2, [8.0, 8.3, 8.1], partition="striped")
    (line,) = verdict.lines([slow, fast, near])
    assert line.startswith("not decided: zigzag and striped are within their noise; zigzag takes 8")
    assert verdict.winners([slow, fast, near]) == []
    (line,) = verdict.lines([ran(0, [9.9, 10.1, 10.0])])
    assert line.startswith("contiguous ring takes 10.0 ms")
    assert line.endswith("1.00 × the time of SDPA with 2 threads, which is within the noise")
    (line,) = verdict.lines([ran(0, [12.0]), ran(1, [8.0], partition="zigzag")])
    assert line.startswith("not decided: too few runs to tell zigzag and contiguous apart; zigzag")


@pytest.mark.parametrize("kind", KINDS)
def test_only_kinds_whose_points_are_rivals_have_a_fastest(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_report, "charts", lambda rows: ())
    rows = [ran(0, [12.0, 12.5, 12.2]), ran(1, [8.0, 8.1, 7.9], partition="zigzag")]
    sweep, screen = replace(SWEEP, kind=kind), console()
    results_view.print_answer(screen, kind, rows, cores=2)
    texts = [
        screen.export_text(),
        show.note(sweep, rows, Tracked("", "7", "cd" * 16), ()),
        sweep_report.document([(sweep, rows)]),
    ]
    named = kind not in ("kernel-tune", "max-context")
    assert ["is the fastest" in text for text in texts] == [named] * 3


def test_every_problem_has_its_answer() -> None:
    rows = [ran(i, [9.0] * 3, seq_len=1024 * i) for i in range(1, 15)]
    answers = verdict.lines(rows)
    assert answers[0].startswith("1,024 tokens: contiguous ring takes 9.00 ms")
    assert len(answers) == 13
    assert answers[-1] == "and 2 more problems"
    assert verdict.lines([drawn_row(0, {}, "failed")]) == ["none, because no trial ended well"]
    assert verdict.lines([]) == []
    assert verdict.lines([drawn_row(0, {"loss": 5.0})]) == []


def test_errors_are_an_answer_too() -> None:
    rows = [
        drawn_row(0, {"error_out": 0.2, "error_dq": 0.7}),
        drawn_row(6, {"error_out": 1.5}, "failed"),
    ]
    assert verdict.lines(rows) == [
        "1 of 2 trials within the error budget; the worst takes 1.50 of it: #7"
    ]


@pytest.mark.parametrize(
    ("host", "said"),
    [(100.0, "other processes used 25% of 4 cores in 1 of 1 trial (at most 25%)"), (80.0, None)],
)
def test_a_busy_host_is_told(host: float, said: str | None) -> None:
    metrics = timed(9.0) | {"host_cpu_percent": host, "cpu_percent": 150.0}
    row = drawn_row(0, metrics, ring_size=2)
    assert str(verdict.busy([row], 4)).startswith(str(said))
    nice = verdict.busy([replace(row, metrics=metrics | {"niceness": 15.0})], 4) or ""
    assert ("so load at nice 0 takes precedence" in nice) == (said is not None)
    short = replace(row, started=1.0, ended=1.1)
    assert verdict.busy([short], 4) is None
    assert verdict.busy([row], 0) is None
