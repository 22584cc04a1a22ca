"""Several stores that track one sweep to one MLflow, and a store that measures again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringray.lab.store.store import Store
from ringray.lab.tracking import location as place
from ringray.lab.tracking import mlflow_record as show
from ringray.lab.tracking.restore import Restored, rebuild
from ringray.lab.trial.outcome import NOT_REQUESTED, Outcome, SweepInfo
from tests.support.tracking_store import DIGEST, ENVIRONMENT, begin, client, outcome, trials

COUNT = 3


def _open(store: Store) -> Any:
    from ringray.lab.tracking.mlflow_sink import MLflowSink

    projection = MLflowSink(store, DIGEST, place.resolve_uri(None), "quick", None)
    projection.refresh()
    return projection


def _write(store: Store, projection: Any) -> None:
    for recording in store.changed_since(DIGEST, 0)[0]:
        projection.write(recording)
    projection.summarise()
    projection.log_files()
    projection.close()


def _measure(store: Store, shift: float, count: int = COUNT) -> None:
    begin(store, trials(COUNT))
    for index in range(count):
        store.record(DIGEST, trials(COUNT)[index].key, outcome(index, shift=shift))
    store.finish(DIGEST, "complete")


def _of(store: Store) -> tuple[Any, list[Any]]:
    """The one parent run of a store, and its child runs."""
    found = client().search_runs(
        [client().get_experiment_by_name("quick").experiment_id],
        filter_string=f"tags.`ringray.store` = '{store.identity}'",
    )
    (parent,) = [run for run in found if run.data.tags["ringray.role"] == "sweep"]
    children = [run for run in found if run is not parent]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} <= {parent.info.run_id}
    return parent, children


def _check(store: Store) -> None:
    """Every recording of the store is one run of its own; the current ones are marked."""
    _, children = _of(store)
    shown = [
        (run.data.tags["ringray.record"], run.data.tags["ringray.current"]) for run in children
    ]
    rows = [*store.trials(DIGEST), *(kept.trial for kept in store.history(DIGEST))]
    flags = ["true"] * len(store.trials(DIGEST)) + ["false"] * len(store.history(DIGEST))
    held = [(show.record_digest(row), flag) for row, flag in zip(rows, flags, strict=True)]
    assert sorted(shown) == sorted((one, flag) for one, flag in held)
    assert {run.info.status for run in children} == {"FINISHED"}


def _trash() -> list[Any]:
    from mlflow.entities import ViewType

    experiments = [one.experiment_id for one in client().search_experiments()]
    return list(client().search_runs(experiments, run_view_type=ViewType.DELETED_ONLY))


@pytest.fixture
def second(store: Store, tmp_path: Path) -> Any:
    with Store(tmp_path / "second.db") as made:
        yield made


def test_two_stores_write_beside_each_other(store: Store, second: Store) -> None:
    both = (store, second)
    for shift, written in enumerate(both):
        _measure(written, 100.0 * shift)
    for written, projection in [(written, _open(written)) for written in both]:  # at the same time
        _write(written, projection)
    for _ in range(2):  # or one after the other, again and again
        for written in both:
            _write(written, _open(written))
    for written in both:
        _check(written)
    assert _trash() == []
    assert len({_of(written)[0].info.run_id for written in both}) == 2


def test_measured_again_is_another_run_and_the_older_one_stays(store: Store) -> None:
    _measure(store, 0.0)
    _write(store, _open(store))
    before = {run.info.run_id for run in _of(store)[1]}
    _measure(store, 100.0, count=2)
    for _ in range(2):
        _write(store, _open(store))
        _check(store)
    parent, children = _of(store)
    assert before < {run.info.run_id for run in children}
    assert parent.data.metrics["trials_ok"] == COUNT
    assert parent.data.metrics["best_ratio"] == 0.9
    assert _trash() == []
    # Back: the older measurement is current, without a new run.
    info = SweepInfo(DIGEST, "quick", "latency", {"name": "quick"}, "name: quick\n", ENVIRONMENT)
    store.begin(info, trials(COUNT), {trials(COUNT)[0].key: 1})
    _write(store, _open(store))
    _check(store)
    assert len(_of(store)[1]) == len(children)


def test_a_trial_that_is_measured_again_while_it_is_tracked(store: Store) -> None:
    _measure(store, 0.0)
    projection = _open(store)
    stale, cursor = store.changed_since(DIGEST, 0)
    projection.write(stale[0])
    _measure(store, 100.0, count=2)
    for recording in [*store.changed_since(DIGEST, cursor)[0], *stale[1:]]:  # in no good order
        projection.write(recording)
    _check(store)


def test_points_that_never_ran_have_no_runs(store: Store) -> None:
    planned = trials(4, pruned=(1, 2))
    begin(store, planned)
    store.record(DIGEST, planned[3].key, Outcome("pruned", NOT_REQUESTED, point="p"))
    store.record(DIGEST, planned[0].key, outcome(0))
    _write(store, _open(store))
    parent, children = _of(store)
    assert [run.data.tags["ringray.status"] for run in children] == ["ok"]
    assert parent.data.metrics["trials_pruned"] == 3
    # One that is measured after all gets its run, and that is not current where it is pruned again.
    store.record(DIGEST, planned[3].key, outcome(3))
    _write(store, _open(store))
    assert len(_of(store)[1]) == 2
    begin(store, [*trials(3, pruned=(1, 2)), replace(planned[3], pruned=NOT_REQUESTED)])
    _write(store, _open(store))
    current = [run.data.tags["ringray.current"] for run in _of(store)[1]]
    assert sorted(current) == ["false", "true"]
    assert _trash() == []


def _rebuilt(fresh: Store) -> Restored:
    return rebuild(client(), fresh, "quick", place.resolve_uri(None))


def test_a_store_that_is_lost_takes_its_runs_over(store: Store, second: Store) -> None:
    _measure(store, 0.0)
    _measure(store, 100.0, count=2)
    _write(store, _open(store))
    parent, children = _of(store)
    assert _rebuilt(second) == Restored(DIGEST, "quick", COUNT, 0, earlier=2)
    assert second.history(DIGEST) == store.history(DIGEST)
    begin(second, trials(COUNT))
    _write(second, _open(second))
    _check(second)
    assert _of(second)[0].info.run_id == parent.info.run_id
    assert len(_of(second)[1]) == len(children)
    # If it was not lost after all it writes runs of its own, and both are whole.
    _write(store, _open(store))
    _check(store)
    _check(second)
    assert _trash() == []


@pytest.mark.parametrize("user", [None, "another"])
def test_runs_of_a_store_that_may_be_in_use_stay_its_own(
    store: Store, second: Store, user: str | None
) -> None:
    """It runs, or is another user's."""
    _measure(store, 0.0)
    _write(store, _open(store))
    parent = _of(store)[0].info.run_id
    if user:
        client().set_tag(parent, "mlflow.user", user)
    else:
        client().update_run(parent, status="RUNNING")
    assert _rebuilt(second).added == COUNT
    begin(second, trials(COUNT))
    _write(second, _open(second))
    for one in (store, second):
        _check(one)
    assert parent != _of(second)[0].info.run_id
    assert _trash() == []


def test_the_measurements_of_several_stores_are_joined(
    store: Store, second: Store, tmp_path: Path
) -> None:
    for shift, written in enumerate((store, second)):
        _measure(written, 100.0 * shift, count=COUNT - shift)
        _write(written, _open(written))
    with Store(tmp_path / "third.db") as third:
        expected = Restored(DIGEST, "quick", COUNT, 0, earlier=COUNT - 1)
        assert _rebuilt(third) == expected
        medians = [row.metrics["median_ms"] for row in third.trials(DIGEST)]
        assert medians == [101.0, 102.0, 3.0], "the newest"
        begin(third, trials(COUNT))
        _write(third, _open(third))
        for written in (store, third):  # the last trial of the second is not measured
            _check(written)
    assert _rebuilt(second).added == 1
    assert _trash() == []
