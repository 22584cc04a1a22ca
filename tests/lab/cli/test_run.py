"""``ringray run`` and ``resume``, with a driver that measures nothing."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringray.lab import cli
from ringray.lab.driver.observer import Summary
from ringray.lab.plan import plan
from ringray.lab.specs import model as spec
from ringray.lab.store.store import Store, default_path
from ringray.lab.trial.outcome import Outcome, SweepInfo
from tests.support.small_spec import SMALL, fill


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for ``driver.run``: every waiting trial is ok; what it was given is kept."""
    given: list[Any] = []

    def run(made: plan.Plan, *, store: Store, observer: Any, **more: Any) -> Any:
        given.append(SimpleNamespace(plan=made, **more))
        fill(store.path, made.spec.source, ended=0)
        rows = {row.key: row for row in store.trials(made.digest)}
        done = {key: row for key, row in rows.items() if row.status == "ok"}
        observer.sweep_started(made, done)
        for one in made.runnable:
            if one.key not in done:
                observer.trial_started(one, 1)
                outcome = Outcome("ok", None, {"median_ms": 1.5}, {}, "point", 1, 1.0, 2.0)
                store.record(made.digest, one.key, outcome)
                observer.trial_ended(one, outcome)
        store.finish(made.digest, "complete")
        summary = Summary(
            made.digest, made.spec.name, counts=store.find(made.digest).counts, wall_s=1.0,
            ui_command="mlflow ui --backend-store-uri sqlite:///x\nthen open http://there",
        )  # fmt: skip
        observer.sweep_ended(summary)
        return summary

    monkeypatch.setattr("ringray.lab.driver.run.run", run)
    return given


def test_run_prints_lines_and_a_summary(
    small: str, home: Path, driver: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", small, "--address", "ray://somewhere:1"]) == 0
    out = capsys.readouterr().out
    assert "small " in out
    assert "[1/6] contiguous causal no-window  ok  1.50 ms" in out
    assert "6 ok · 2 pruned" in out
    assert f"store:  {home / 'store.db'}" in out
    assert "mlflow: mlflow ui --backend-store-uri sqlite:///x\n        then open http://th" in out
    assert "answer: causal no-window: not decided: too few runs to tell contiguous and" in out
    assert driver[0].address == "ray://somewhere:1"
    assert driver[0].tracking is None  # the spec turns it off
    assert driver[0].json_path is None


def test_json_to_stdout_leaves_stdout_to_the_records(
    small: str, home: Path, driver: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", small, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "6 ok" in err
    assert driver[0].json_path == Path("/dev/stdout")


def test_an_interrupted_run_says_how_to_go_on(
    small: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(made: plan.Plan, *, store: Store, **_: Any) -> Any:
        if recorded:
            fill(store.path, made.spec.source)
        return Summary(made.digest, made.spec.name, interrupted=True, wall_s=1.0)

    monkeypatch.setattr("ringray.lab.driver.run.run", interrupted)
    recorded = False
    assert cli.main(["run", small]) == 130
    assert "interrupted before the first record" in capsys.readouterr().out
    recorded = True
    assert cli.main(["run", small, "--store", str(home / "other.db")]) == 130
    out = capsys.readouterr().out
    assert f"continue with: ringray resume small --store {home / 'other.db'}" in out
    assert "4 pending" in out
    assert len(re.findall(r"^\d+ +(contiguous|zigzag) ", out, re.M)) == 2  # of what was measured


def test_resume_measures_what_is_missing(
    home: Path, tmp_path: Path, driver: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "other.db"
    made = fill(store)
    assert cli.main(["resume", "small", "--store", str(store)]) == 0
    out = capsys.readouterr().out
    assert driver[0].plan.digest == made.digest
    assert "6 trials, 2 trials measured before" in out
    assert "[3/6]" in out
    assert "[2/6]" not in out


def test_a_sweep_is_resumed_from_its_meaning_when_its_source_reads_differently(
    home: Path, tmp_path: Path, driver: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    made = plan.build(spec.parse(SMALL))
    with Store(default_path()) as store:
        described: dict[str, Any] = {}
        canonical = made.spec.canonical()
        source = SMALL.replace("seq_len: 64", "seq_len: 128")
        begun = SweepInfo(made.digest, "small", "latency", canonical, source, described)
        store.begin(begun, [])
    assert cli.main(["resume", "small"]) == 0
    assert driver[0].plan.digest == made.digest
    with Store(default_path()) as store:
        other = {**canonical, "problem": {**canonical["problem"], "seq_len": 32}}
        store.begin(SweepInfo(made.digest, "small", "latency", other, source, described), [])
    capsys.readouterr()
    assert cli.main(["resume", "small"]) == 2
    assert "another version of ringray" in capsys.readouterr().err


def test_a_tracking_server_that_is_not_there_ends_the_run_before_it_starts(
    tmp_path: Path, home: Path, driver: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tracked.yaml"
    path.write_text(SMALL.replace("{enabled: false}", "{uri: 'http://127.0.0.1:9'}"))
    assert cli.main(["run", str(path)]) == 2
    assert "http://127.0.0.1:9" in capsys.readouterr().err
    assert driver == []
    assert cli.main(["run", str(path), "--no-tracking"]) == 0


def test_again_reaches_the_driver(home: Path, small: str, driver: list[Any]) -> None:
    for options in ([], ["--again"]):
        assert cli.main(["run", small, *options]) == 0
    assert [one.again for one in driver] == [False, True]
