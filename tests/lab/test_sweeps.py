"""`ringray.lab` from Python: what it runs and returns, and how it fails."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from ringray import lab
from ringray.base.errors import PlaceError, SpecError, UserError
from ringray.lab.specs import model as spec
from ringray.lab.store.store import Store, default_path
from ringray.lab.trial.outcome import Outcome
from tests.support.small_spec import SMALL, fill
from tests.support.sweep_world import Rings, machine, stand_in

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    return stand_in(monkeypatch, machine())


@pytest.mark.parametrize("form", ["path", "name", "text", "data"])
def test_a_spec_is_a_path_a_text_or_data(
    form: str, small: str, home: Path, addresses: list[str | None]
) -> None:
    forms = {"path": Path(small), "name": small, "text": SMALL, "data": yaml.safe_load(SMALL)}
    summary = lab.run(forms[form], changes=["problem.heads=4"])
    assert (summary.exit_code, summary.measured, summary.counts) == (0, 6, {"ok": 6, "pruned": 2})
    assert summary.digest == spec.parse(SMALL.replace("heads: 2", "heads: 4")).digest
    assert addresses == [None]
    assert lab.results("small").attrs["digest"] == summary.digest
    assert (home / "store.db").exists()


def test_options_reach_the_driver_and_the_view(
    tmp_path: Path,
    home: Path,
    addresses: list[str | None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view, store, lines = io.StringIO(), tmp_path / "other.db", tmp_path / "a.jsonl"
    lab.run(SMALL, store=store, address="1.2.3.4:5", json=str(lines), view=view)
    assert addresses == ["1.2.3.4:5"]
    assert "\n[6/6] " in view.getvalue()
    assert capsys.readouterr() == ("", "")
    assert len(lab.results("small", store)) == len(lines.read_text().splitlines()) == 8
    assert not default_path().exists()
    monkeypatch.setattr(Rings, "most", 8)
    with pytest.raises(KeyboardInterrupt, match="the same call continues it"):
        lab.run(SMALL, store=store, again=True)


def test_mistakes_are_exceptions_with_the_texts_of_the_command_line(
    home: Path, addresses: list[str | None]
) -> None:
    data = yaml.safe_load(SMALL)
    for given, error, says in [
        ("nowhere.yaml", SpecError, "nowhere.yaml: no such file"),
        (SMALL.replace("heads: 2", "heads: x"), SpecError, "<spec>:6: problem.heads: got 'x'"),
        ({**data, "name": object()}, SpecError, "is no plain data"),
    ]:
        with pytest.raises(error, match=says.replace("[", r"\[")):
            lab.run(given)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="expected FIELD=VALUE"):
        lab.run(SMALL, changes=["problem.heads"])
    with pytest.raises(PlaceError, match="/proc/store"):
        lab.run(SMALL, store="/proc/store.db")
    assert addresses == []
    fill(default_path())
    with pytest.raises(UserError, match="did you mean 'small'"):
        lab.results("smal")


def test_results_have_a_row_for_each_measurement(home: Path) -> None:
    made = fill(default_path(), ended=1)
    with Store(default_path()) as store:
        second, third = made.runnable[1:3]
        ended = datetime(2026, 11, 25, tzinfo=UTC).timestamp()
        samples = {"ms": [1.0, 2.0], "ratio": [0.5, 0.6]}
        metrics = {"median_ms": 1.5, "hidden": 0.25}
        right = Outcome("ok", None, metrics, samples, "p", 2, ended - 1, ended)
        store.record(made.digest, second.key, right)
        store.record(made.digest, third.key, Outcome("failed", "gone", point="p", ended=ended))
    frame = lab.results("small")
    assert len(frame) == 5  # two are pruned, three have not ended
    assert frame.attrs == {"sweep": "small", "digest": made.digest, "status": "interrupted"}
    ok, failed = frame[frame["median_ms"] == 1.5].iloc[0], frame[frame.status == "failed"].iloc[0]
    assert ok["partition"] == second.config.strategy.partition
    assert ok["time"] == datetime(2026, 11, 25, tzinfo=UTC)
    assert ok["metric.hidden"] == 0.25
    assert (ok["attempts"], ok["samples.ms"], ok["samples.ratio"]) == (2, [1.0, 2.0], [0.5, 0.6])
    assert ok["predicted_ms"] == second.predicted.time_ms
    assert ok["prediction_ratio"] == pytest.approx(1.5 / second.predicted.time_ms)
    assert ok["cores"] > 0
    assert {"hardware", "torch", "triton", "ringray", "commit"} <= {*frame.columns}
    assert (failed["reason"], failed["samples.ms"] != failed["samples.ms"]) == ("gone", True)
    assert "current" not in frame


def test_history_adds_earlier_measurements(home: Path) -> None:
    made = fill(default_path(), ended=1)
    with Store(default_path()) as store:
        again = Outcome("ok", None, {"median_ms": 7.0}, {}, "p", 1, 3.0, 4.0)
        store.record(made.digest, made.runnable[0].key, again)
    assert lab.results("small")["median_ms"].dropna().tolist() == [7.0]
    frame = lab.results("small", history=True)
    both = frame.dropna(subset="median_ms")
    assert both["median_ms"].tolist() == [12.34, 7.0]
    assert both["current"].tolist() == [False, True]
    assert (frame.status == "pruned").sum() == 2
