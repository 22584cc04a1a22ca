"""One sweep in Weights & Biases: a group with a run per measurement and one for the whole sweep.

Names of metrics and params are those in MLflow. A run's id names the store and the recording, so
that a run that is written twice is one; a note in the home folder says which were handed over.
``wandb://ENTITY`` names the entity; W&B's variables name its server, key and mode.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ringray.base import private_files
from ringray.base.errors import PlaceError
from ringray.lab.report import verdict
from ringray.lab.report.figures import pictures
from ringray.lab.report.sweep_report import document
from ringray.lab.store.feed import CurvePoint
from ringray.lab.store.store import Store
from ringray.lab.tracking import mlflow_record as show
from ringray.lab.trial.outcome import Kept, Tracked

_ABSENT = ("disable_git", "disable_code", "x_disable_meta", "x_disable_stats", "silent")
_WITHOUT: Any = dict.fromkeys(_ABSENT, True)


def check() -> None:
    """Raises PlaceError if the package is missing."""
    if find_spec("wandb") is None:
        raise PlaceError("tracking.to: wandb needs its package: `pip install 'ringray[wandb]'`")


def page(experiment_id: str, run_id: str) -> str:
    """Returns the run's address; without a server the command that uploads the runs."""
    upload = f"wandb sync {private_files.home()}/wandb/offline-run-*"
    return f"{experiment_id}/runs/{run_id}" if experiment_id else upload


class WandbSink:
    """One sweep as a group of runs in a project. W&B itself waits for a server that is away."""

    def __init__(
        self, store: Store, digest: str, uri: str, experiment: str, settled: Tracked | None
    ) -> None:
        self._store, self._digest, self._sweep = store, digest, store.find(digest)
        self._entity, self._project = uri.partition("://")[2] or None, experiment
        self._home = private_files.create_home()
        target = self._id(uri, experiment, os.environ.get("WANDB_MODE", ""))
        self._note = private_files.folder(self._home / "wandb") / f"{target}.written"
        self._run: Any = None
        self.place = Tracked(uri, "", self._id("sweep"))

    def refresh(self) -> None:
        """Reads which runs were handed to W&B, and begins the run of the sweep the first time."""
        self._written = set(self._note.read_text().split()) if self._note.exists() else set()
        if self._run is None:
            config = {"tags": show.sweep_tags(self._sweep)}
            self._run = self._begin(self.place.run_id, "sweep", self._sweep.name, config)
            project = str(self._run.url or "").partition("/runs/")[0]
            self.place = self.place._replace(experiment_id=project)
            self._store.accepted(self._digest, self.place)

    def write(self, recording: Kept) -> bool:
        """Writes the run of a recording, and anew those of its trial that are no longer current."""
        if not self.lacks(recording):
            return False
        trial, mark = recording.trial, self._mark(recording)
        run_id, current = mark.split("-")
        name = show.run_names(self._sweep, self._store.trials(self._digest)).get(trial.key)
        config = trial.config | {"tags": show.trial_tags(self._sweep, trial, self.place.run_id)}
        run = self._begin(run_id, "trial", name, config, [current, trial.status])
        curves = show.run_curves(trial)
        for step, metric, value in sorted((step, metric, value) for metric, value, step in curves):
            run.log({metric: value}, step=step)
        run.log(show.run_metrics(trial))
        run.finish(exit_code=int(trial.status in ("failed", "timeout")))
        with self._note.open("a") as note:
            note.write(f"{mark}\n")
        self._written.add(mark)
        for past in self._store.history(self._digest):
            if past.trial.key == trial.key:
                self.write(past)
        return True

    def lacks(self, recording: Kept) -> bool:
        """Returns whether a measurement was not handed to W&B; pruned points have no runs."""
        return recording.trial.status != "pruned" and self._mark(recording) not in self._written

    def log_live(self, points: Sequence[CurvePoint]) -> None:
        """Adds curves of running trials to the run of the sweep, with the step of each."""
        for trial, name, step, value in points:
            self._run.log({f"live/{name}/{trial + 1}": value, f"live/step/{trial + 1}": step})

    def summarise(self) -> None:
        """Brings the counts, best figures and answer up to now."""
        trials = self._store.trials(self._digest)
        self._run.summary.update(show.summary_metrics(trials))
        ended = [trial for trial in trials if trial.status is not None]
        self._run.notes = "\n".join(verdict.answer(self._sweep.kind, ended))

    def log_files(self) -> None:
        """Writes spec, plan and results into the folder of the sweep's run, which W&B uploads."""
        for name, text in show.files(self._sweep, self._store.trials(self._digest)).items():
            (Path(self._run.dir) / name).write_text(text, "utf-8")

    def close(self) -> None:
        """Does nothing: the run of the sweep ends with its figures."""

    def log_figures(self) -> None:
        """Writes the figures and the report, and ends the run of the sweep."""
        import wandb

        sweep, trials = self._store.find(self._digest), self._store.trials(self._digest)
        (Path(self._run.dir) / "report.html").write_text(document([(sweep, trials)]), "utf-8")
        for name, png in pictures(trials):
            path = Path(self._run.dir) / f"{name}.png"
            path.write_bytes(png)
            self._run.log({f"figures/{name}": wandb.Image(str(path))})
        self._run.finish(exit_code=int(sweep.status != "complete"))

    def _begin(self, run_id: str, role: str, name: Any, config: Any, labels: Any = ()) -> Any:
        """Returns a new run, which replaces one with the same id."""
        import wandb

        names = {"id": run_id, "name": name, "project": self._project, "entity": self._entity}
        names |= {"group": f"{self._sweep.name}-{self._digest[:12]}", "job_type": role}
        quiet = wandb.Settings(console="off", x_save_requirements=False, **_WITHOUT)
        names |= {"dir": str(self._home), "reinit": "create_new"}
        return wandb.init(**names, config=config, tags=labels, settings=quiet)

    def _id(self, *parts: str) -> str:
        text = " ".join((self._store.identity, self._digest, *parts))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _mark(self, recording: Kept) -> str:
        """Returns the id of a recording's run, and whether it is current."""
        trial, seq = recording
        current = self._store.sequence(self._digest, trial.key) == seq
        run_id = self._id(trial.key, show.record_digest(trial))
        return f"{run_id}-{'current' if current else 'earlier'}"


open_sink = WandbSink
