"""Shares of ranks in the report: the work of documents and the rows that they make ranks send."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringray.lab.report import sweep_report
from ringray.lab.report.sweep_report import shares_of_ranks
from ringray.lab.trial.outcome import SweepRow, TrialRow
from tests.support.report_rows import outcome, planned, row

PACKED = """\
version: 1
name: shares
kind: latency
ring: {size: 2}
problem: {seq_len: 100, heads: 2, dtype: [float32, bfloat16], documents: {lengths: [60, 30, 10]}}
strategy: {partition: [contiguous, balanced], transport: [ring, direct]}
"""


def rows(text: str) -> list[TrialRow]:
    return [row(trial, outcome()) for trial in planned(text).trials]


def test_each_geometry_has_the_work_and_the_rows_of_its_ranks() -> None:
    measured = rows(PACKED)
    table = shares_of_ranks(measured)
    assert table is not None
    assert table.heads[:2] == ["partition", "transport"]
    lines = {tuple(line[:2]): [cell.value for cell in line[2:]] for line in table.rows}  # type: ignore[union-attr]
    assert len(table.rows) == len(lines) == 4, "both dtypes share a geometry"
    # The second rank has 10 queries of the first document, which see 50 keys elsewhere.
    first, second = 50 * 51 // 2, 10 * 50 + 10 * 11 // 2 + 30 * 31 // 2 + 10 * 11 // 2
    mean = (first + second) / 2
    assert lines["contiguous", "ring"] == [second, mean, first, mean / first, 25.0, 50.0]
    least, same, most, balance, received, busiest = lines["balanced", "direct"]
    assert (same, balance) == (mean, mean / most)
    assert least >= second
    assert most <= first
    assert 0 < received <= busiest < 50


def test_what_was_not_measured_or_cannot_be_read_has_no_line() -> None:
    measured = rows(PACKED)
    assert shares_of_ranks(rows(PACKED.replace(", documents: {lengths: [60, 30, 10]}", ""))) is None
    assert shares_of_ranks([replace(row, status="pruned") for row in measured]) is None
    for change in (
        {"partition": "auto"}, {"other": 1}, {"documents": [3]}, {"ring_size": 1000},
    ):  # fmt: skip
        changed = [replace(row, config=row.config | change) for row in measured]
        assert shares_of_ranks(changed) is None, change


def test_the_report_has_them_before_the_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_report, "charts", lambda rows: ())
    sweep = SweepRow("ab" * 32, "shares", "latency", {}, "", {}, "complete", 0.0, 0.0, 8, {"ok": 8})
    titles = [part.title for part in sweep_report.parts(sweep, rows(PACKED))]
    assert titles.index("Shares of ranks") == titles.index("All trials") - 1
    alone = rows(PACKED.replace(", documents: {lengths: [60, 30, 10]}", ""))
    assert "Shares of ranks" not in [part.title for part in sweep_report.parts(sweep, alone)]
