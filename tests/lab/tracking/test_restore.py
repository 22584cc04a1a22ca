"""A lost store is rebuilt from MLflow, to the bit."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringray.base.errors import UserError
from ringray.lab.store.store import Store
from ringray.lab.tracking import archive
from ringray.lab.tracking import location as place
from ringray.lab.tracking.restore import Restored, read_run, rebuild
from ringray.lab.trial.outcome import UNKNOWN, Outcome, SweepInfo
from tests.support.tracking_store import (
    DIGEST,
    ENVIRONMENT,
    begin,
    client,
    opened,
    outcome,
    runs,
    trials,
)


def _project(store: Store, experiment: str = "quick", digest: str = DIGEST) -> None:
    from ringray.lab.tracking.mlflow_sink import MLflowSink

    projection = MLflowSink(store, digest, place.resolve_uri(None), experiment, None)
    projection.refresh()
    for row in store.changed_since(digest, 0)[0]:
        projection.write(row)
    projection.log_files()


def _rebuilt(path: Path, selector: str = "quick") -> Restored:
    with Store(path) as fresh:
        return rebuild(client(), fresh, selector, place.resolve_uri(None))


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory, schema: Path) -> Iterator[Store]:
    """A store of seven ended trials, one of them measured twice, that MLflow has too."""
    with pytest.MonkeyPatch.context() as patch:
        yield from map(_measure, opened(tmp_path_factory.mktemp("home"), patch, schema))


def _measure(store: Store) -> Store:
    begin(store, trials(8, pruned=(7,)))
    for index, status in enumerate(("ok", "oom", "failed", "timeout", "ok")):
        store.record(DIGEST, trials(8)[index].key, outcome(index, status))
    long = Outcome(
        "ok", None, {"ratio": 1 / 3, "bad": math.inf, "odd name!": 2.0},
        {"ms": [math.sqrt(n) for n in range(2000)]}, "p" * 64, 2, 1e9, 1e9 + 1 / 3,
        ENVIRONMENT | {"chosen": {"source": "tuned"}, "other": "host"},
    )  # fmt: skip
    store.record(DIGEST, trials(8)[0].key, long)
    store.record(DIGEST, trials(8)[5].key, replace(long, reason="with 'quotes' \x07 and \u2028"))
    _project(store)
    return store


@pytest.fixture
def measured(tracked: Store) -> Iterator[Store]:
    """The same store, whose lines in MLflow a test may change."""
    file = Path(runs()[0][0].info.artifact_uri) / archive.TRIALS
    before = file.read_bytes()
    yield tracked
    file.write_bytes(before)


def _parent() -> str:
    return str(runs()[0][0].info.run_id)


def _lines() -> list[str]:
    return (Path(runs()[0][0].info.artifact_uri) / archive.TRIALS).read_text().splitlines()


def test_everything_comes_back(measured: Store, tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    assert _rebuilt(path) == Restored(DIGEST, "quick", added=7, unreadable=0, earlier=1)
    with Store(path) as fresh:
        old, new = measured.find("quick"), fresh.find("quick")
        assert replace(new, status=old.status, updated=old.updated, total=8) == old
        assert new.status == "interrupted"
        begin(fresh, trials(8, pruned=(7,)))
        for before, after in zip(measured.trials(DIGEST), fresh.trials(DIGEST), strict=True):
            assert after == before
            assert fresh.sequence(DIGEST, after.key) == measured.sequence(DIGEST, before.key)
    # A second time there is nothing to add; what the store has measured since is not replaced.
    with Store(path) as fresh:
        fresh.record(DIGEST, trials(8)[1].key, outcome(1, "ok", shift=50.0))
        newer = fresh.trials(DIGEST)
    assert _rebuilt(path, DIGEST[:6]).added == 0
    with Store(path) as fresh:
        assert fresh.trials(DIGEST) == newer


def _in_tags(name: str, content: dict[str, Any]) -> dict[str, str]:
    """The tags in which earlier versions kept a row."""
    text = base64.b64encode(zlib.compress(json.dumps(content).encode())).decode()
    pieces = [text[start : start + 4900] for start in range(0, len(text), 4900)]
    rest = {f"{name}.{number}": piece for number, piece in enumerate(pieces[1:], start=1)}
    return {name: f"{len(pieces)}:{pieces[0]}"} | rest


def test_runs_of_earlier_versions_are_read(measured: Store, tmp_path: Path) -> None:
    mlflow, (parents, children) = client(), runs()
    sweep, *recordings = map(json.loads, _lines())
    tags = {parents[0].info.run_id: _in_tags("mlflow.ringray.sweep", sweep)}
    for content in recordings:
        # Of trial 0 the earlier recording lacks its tag; a pruned point has no run.
        if content.pop("current") and content["key"] in children:
            packed = _in_tags("mlflow.ringray.trial", content)
            tags[children[content["key"]].info.run_id] = packed
    for run, named in tags.items():
        for name, text in named.items():
            mlflow.set_tag(run, name, text)
    mlflow.delete_tag(children[trials(8)[5].key].info.run_id, "mlflow.ringray.trial.1")
    (Path(parents[0].info.artifact_uri) / archive.TRIALS).unlink()
    path = tmp_path / "new.db"
    assert _rebuilt(path) == Restored(DIGEST, "quick", added=5, unreadable=2, earlier=0)
    with Store(path) as fresh:
        before = {row.key: row for row in measured.trials(DIGEST)}
        after = fresh.trials(DIGEST)
        assert all(row == before[row.key] for row in after if row.status)


def test_a_password_in_the_spec_stays_at_home(tmp_path: Path) -> None:
    spec = {"name": "quick", "tracking": {"uri": "http://me:hush@host", "experiment": "e"}}
    source = "name: quick\ntracking: {uri: 'http://me:hush@host', experiment: e}\n"
    with Store(tmp_path / "store.db") as store:
        store.begin(SweepInfo(DIGEST, "quick", "latency", spec, source, ENVIRONMENT), trials(1))
        (line,) = archive.lines(store, DIGEST)
    assert json.loads(line)["spec"]["tracking"] == {"uri": None, "experiment": "e"}
    assert "hush" not in line


def test_only_what_is_missing_is_added(measured: Store, tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    with Store(path) as fresh:
        nameless = SweepInfo(DIGEST, "lost-cafe", UNKNOWN, {}, "", {})  # as recover leaves it
        fresh.restore(nameless, 0.0, [])
    assert _rebuilt(path).added == 7
    with Store(path) as fresh:
        assert fresh.find("quick").source == measured.find("quick").source
    path = tmp_path / "other.db"
    with Store(path) as fresh:
        begin(fresh, trials(8))
        fresh.record(DIGEST, trials(8)[2].key, outcome(2, "ok", shift=9.0))
    assert _rebuilt(path).added == 6
    with Store(path) as fresh:
        assert fresh.find("quick").counts == {"ok": 4, "oom": 1, "timeout": 1, "pruned": 1}


def test_lines_that_cannot_be_read_are_measured_again(measured: Store, tmp_path: Path) -> None:
    lines = _lines()
    lines[1] = lines[1][:-1]
    lines[2] = lines[2].replace('"key": "', '"key": "../')
    lines[3] = lines[3].replace('"status": "oom"', '"status": "done"')
    lines[-1:] = ["[]", "null"]
    client().log_text(_parent(), "\n".join(lines), archive.TRIALS)
    restored = _rebuilt(tmp_path / "new.db")
    assert (restored.added, restored.earlier, restored.unreadable) == (4, 0, 5)


def test_a_run_is_read_without_a_store(measured: Store) -> None:
    sweep, rows = read_run(client(), _parent())
    assert sweep.spec == measured.find("quick").spec
    ended = [row for row in measured.trials(DIGEST) if row.status is not None]
    current = {row.key: row for row in rows}  # the last of each
    assert [current[row.key] for row in ended] == ended
    assert len(rows) == len(ended) + 1, "with the earlier measurement"
    with pytest.raises(UserError, match="is not the run of a sweep"):
        read_run(client(), runs()[1][trials(1)[0].key].info.run_id)


def test_what_is_not_there_is_said(measured: Store, tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    other = "cafe1" + "0" * 59
    measured.begin(SweepInfo(other, "another", "latency", {}, "", ENVIRONMENT), trials(1))
    _project(measured, "elsewhere", other)
    with pytest.raises(UserError, match=r"no sweep 'quack' in MLflow at .* has another, quick"):
        _rebuilt(path, "quack")
    with pytest.raises(UserError, match=r"'cafe' is not unique .*give more digits"):
        _rebuilt(path, "cafe")
    assert _rebuilt(path, "CAFE1").name == "another"
    client().log_text(_parent(), "", archive.TRIALS)
    for selector in ("cafec", "quick"):
        with pytest.raises(UserError, match=rf"'{selector}' .* cannot be rebuilt: its run lacks"):
            _rebuilt(path, selector)
    # Its tracker or a sync puts that right.
    _project(measured)
    assert _rebuilt(path, "quick").added == 7
