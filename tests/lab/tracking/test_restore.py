"""A lost store is rebuilt from MLflow, to the bit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ringray.base.errors import UserError
from ringray.lab.store.store import Store
from ringray.lab.tracking import archive as kept
from ringray.lab.tracking import location as place
from ringray.lab.tracking.restore import Restored, fetched, read, rebuild, restore
from ringray.lab.trial.outcome import NOT_REQUESTED, UNKNOWN, Outcome, SweepInfo
from tests.support.tracking_store import DIGEST, ENVIRONMENT, begin, client, outcome, runs, trials


def _project(store: Store, experiment: str = "quick", digest: str = DIGEST) -> None:
    from ringray.lab.tracking.projection import Projection

    projection = Projection(store, digest, place.resolve_uri(None), experiment, None)
    projection.refresh()
    for row in store.changed_since(digest, 0)[0]:
        projection.write(row)
    projection.summarise()


def _rebuilt(path: Path, selector: str = "quick") -> Restored:
    with Store(path) as fresh:
        return rebuild(client(), fresh, selector, place.resolve_uri(None))


def _measured(store: Store) -> None:
    begin(store, trials(8, pruned=(7,)))
    for index, status in enumerate(("ok", "oom", "failed", "timeout", "ok")):
        store.record(DIGEST, trials(8)[index].key, outcome(index, status))
    long = Outcome(
        "ok", None, {"ratio": 1 / 3, "bad": math.inf, "odd name!": 2.0},
        {"ms": [math.sqrt(n) for n in range(2000)]}, "p" * 64, 2, 1e9, 1e9 + 1 / 3,
        ENVIRONMENT | {"chosen": {"source": "tuned"}, "other": "host"},
    )  # fmt: skip
    store.record(DIGEST, trials(8)[0].key, long)
    store.record(DIGEST, trials(8)[5].key, replace(long, reason="with 'quotes' \x07 and more"))


def test_everything_comes_back(store: Store, tmp_path: Path) -> None:
    _measured(store)
    _project(store)
    path = tmp_path / "new.db"
    assert _rebuilt(path) == Restored(DIGEST, "quick", added=7, unreadable=0, earlier=1)
    with Store(path) as fresh:
        old, new = store.find("quick"), fresh.find("quick")
        assert replace(new, status=old.status, updated=old.updated, total=8) == old
        assert new.status == "interrupted"
        begin(fresh, trials(8, pruned=(7,)))
        for before, after in zip(store.trials(DIGEST), fresh.trials(DIGEST), strict=True):
            assert after == before
            assert fresh.sequence(DIGEST, after.key) == store.sequence(DIGEST, before.key)
    # A second time there is nothing to add; what the store has measured since is not replaced.
    with Store(path) as fresh:
        fresh.record(DIGEST, trials(8)[1].key, outcome(1, "ok", shift=50.0))
        newer = fresh.trials(DIGEST)
    assert _rebuilt(path, DIGEST[:6]).added == 0
    with Store(path) as fresh:
        assert fresh.trials(DIGEST) == newer


def test_a_password_in_the_spec_stays_at_home(store: Store) -> None:
    spec = {"name": "quick", "tracking": {"uri": "http://me:hush@host", "experiment": "e"}}
    source = "name: quick\ntracking: {uri: 'http://me:hush@host', experiment: e}\n"
    store.begin(SweepInfo(DIGEST, "quick", "latency", spec, source, ENVIRONMENT), trials(1))
    found = kept.sweep_of(kept.sweep_tags(store.find("quick")))
    assert found is not None
    assert found[0].spec == {"name": "quick", "tracking": {"uri": None, "experiment": "e"}}
    assert "hush" not in repr(found)


def test_only_what_is_missing_is_added(store: Store, tmp_path: Path) -> None:
    _measured(store)
    _project(store)
    path = tmp_path / "new.db"
    with Store(path) as fresh:
        nameless = SweepInfo(DIGEST, "lost-cafe", UNKNOWN, {}, "", {})  # as recover leaves it
        fresh.restore(nameless, 0.0, [])
    assert _rebuilt(path).added == 7
    with Store(path) as fresh:
        assert fresh.find("quick").source == store.find("quick").source
    path = tmp_path / "other.db"
    with Store(path) as fresh:
        begin(fresh, trials(8))
        fresh.record(DIGEST, trials(8)[2].key, outcome(2, "ok", shift=9.0))
    assert _rebuilt(path).added == 6
    with Store(path) as fresh:
        assert fresh.find("quick").counts == {"ok": 4, "oom": 1, "timeout": 1, "pruned": 1}


def test_a_run_that_was_tampered_with_is_measured_again(store: Store, tmp_path: Path) -> None:
    _measured(store)
    _project(store)
    mlflow, (_, children) = client(), runs()
    ids = [children[trial.key].info.run_id for trial in trials(6)]
    mlflow.delete_tag(ids[0], f"{kept.TRIAL_TAG}.1")  # a piece of a long one
    mlflow.set_tag(ids[1], kept.TRIAL_TAG, "1:bm90IHppcHBlZA==")
    mlflow.set_tag(ids[2], "ringray.record", "0" * 16)
    mlflow.delete_tag(ids[3], kept.TRIAL_TAG)
    mlflow.delete_run(ids[4])
    found = _rebuilt(tmp_path / "new.db")
    assert (found.added, found.unreadable) == (3, 4), "one has an earlier run"


def test_a_run_is_read_without_a_store_and_stays_as_it_is(store: Store) -> None:
    _measured(store)
    _project(store)
    (parent,), children = runs()
    tags = [run.data.tags for run in (parent, *children.values())]
    info, rows = fetched(parent.info.run_id)
    assert info.spec == store.find("quick").spec
    ended = [row for row in store.trials(DIGEST) if row.status is not None]
    current = {row.key: row for row in rows}  # the last of each
    assert [current[row.key] for row in ended] == ended
    assert len(rows) == len(ended) + 1, "with the earlier measurement"
    (after,), others = runs()
    assert [run.data.tags for run in (after, *others.values())] == tags
    with pytest.raises(UserError, match="is not the run of a sweep"):
        read(client(), children[trials(1)[0].key].info.run_id)
    with pytest.raises(UserError, match="not found"):
        fetched("0" * 32)


def test_what_is_not_there_is_said(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    with pytest.raises(UserError, match=r"no sweep 'quick' in MLflow at .* has none of ringray's"):
        _rebuilt(path)
    _measured(store)
    _project(store)
    other = "cafe1" + "0" * 59
    store.begin(SweepInfo(other, "another", "latency", {}, "", ENVIRONMENT), trials(1))
    _project(store, "elsewhere", other)
    with pytest.raises(UserError, match=r"no sweep 'quack' .* has another, quick"):
        _rebuilt(path, "quack")
    with pytest.raises(UserError, match=r"'cafe' is not unique .*give more digits"):
        _rebuilt(path, "cafe")
    assert _rebuilt(path, "CAFE1").name == "another"
    (parent,), _ = runs()
    client().delete_tag(parent.info.run_id, kept.SWEEP_TAG)
    with pytest.raises(UserError, match=r"'cafec' .* cannot be rebuilt: its parent run lacks"):
        _rebuilt(path, "cafec")
    with pytest.raises(UserError, match=r"'quick' .* cannot be rebuilt"):
        _rebuilt(path, "quick")
    # Its tracker or a sync puts that right.
    _project(store)
    assert _rebuilt(path, "quick").added == 7


def test_points_that_never_ran_have_no_runs_beyond_the_first(store: Store) -> None:
    pruned = tuple(range(1, 51))
    begin(store, trials(60, pruned=pruned))
    for index in range(51, 60):
        store.record(DIGEST, trials(60)[index].key, Outcome("pruned", NOT_REQUESTED, point="p"))
    store.record(DIGEST, trials(60)[0].key, outcome(0))
    for _ in range(2):  # the same again when it is taken up
        _project(store)
        (parent,), children = runs()
        statuses = [run.data.tags["ringray.status"] for run in children.values()]
        assert (statuses.count("ok"), statuses.count("pruned")) == (1, 36)
        note = parent.data.tags["mlflow.note.content"]
        assert "23 of the pruned points have no run of their own" in note
        assert parent.data.metrics["trials_pruned"] == 59
    # One that is run after all gets its run.
    store.record(DIGEST, trials(60)[55].key, outcome(55))
    _project(store)
    assert runs()[1][trials(60)[55].key].data.tags["ringray.status"] == "ok"


@pytest.mark.exhaustive
def test_by_a_process_of_its_own(store: Store, tmp_path: Path) -> None:
    _measured(store)
    _project(store)
    path = tmp_path / "new.db"
    Store(path).close()
    assert restore(path, "quick", None) == Restored(DIGEST, "quick", 7, 0, 1)
    with pytest.raises(UserError, match="no sweep 'quack' in MLflow"):
        restore(path, "quack", None)
