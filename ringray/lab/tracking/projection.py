"""The projection of one sweep onto MLflow: one parent run, one child run per ended trial.

What is there is found by tags (``ringray.sweep``, ``ringray.key``), so writing may stop at any
point and begin again. A child run is written in three calls: created with all its tags, given
params and metrics, ended; the trial's trace, if there is one, goes in before the end. It is up to
date when it has ended and ``ringray.record`` names what the store holds. One that names an older
recording goes to MLflow's trash and is written anew, because MLflow forgets neither a metric nor a
param of a run.

Points that never ran stand in the tables of the parent; only the first of them have runs of their
own, and none of those that a search did not ask for.
"""

from __future__ import annotations

import getpass
import json
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from ringray.base.errors import PlaceError
from ringray.base.redaction import without_credentials
from ringray.lab.report.figures import pictures
from ringray.lab.store.traces import path_of
from ringray.lab.tracking import mlflow_record as show
from ringray.lab.tracking.archive import TRIAL_TAG, sweep_tags, trial_tags
from ringray.lab.tracking.description import FIGURES, RunPlace, note
from ringray.lab.trial.outcome import UNASKED, Tracked, part_of_a_path

if TYPE_CHECKING:
    from ringray.lab.store.store import Store
    from ringray.lab.trial.outcome import TrialRow

_ENDED = ("FINISHED", "FAILED", "KILLED")
_CHILD_STATUS = {
    "ok": "FINISHED",
    "oom": "FINISHED",
    "pruned": "FINISHED",
    "failed": "FAILED",
    "timeout": "FAILED",
}
_PARENT_STATUS = {"complete": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_PAGE = 1000
_PRUNED = 36  # runs of pruned points


@dataclass(slots=True)
class _Child:
    run_id: str
    record: str
    ended: bool
    pruned: bool


class Projection:
    """Writes one sweep of ``store`` into one experiment.

    Several threads may write different trials; everything else is for one.
    """

    def __init__(
        self, store: Store, digest: str, uri: str, experiment: str, artifacts: str | None
    ) -> None:
        self._store = store
        self._digest = digest
        self._client = MlflowClient(tracking_uri=uri)
        self._uri = uri
        self._experiment = experiment
        self._artifacts = artifacts
        self._sweep = store.find(digest)
        self._names: dict[str, str] = {}
        self._children: dict[str, _Child] = {}
        self._known_metrics: dict[str, float] = {}
        self._known_params: set[str] = set()
        self._figures: tuple[str, ...] = ()
        self._lock = threading.Lock()  # of what is known of the children
        self.experiment_id = ""
        self.run_id = ""

    def open(self) -> None:
        """Finds or makes the experiment and the parent run, and learns what is there."""
        self.experiment_id = self._find_experiment()
        trials = self._store.trials(self._digest)
        self._names = show.run_names(self._sweep, trials)
        self.refresh()
        constants = show.params(show.constant_fields(trials))
        self._client.log_batch(
            self.run_id,
            params=[
                Param(name, value)
                for name, value in constants.items()
                # Params are write-once; on other hardware `device: auto` may mean another value.
                if name not in self._known_params
            ],
            tags=[RunTag(name, value) for name, value in self._sweep_tags().items()],
        )
        self._client.update_run(self.run_id, status="RUNNING")
        # Whoever continues the sweep need not ask again whether the place is right.
        place = Tracked(without_credentials(self._uri), self.experiment_id, self.run_id)
        with suppress(PlaceError):
            self._store.accepted(self._digest, place)

    def refresh(self) -> None:
        """Learns anew what MLflow holds; where a call's answer was lost, mends the doubles."""
        parents, children = self._search()
        # A parent that has children wins over one whose creation was answered too late.
        uses = [child.data.tags.get("mlflow.parentRunId") for child in children]
        parents.sort(key=lambda run: (-uses.count(run.info.run_id), run.info.start_time))
        for double in parents[1:]:
            self._client.delete_run(double.info.run_id)
        if parents:
            self.run_id = parents[0].info.run_id
            self._known_metrics = dict(parents[0].data.metrics)
            self._known_params = set(parents[0].data.params)
        else:
            self.run_id = self._create_parent()
            self._known_metrics, self._known_params = {}, set()
        self._children = {}
        # The best of each key comes last: ended ones, and of these the newest.
        children.sort(key=lambda run: (run.info.status in _ENDED, run.info.start_time))
        for run in children:
            double = self._children.get(run.data.tags["ringray.key"])
            if double is not None:
                self._client.delete_run(double.run_id)
            self._adopt(run)

    def write(self, trial: TrialRow) -> bool:
        """Makes the trial's child run what the store says; False when it was so already, or when
        the trial has none."""
        record = show.record_digest(trial)
        with self._lock:
            child = self._children.get(trial.key)
            wanted = self._wanted(trial)
            name = self._name(trial.key)
        if child and (child.record != record or not wanted):
            self._client.delete_run(child.run_id)
            del self._children[trial.key]
            child = None
        if not wanted or (child and child.ended):
            return False
        # Clocks may be set back while a trial runs; MLflow takes the difference for its duration.
        ended = _milliseconds(max(trial.started or 0.0, trial.ended or 0.0) or None)
        if child is None:
            tags = show.trial_tags(self._sweep, trial, self.run_id) | _user()
            run = self._client.create_run(
                self.experiment_id,
                start_time=_milliseconds(trial.started),
                tags=tags | trial_tags(trial, self._store.sequence(self._digest, trial.key)),
                run_name=name,
            )
            child = _Child(run.info.run_id, record, False, trial.status == "pruned")
            self._children[trial.key] = child
        # The same key, value, time and step again is one metric to MLflow: safe to repeat.
        self._client.log_batch(
            child.run_id,
            metrics=[
                Metric(name, value, ended, 0)
                for name, value in show.run_metrics(trial.metrics).items()
            ],
            params=[Param(name, value) for name, value in show.params(trial.config).items()],
        )
        trace = path_of(self._digest, trial.key)
        if trial.status == "ok" and trace.exists():
            self._client.log_text(child.run_id, trace.read_text(), "trace.json")
        status = _CHILD_STATUS[trial.status or "failed"]
        self._client.set_terminated(child.run_id, status=status, end_time=ended)
        child.ended = True
        return True

    def summarise(self) -> None:
        """Brings the parent run's counts, best figures and description up to now."""
        trials = self._store.trials(self._digest)
        metrics = show.summary_metrics(trials)
        now = int(time.time() * 1000)
        # Of one metric MLflow shows the value of the last step, and only then of the last moment:
        # a clock that was set back changes nothing.
        step = self._store.sequence(self._digest)
        self._client.log_batch(
            self.run_id,
            metrics=[
                Metric(name, value, now, step)
                for name, value in metrics.items()
                if self._known_metrics.get(name) != value
            ],
            tags=[RunTag("mlflow.note.content", note(self._sweep, trials, self._place()))],
        )
        self._known_metrics.update(metrics)

    def log_plan(self) -> None:
        """The artifacts that are known at the start."""
        trials = self._store.trials(self._digest)
        self._client.log_text(self.run_id, show.spec_yaml(self._sweep), "spec.yaml")
        self._client.log_text(self.run_id, show.plan_json(self._sweep, trials), "plan.json")

    def log_results(self) -> None:
        """The result tables; MLflow shows ``results_table.json`` as a table of its own."""
        trials = self._store.trials(self._digest)
        columns, rows = show.results_table(self._sweep, trials)
        table = json.dumps({"columns": columns, "data": rows})
        log = self._client.log_text
        log(self.run_id, show.results_csv(columns, rows), "results.csv")
        log(self.run_id, show.results_json(self._sweep, trials), "results.json")
        log(self.run_id, table, show.TABLE)
        self._client.set_tag(
            self.run_id,
            "mlflow.loggedArtifacts",
            json.dumps([{"path": show.TABLE, "type": "table"}]),
        )

    def log_figures(self) -> None:
        """The figures, and the description that shows them."""
        trials = self._store.trials(self._digest)
        with tempfile.TemporaryDirectory() as folder:
            names = []
            for name, png in pictures(trials):
                (Path(folder) / f"{name}.png").write_bytes(png)
                names.append(name)
            if not names:
                return
            self._client.log_artifacts(self.run_id, folder, FIGURES)
        self._figures = tuple(names)
        text = note(self._sweep, trials, self._place())
        self._client.set_tag(self.run_id, "mlflow.note.content", text)

    def close(self) -> None:
        """Ends the parent run as the sweep ended; one that nobody drives any more was killed."""
        sweep = self._store.find(self._digest)
        if sweep.status == "running" and self._store.owner(self._digest):
            return
        status = _PARENT_STATUS.get(sweep.status, "KILLED")
        self._client.set_terminated(
            self.run_id, status=status, end_time=_milliseconds(self._last_end())
        )

    def _sweep_tags(self) -> dict[str, str]:
        return show.sweep_tags(self._sweep) | sweep_tags(self._sweep)

    def _wanted(self, trial: TrialRow) -> bool:
        """Whether the trial has a run of its own."""
        if trial.status != "pruned":
            return True
        if trial.reason == UNASKED:
            return False
        child = self._children.get(trial.key)
        if child and child.pruned:
            return True
        return sum(one.pruned for one in self._children.values()) < _PRUNED

    def _place(self) -> RunPlace:
        children = {key: child.run_id for key, child in self._children.items()}
        return RunPlace(self.experiment_id, self.run_id, children, self._figures)

    def _name(self, key: str) -> str:
        if key not in self._names:  # a search adds trials as it goes
            self._names = show.run_names(self._sweep, self._store.trials(self._digest))
        return self._names.get(key, key)

    def _last_end(self) -> float | None:
        ends = [trial.ended for trial in self._store.trials(self._digest) if trial.ended]
        return max(ends, default=None)

    def _find_experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            try:
                return str(
                    self._client.create_experiment(
                        self._experiment,
                        artifact_location=self._artifacts,
                        # So that the pages are those of runs and metrics and not of chats.
                        tags={"mlflow.experimentKind": "custom_model_development"},
                    )
                )
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self._client.get_experiment_by_name(self._experiment)
        if found is None or found.lifecycle_stage != "active":
            raise PlaceError(
                f"the experiment {self._experiment!r} is in MLflow's trash; restore it there "
                "(`mlflow experiments restore`) or set another tracking.experiment in the spec"
            )
        return str(found.experiment_id)

    def _create_parent(self) -> str:
        run = self._client.create_run(
            self.experiment_id,
            start_time=_milliseconds(self._sweep.created),
            tags=self._sweep_tags() | _user(),
            run_name=self._sweep.name,
        )
        return str(run.info.run_id)

    def _search(self) -> tuple[list[Run], list[Run]]:
        parents: list[Run] = []
        children: list[Run] = []
        token: str | None = None
        while True:
            page = self._client.search_runs(
                [self.experiment_id],
                filter_string=f"tags.`ringray.sweep` = '{part_of_a_path(self._digest)}'",
                max_results=_PAGE,
                order_by=["attributes.start_time ASC"],
                page_token=token,
            )
            for run in page:
                tags: dict[str, Any] = run.data.tags
                if tags.get("ringray.role") == "sweep":
                    parents.append(run)
                elif "ringray.key" in tags:
                    children.append(run)
            token = page.token
            if not token:
                return parents, children

    def _adopt(self, run: Run) -> None:
        tags = run.data.tags
        if tags.get("mlflow.parentRunId") != self.run_id:
            self._client.set_tag(run.info.run_id, "mlflow.parentRunId", self.run_id)
        self._children[tags["ringray.key"]] = _Child(
            run.info.run_id,
            # A run that an earlier version wrote lacks what a store is rebuilt from.
            tags.get("ringray.record", "") if TRIAL_TAG in tags else "",
            run.info.status in _ENDED,
            tags.get("ringray.status") == "pruned",
        )


def _milliseconds(seconds: float | None) -> int:
    return int((time.time() if seconds is None else seconds) * 1000)


def _user() -> dict[str, str]:
    try:
        return {"mlflow.user": getpass.getuser()}
    except (OSError, KeyError):
        return {}  # a container's user need not have a name
