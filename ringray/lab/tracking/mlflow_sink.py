"""One sweep in MLflow: one parent run, one child run per ended trial.

Runs are recognized by tags (``ringray.sweep``, ``ringray.store``, ``ringray.key``), so that writing
can stop at any point and begin again. Runs of other stores are never touched: several homes may
track one sweep to one server. A child run is one recording (``ringray.record``) of a trial, written
in three calls: created with all its tags, given params and metrics, ended; the trial's trace, if
any, is added before the end. A recording is never removed: ``ringray.current`` tells whether it is
the one that counts.

Points that never ran have no runs; they are in the tables of the parent.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from ringray.base.errors import PlaceError
from ringray.base.redaction import without_credentials
from ringray.lab.report.figures import pictures
from ringray.lab.report.sweep_report import document
from ringray.lab.report.words import shared
from ringray.lab.store.feed import CurvePoint
from ringray.lab.store.store import Store
from ringray.lab.store.traces import path_of
from ringray.lab.tracking import archive
from ringray.lab.tracking import mlflow_record as show
from ringray.lab.tracking.archive import CURRENT, STORE, TRIALS, runs_of, user_tag
from ringray.lab.tracking.location import artifact_root, client_of
from ringray.lab.trial.outcome import Kept, Tracked, TrialRow, part_of_a_path

_ENDED = ("FINISHED", "FAILED", "KILLED")
_PARENT_STATUS = {"complete": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_NOTE = "mlflow.note.content"


@dataclass(slots=True)
class _Child:
    run_id: str
    ended: bool
    current: bool


class MLflowSink:
    """One sweep of ``store`` in one experiment: a :class:`ringray.lab.tracking.sink.Sink`.

    Args:
        settled: where MLflow has taken the sweep before.
    """

    def __init__(
        self, store: Store, digest: str, uri: str, experiment: str, settled: Tracked | None = None
    ) -> None:
        self._store, self._digest = store, digest
        self._client = client_of(uri)
        self._experiment, self._artifacts = experiment, artifact_root(uri)
        self._sweep = store.find(digest)
        self._names: dict[str, str] = {}
        self._children: dict[tuple[str, str], _Child] = {}  # by trial key and record
        self._figures: tuple[str, ...] = ()
        self._opened = False
        self._own = {STORE: store.identity}
        self.place = settled or Tracked(without_credentials(uri), "", "")

    def refresh(self) -> None:
        """Learns what MLflow holds, and opens the parent run the first time.

        Where the answer to a call was lost, it deletes the runs that were made twice.
        """
        if not self._opened:
            self.place = self.place._replace(experiment_id=self._find_experiment())
        parents, children = self._search()
        if self._opened and not parents:
            raise PlaceError("MLflow does not show the run of the sweep that it has taken")
        # A parent that has children wins over one whose creation was answered too late.
        uses = [child.data.tags.get("mlflow.parentRunId") for child in children]
        parents.sort(key=lambda run: (-uses.count(run.info.run_id), run.info.start_time))
        for double in parents[1:]:
            self._client.delete_run(double.info.run_id)
        if not parents:
            sweep, tags = self._sweep, self._sweep_tags()
            parents = [self._create_run(sweep.name, sweep.created, tags)]
        parent = parents[0]
        self.place = self.place._replace(run_id=parent.info.run_id)
        self._children = {}
        # The best of each recording comes last: ended ones, and of these the newest.
        children.sort(key=lambda run: (run.info.status in _ENDED, run.info.start_time))
        for run in children:
            self._adopt(run)
        if not self._opened:
            self._begin(known_params=set(parent.data.params))
            self._opened = True

    def _begin(self, known_params: set[str]) -> None:
        """Brings the parent run's params and tags up to now and marks it as running."""
        trials = self._store.trials(self._digest)
        constants = show.params(shared([trial.config for trial in trials]))
        # Params are write-once; on other hardware `device: auto` may mean another value.
        params = [Param(*pair) for pair in constants.items() if pair[0] not in known_params]
        tags = [RunTag(*pair) for pair in self._sweep_tags().items()]
        self._client.log_batch(self.place.run_id, params=params, tags=tags)
        self._client.update_run(self.place.run_id, status="RUNNING")
        # A driver that continues the sweep need not ask again whether the place is right.
        with suppress(PlaceError):
            self._store.accepted(self._digest, self.place)

    def write(self, recording: Kept) -> bool:
        """Brings the run of a recording up to now, and marks the others of its trial; returns False
        if there was nothing to write."""
        trial = recording.trial
        current = self._store.sequence(self._digest, trial.key) == recording.seq
        place = trial.key, show.record_digest(trial)
        child, marked = self._children.get(place), False
        for other in [each for (key, _), each in self._children.items() if key == trial.key]:
            counts = current if other is child else other.current and not current
            if other.current != counts:
                self._client.set_tag(other.run_id, CURRENT, json.dumps(counts))
                other.current, marked = counts, True
        if trial.status == "pruned" or (child and child.ended):
            return marked
        # A clock may be set back while a trial runs; MLflow computes its duration.
        ended = _milliseconds(max(trial.started or 0.0, trial.ended or 0.0) or None)
        if child is None:
            tags = show.trial_tags(self._sweep, trial, self.place.run_id)
            tags[CURRENT] = json.dumps(current)
            run = self._create_run(self._name(trial.key), trial.started, tags)
            child = _Child(run.info.run_id, False, current)
            self._children[place] = child
        # Safe to repeat: the same key, value, time and step are one metric to MLflow.
        values = [(name, value, 0) for name, value in show.run_metrics(trial).items()]
        values += show.run_curves(trial)
        metrics = [Metric(name, value, ended, step) for name, value, step in values]
        params = [Param(*pair) for pair in show.params(trial.config).items()]
        self._client.log_batch(child.run_id, metrics=metrics, params=params)
        trace = path_of(self._digest, trial.key)
        if current and trial.status == "ok" and trace.exists():
            self._client.log_text(child.run_id, trace.read_text(), "trace.json")
        status = "FAILED" if trial.status in ("failed", "timeout") else "FINISHED"
        self._client.set_terminated(child.run_id, status=status, end_time=ended)
        child.ended = True
        return True

    def log_live(self, points: Sequence[CurvePoint]) -> None:
        """Adds curves of running trials to the parent run."""
        now = _milliseconds(None)
        curves = [
            Metric(f"live/{name}/{trial + 1}", value, now, step)
            for trial, name, step, value in points
            if math.isfinite(value)
        ]
        self._client.log_batch(self.place.run_id, metrics=curves)

    def lacks(self, recording: Kept) -> bool:
        """Returns whether MLflow had no complete run of the recording at the last refresh."""
        child = self._children.get((recording.trial.key, show.record_digest(recording.trial)))
        return recording.trial.status != "pruned" and not (child and child.ended)

    def summarise(self) -> None:
        """Brings the parent run's counts, best figures and description up to now."""
        trials = self._store.trials(self._digest)
        now = _milliseconds(None)
        # MLflow shows the value of the last step, and of the last time only among equal steps, so
        # that a clock that was set back changes nothing.
        step = self._store.sequence(self._digest)
        numbers = show.summary_metrics(trials).items()
        metrics = [Metric(name, value, now, step) for name, value in numbers]
        tags = [RunTag(_NOTE, self._note(trials))]
        self._client.log_batch(self.place.run_id, metrics=metrics, tags=tags)

    def log_files(self) -> None:
        """Writes the spec, the results and the lines from which a lost store is rebuilt."""
        files = {TRIALS: "\n".join(archive.lines(self._store, self._digest))}
        files |= show.files(self._sweep, self._store.trials(self._digest))
        for name, text in files.items():
            self._client.log_text(self.place.run_id, text, name)

    def log_figures(self) -> None:
        """Writes the figures, the description that shows them, and the report."""
        trials = self._store.trials(self._digest)
        with tempfile.TemporaryDirectory() as folder:
            drawn = dict(pictures(trials))
            for name, png in drawn.items():
                (Path(folder) / f"{name}.png").write_bytes(png)
            if drawn:
                self._client.log_artifacts(self.place.run_id, folder, show.FIGURES)
                self._figures = tuple(drawn)
                self._client.set_tag(self.place.run_id, _NOTE, self._note(trials))
        page = document([(self._store.find(self._digest), trials)])
        self._client.log_text(self.place.run_id, page, show.REPORT)

    def close(self) -> None:
        """Ends the parent run as the sweep ended: killed, if no driver says otherwise."""
        sweep = self._store.find(self._digest)
        if sweep.status == "running" and self._store.owner(self._digest):
            return
        ends = [trial.ended for trial in self._store.trials(self._digest) if trial.ended]
        status, end = _PARENT_STATUS.get(sweep.status, "KILLED"), max(ends, default=None)
        self._client.set_terminated(self.place.run_id, status, _milliseconds(end))

    def _note(self, trials: Sequence[TrialRow]) -> str:
        return show.note(self._sweep, trials, self.place, self._figures)

    def _sweep_tags(self) -> dict[str, str]:
        return show.sweep_tags(self._sweep) | self._own

    def _name(self, key: str) -> str:
        if key not in self._names:  # a search adds trials as it goes
            self._names = show.run_names(self._sweep, self._store.trials(self._digest))
        return self._names.get(key, key)

    def _find_experiment(self) -> str:
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            # The pages show runs and metrics, not chats.
            tags = {"mlflow.experimentKind": "custom_model_development"}
            try:
                create = self._client.create_experiment
                return str(create(self._experiment, artifact_location=self._artifacts, tags=tags))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None or experiment.lifecycle_stage != "active":
            raise PlaceError(
                f"the experiment {self._experiment!r} is in MLflow's trash; restore it there "
                "(`mlflow experiments restore`) or set another tracking.experiment in the spec"
            )
        return str(experiment.experiment_id)

    def _create_run(self, name: str, started: float | None, tags: dict[str, str]) -> Run:
        tags = tags | user_tag() | self._own
        place, began = self.place.experiment_id, _milliseconds(started)
        return self._client.create_run(place, began, tags, run_name=name)

    def _search(self) -> tuple[list[Run], list[Run]]:
        """Returns the parent runs and the child runs of this sweep that this store wrote, the
        oldest first."""
        sweep, store = part_of_a_path(self._digest), self._own[STORE]
        ours = f"tags.`ringray.sweep` = '{sweep}' AND tags.`{STORE}` = '{store}'"
        runs = runs_of(self._client, [self.place.experiment_id], ours)
        parents = [run for run in runs if run.data.tags.get("ringray.role") == "sweep"]
        return parents, [run for run in runs if "ringray.key" in run.data.tags]

    def _adopt(self, run: Run) -> None:
        """Takes a child run as ours; deletes an earlier one with the same recording."""
        tags = run.data.tags
        status = tags.get("ringray.status")
        place = (tags["ringray.key"], tags["ringray.record"])
        if double := self._children.get(place):
            self._client.delete_run(double.run_id)
        if tags.get("mlflow.parentRunId") != self.place.run_id:
            self._client.set_tag(run.info.run_id, "mlflow.parentRunId", self.place.run_id)
        # Some servers say that they have taken what they have not.
        ended = run.info.status in _ENDED and bool(run.data.metrics or status != "ok")
        current = tags.get(CURRENT) == "true"
        self._children[place] = _Child(run.info.run_id, ended, current)


def _milliseconds(seconds: float | None) -> int:
    return int((time.time() if seconds is None else seconds) * 1000)


open_sink = MLflowSink
