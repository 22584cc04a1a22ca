"""The answer of a sweep: the same winner everywhere, and words that say how sure it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringray.lab.cli import results
from ringray.lab.kinds import KINDS
from ringray.lab.report import sweep_report, verdict
from ringray.lab.tracking import mlflow_record as show
from ringray.lab.trial.outcome import SweepRow, Tracked, TrialRow
from tests.support.figure_rows import row, timed
from tests.support.report_rows import console

SWEEP = SweepRow("ab" * 32, "quick", "latency", {}, "", {}, "complete", 0.0, 0.0, 2, {"ok": 2})


def ran(index: int, times: list[float], **config: object) -> TrialRow:
    """A point with its runs; the baseline took 10 ms in each."""
    ordered = sorted(times)
    middle, fifth = ordered[len(ordered) // 2], len(ordered) // 5
    metrics = timed(middle, baseline=10.0)
    metrics |= {"p20_ms": ordered[fifth], "p80_ms": ordered[-1 - fifth]}
    samples = {"ms": times, "ratio": [one / 10 for one in times]}
    return replace(row(index, metrics, **config), samples=samples)


def test_the_answer_names_the_fastest_the_next_and_the_baseline() -> None:
    slow, fast = ran(0, [12.0, 12.5, 12.2]), ran(1, [8.0, 8.1, 7.9], partition="zigzag")
    (said,) = verdict.lines([slow, fast])
    assert said == (
        "zigzag is the fastest, 8.00 ms and 10.0 MiB per rank; next contiguous, slower by 52.5%; "
        "0.80 × the time of SDPA with 2 threads"
    )
    near = ran(2, [8.0, 8.3, 8.1], partition="striped")
    (said,) = verdict.lines([slow, fast, near])
    assert said.startswith("not decided: zigzag and striped are within their noise; zigzag takes 8")
    assert verdict.winners([slow, fast, near]) == []
    (said,) = verdict.lines([ran(0, [9.9, 10.1, 10.0])])
    assert said.startswith("contiguous ring takes 10.0 ms")
    assert said.endswith("1.00 × the time of SDPA with 2 threads, which is within the noise")
    (said,) = verdict.lines([ran(0, [12.0]), ran(1, [8.0], partition="zigzag")])
    assert said.startswith("not decided: too few runs to tell zigzag and contiguous apart; zigzag")


@pytest.mark.parametrize("kind", KINDS)
def test_only_kinds_whose_points_are_rivals_have_a_fastest(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_report, "charts", lambda rows: ())
    rows = [ran(0, [12.0, 12.5, 12.2]), ran(1, [8.0, 8.1, 7.9], partition="zigzag")]
    sweep, screen = replace(SWEEP, kind=kind), console()
    results.print_answer(screen, kind, rows, cores=2)
    texts = [
        screen.export_text(),
        show.note(sweep, rows, Tracked("", "7", "cd" * 16), ()),
        sweep_report.document([(sweep, rows)]),
    ]
    named = kind not in ("kernel-tune", "max-context")
    assert ["is the fastest" in text for text in texts] == [named] * 3


def test_every_problem_has_its_answer() -> None:
    rows = [ran(i, [9.0] * 3, seq_len=1024 * i) for i in range(1, 15)]
    said = verdict.lines(rows)
    assert said[0].startswith("1,024 tokens: contiguous ring takes 9.00 ms")
    assert len(said) == 13
    assert said[-1] == "and 2 more problems"
    assert verdict.lines([row(0, {}, "failed")]) == ["none, because no trial ended well"]
    assert verdict.lines([]) == []
    assert verdict.lines([row(0, {"loss": 5.0})]) == []


def test_errors_are_an_answer_too() -> None:
    rows = [row(0, {"error_out": 0.2, "error_dq": 0.7}), row(6, {"error_out": 1.5}, "failed")]
    assert verdict.lines(rows) == [
        "1 of 2 trials within the error budget; the worst takes 1.50 of it: #7"
    ]


@pytest.mark.parametrize(
    ("host", "said"),
    [(100.0, "other processes used 25% of 4 cores in 1 of 1 trial (at most 25%)"), (80.0, None)],
)
def test_a_busy_host_is_told(host: float, said: str | None) -> None:
    metrics = timed(9.0) | {"host_cpu_percent": host, "cpu_percent": 150.0}
    one = row(0, metrics, ring_size=2)
    assert str(verdict.busy([one], 4)).startswith(str(said))
    nice = verdict.busy([replace(one, metrics=metrics | {"niceness": 15.0})], 4) or ""
    assert ("so load at nice 0 takes precedence" in nice) == (said is not None)
    short = replace(one, started=1.0, ended=1.1)
    assert verdict.busy([short], 4) is None
    assert verdict.busy([one], 0) is None
