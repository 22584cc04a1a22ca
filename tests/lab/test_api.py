"""`ringray.lab` from Python: what it runs and returns, and how it fails."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from ringray import lab
from ringray.base import provenance
from ringray.base.errors import PlaceError, SpecError, UserError
from ringray.lab.driver.observer import Summary
from ringray.lab.plan import plan
from ringray.lab.specs import model as spec
from ringray.lab.store.store import Store, default_path
from ringray.lab.trial.config import FIELDS
from ringray.lab.trial.metrics import METRICS
from ringray.lab.trial.outcome import Outcome
from tests.support.small_spec import SMALL, fill

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for ``driver.run``, which measures nothing; what it was given is kept."""
    given: list[Any] = []

    def run(made: plan.Plan, *, store: Store, observer: Any, **more: Any) -> Summary:
        fill(store.path, made.spec.source, ended=2)
        observer.sweep_started(made, {})
        given.append((made, store.path, more))
        return Summary(made.digest, made.spec.name, {"ok": 2}, interrupted=bool(given[1:]))

    monkeypatch.setattr("ringray.lab.driver.run.run", run)
    return given


@pytest.mark.parametrize("form", ["path", "name", "text", "data"])
def test_a_spec_is_a_path_a_text_or_data(form: str, small: str, home: Path, driver: Any) -> None:
    forms = {"path": Path(small), "name": small, "text": SMALL, "data": yaml.safe_load(SMALL)}
    summary = lab.run(forms[form], changes=["problem.heads=4"])
    made, path, more = driver[0]
    assert summary.exit_code == 0
    assert made.digest == spec.parse(SMALL.replace("heads: 2", "heads: 4")).digest
    assert path == home / "store.db"
    assert (more["address"], more["tracking"], more["again"]) == (None, None, False)
    assert lab.results("small").attrs["digest"] == made.digest


def test_options_reach_the_driver_and_the_view(
    tmp_path: Path, home: Path, driver: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    view, store = io.StringIO(), tmp_path / "other.db"
    lab.run(SMALL, store=store, address="1.2.3.4:5", again=True, view=view)
    _, path, more = driver[0]
    assert path == store
    assert (more["address"], more["again"]) == ("1.2.3.4:5", True)
    assert view.getvalue().startswith("small ")
    assert capsys.readouterr() == ("", "")
    assert len(lab.results("small", store)) == 4
    assert not default_path().exists()


def test_an_interrupted_sweep_raises(home: Path, driver: Any) -> None:
    lab.run(SMALL)
    with pytest.raises(KeyboardInterrupt, match="the same call continues it"):
        lab.run(SMALL)


def test_mistakes_are_exceptions_with_the_texts_of_the_command_line(
    tmp_path: Path, home: Path, driver: Any
) -> None:
    data = yaml.safe_load(SMALL)
    for given, error, says in [
        ("nowhere.yaml", SpecError, "nowhere.yaml: no such file"),
        (SMALL.replace("heads: 2", "heads: x"), SpecError, "<spec>:6: problem.heads: got 'x'"),
        ({**data, "problem": {**data["problem"], "heads": 0}}, SpecError, "problem.heads: got 0"),
        ({**data, "name": object()}, SpecError, "is no plain data"),
        ({}, SpecError, "version"),
    ]:
        with pytest.raises(error, match=says.replace("[", r"\[")):
            lab.run(given)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="expected FIELD=VALUE"):
        lab.run(SMALL, changes=["problem.heads"])
    with pytest.raises(PlaceError, match="/proc/store"):
        lab.run(SMALL, store="/proc/store.db")
    assert driver == []
    with pytest.raises(UserError, match="is empty"):
        lab.results("small")
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
    assert second.predicted is not None
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


def test_a_sweep_without_a_result_is_an_empty_frame(home: Path) -> None:
    fill(default_path(), SMALL.replace("[null, 3]", "null"), ended=0)
    assert lab.results("small").empty
    assert lab.results("small", history=True).empty


def test_no_two_columns_have_one_name() -> None:
    fixed = {"status", "reason", "attempts", "time", "current", "predicted_ms", "hardware", "cores"}
    fixed |= {"commit", *provenance.versions()}
    both = {*FIELDS} & {*METRICS}
    assert both == {"hidden", "repeats"}  # which are metric.hidden and metric.repeats
    assert not fixed & ({*FIELDS} | {*METRICS})


def test_the_package_names_what_it_has() -> None:
    assert {"run", "results"} <= {*dir(lab)}
    with pytest.raises(AttributeError, match="no attribute 'measure'"):
        lab.measure  # noqa: B018


def test_the_notebook_holds_no_outputs() -> None:
    book = json.loads((ROOT / "docs" / "examples" / "results.ipynb").read_text("utf-8"))
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert book["nbformat"] == 4
