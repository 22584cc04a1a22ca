"""Sweeps, for the command line and for Python: run, tune, resume, watch, and read the results.

Mistakes are exceptions of ``ringray.base.errors``. A store is named by its file; None is
``$RINGRAY_HOME/store.db``.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO, TypedDict, Unpack

from ringray.base import provenance, units
from ringray.base.errors import PlaceError, SpecError, UserError
from ringray.base.redaction import shown
from ringray.lab.driver.events import Note, Summary, SweepStarted, TrialEnded, TrialStarted
from ringray.lab.driver.studies import entries, load_of
from ringray.lab.driver.studies import results as study_results
from ringray.lab.kinds import KINDS
from ringray.lab.listeners import listeners
from ringray.lab.opening import as_it_stands, open_store
from ringray.lab.plan.plan import Plan, build, restored
from ringray.lab.plan.trial import Trial
from ringray.lab.predict.fitting import past_trials
from ringray.lab.report import live
from ringray.lab.report.history import Measured, measurements
from ringray.lab.specs import model as specs
from ringray.lab.specs.yaml_source import dumped
from ringray.lab.store.feed import Feed, Line
from ringray.lab.store.store import Store
from ringray.lab.trial.config import FIELDS
from ringray.lab.trial.machine_load import BUSY
from ringray.lab.trial.outcome import UNKNOWN, SweepRow, SweepStatus, TrialRow
from ringray.tuning import table as tuned

if TYPE_CHECKING:
    import pandas as pd

Source = str | os.PathLike[str] | Mapping[str, Any]


class InterruptedSweep(KeyboardInterrupt):
    """Raised when a sweep was interrupted and ended in order; the same call continues it."""

    def __init__(self, summary: Summary) -> None:
        super().__init__(f"sweep {summary.name} is interrupted; the same call continues it")
        self.summary = summary


class Settings(TypedDict, total=False):
    """Arguments of all functions that measure; by default none is given."""

    #: The store file.
    store: str | os.PathLike[str] | None

    #: A Ray cluster; without one RAY_ADDRESS, else a local Ray that ends with the call.
    address: str | None

    #: Measures also points that their prediction rules out.
    everything: bool

    #: False writes nothing to MLflow; True does, if the spec does not say otherwise.
    tracking: bool

    #: A file to which a line of JSON is appended for each trial that ends; - is stdout.
    json: str | None

    #: Where progress is shown, ``sys.stdout`` for example; without one nowhere.
    view: TextIO | None


def run(
    spec: Source, *, changes: Sequence[str] = (), again: bool = False, **settings: Unpack[Settings]
) -> Summary:
    """Measures the trials of a spec that have no result in the store, and returns how they ended.

    Args:
        spec: the path of a YAML file, the text of one (which has several lines), or its data.
        changes: fields with another value, as ``--set`` takes them: ``problem.seq_len=64k``.
        again: measures every trial once more.
        settings: see :class:`Settings`.

    Raises:
        SpecError: the spec is wrong. Of others, PlaceError: a store, MLflow or Ray cannot be used.
        KeyboardInterrupt: it was interrupted and ended in order; the same call continues it.
    """
    plan = _planned(_read(spec, changes), settings)
    with open_store(_name(settings), create=True) as opened:
        return _measure(plan, opened, settings, again)


def tune(
    spec: Source, *, changes: Sequence[str] = (), again: bool = False, **settings: Unpack[Settings]
) -> Summary:
    """Runs a tuning spec, and keeps the best point of each problem for later calls; arguments and
    errors as of :func:`run`."""
    plan = _planned(_read(spec, changes), settings)
    if not plan.spec.trial_kind.tunes:
        tuning = ", ".join(name for name, kind in KINDS.items() if kind.tunes)
        raise plan.spec.error(
            "kind",
            f"got {plan.spec.kind!r}, expected one of {tuning} to be tuned; "
            "`ringray run` measures the others",
        )
    with open_store(_name(settings), create=True) as opened:
        return _search(plan, opened, settings, again)


def resume(
    sweep: str,
    *,
    changes: Sequence[str] = (),
    from_mlflow: bool = False,
    **settings: Unpack[Settings],
) -> Summary:
    """Measures the missing trials of a sweep in the store; of a search, keeps the best points.

    Args:
        sweep: a name, or the start of a digest.
        changes: other values for fields that do not change what is measured.
        from_mlflow: first restores trials that the store lacks from MLflow.

    The other arguments and the errors are those of :func:`run`.
    """
    with open_store(_name(settings), create=from_mlflow) as opened:
        if from_mlflow:
            sweep = _restore(opened, sweep, _view(settings))
        plan = _planned(stored_spec(opened.find(sweep), changes), settings)
        follow = _search if plan.spec.trial_kind.tunes else _measure
        return follow(plan, opened, settings)


def results(
    sweep: str, store: str | os.PathLike[str] | None = None, *, history: bool = False
) -> pd.DataFrame:
    """Returns the results of a sweep, a row for each trial that has ended, in the order of the
    plan: the fields of its config, ``status``, ``reason``, ``attempts``, ``time`` (of its end),
    its metrics, its ``predicted_ms``, the repeats behind a metric as lists (``samples.ms``), and
    the hardware, versions and commit that it was measured with.

    ``attrs`` of the frame has the sweep's name, digest and status.

    Args:
        sweep: a name, or the start of a digest.
        store: the store file; by default ``$RINGRAY_HOME/store.db``.
        history: adds a row for each earlier measurement; ``current`` tells which ones count.

    Raises:
        UserError: there is no such sweep. PlaceError: the store cannot be used.
    """
    import pandas as pd

    with open_store(_name({"store": store}), readonly=True) as opened:
        record = as_it_stands(opened, opened.find(sweep))
        rows = opened.trials(record.digest)
        earlier = [entry.trial for entry in opened.history(record.digest)] if history else []
    measured = measurements(rows, earlier)
    frame = pd.DataFrame([_record(point, record.environment, history) for point in measured])
    frame.attrs = {"sweep": record.name, "digest": record.digest, "status": record.status}
    return frame


def watch(sweep: str, view: TextIO, store: str | os.PathLike[str] | None = None) -> Replay:
    """Shows a sweep while another process runs it; returns it when it is over."""
    replay = Replay(live.view(view))
    with open_store(_name({"store": store}), readonly=True) as opened, closing(replay.view):
        for line in Feed(opened, opened.find(sweep).digest).events():
            replay.take(line)
    return replay


def stored_spec(sweep: SweepRow, changes: Sequence[str] = ()) -> specs.Spec:
    """Returns the spec that a sweep was started with; ``changes``: other values of its fields.

    Raises:
        UserError: this version of ringray reads it as another sweep, or cannot read it; or a change
            makes another sweep of it.
    """
    if sweep.kind == UNKNOWN:
        raise UserError(
            f"the spec of sweep {sweep.name} was lost with a damaged store: `ringray run` with "
            "that spec takes up the saved trials, or --from-mlflow restores it"
        )
    place = f"<{sweep.name} in the store>"
    # Defaults may have changed since; the stored fields include them (JSON is YAML).
    for text in (sweep.source, json.dumps(sweep.spec, indent=2)):
        with suppress(SpecError):
            if specs.parse(text, place).digest == sweep.digest:
                break
    else:
        raise UserError(
            f"sweep {sweep.name} ({sweep.digest[:12]}) was started by another version of "
            "ringray, which reads its spec differently; use that one, or start again: "
            "`ringray run SPEC`"
        )
    spec = specs.parse(text, place, changes)
    if spec.digest != sweep.digest:
        raise UserError(
            f"{', '.join(changes)} makes another sweep of {sweep.name}; resume changes limits and "
            "tracking only, `ringray run SPEC --set` starts another"
        )
    return spec


class Replay:
    """The events of a sweep that another process runs, made from the lines of a feed and shown.

    ``over``: the status of the sweep, None until it ends.
    """

    def __init__(self, view: live.View) -> None:
        self.view = view
        self.over: SweepStatus | None = None
        self.sweep: SweepRow
        self.rows: dict[str, TrialRow] = {}
        self._trials: dict[str, Trial] = {}

    def take(self, line: Line) -> None:
        """Shows a line of a feed."""
        match line:
            case {"sweep": sweep}:
                self.sweep, self.rows, self._trials = SweepRow(**sweep), {}, {}
            case {"row": row}:
                self.rows[row["key"]] = TrialRow(**row)
            case {"begin": {"done": done, "ago": ago}}:
                self._begin(done, float(ago))
            case {"started": key, "attempt": attempt, "ago": ago}:
                self.view.take(TrialStarted(self._trials[key], int(attempt), float(ago)))
            case {"ended": key, "outcome": outcome}:
                self.rows[key] = replace(self.rows[key], **outcome)
                self.view.take(TrialEnded(self._trials[key], self.rows[key]))
            case {"note": text}:
                self.view.take(Note(str(text)))
            case {"over": "complete" | "failed" | "interrupted" as status}:
                self.over = status
            case _:
                raise ValueError("an unknown event")

    def _begin(self, done: list[str], ago: float) -> None:
        plan = restored(stored_spec(self.sweep), self.rows.values())
        self._trials = {trial.key: trial for trial in plan.trials}
        if plan.runnable:
            ended = {key: self.rows[key] for key in done}
            self.view.take(SweepStarted(plan, self.sweep, ended, ago=ago))


def _name(settings: Settings) -> str | None:
    store = settings.get("store")
    return None if store is None else os.fspath(store)


def _view(settings: Settings) -> live.View:
    return live.view(settings.get("view") or io.StringIO())


def _read(spec: Source, changes: Sequence[str]) -> specs.Spec:
    if isinstance(spec, Mapping):
        return specs.parse(dumped(dict(spec)), "<dict>", changes)
    if isinstance(spec, str) and "\n" in spec:
        return specs.parse(spec, changes=changes)
    return specs.load(os.fspath(spec), changes)


def _planned(spec: specs.Spec, settings: Settings) -> Plan:
    """Plans a spec for the Ray on which it is measured."""
    from ringray.lab.cluster import connect

    here = connect.target(settings.get("address")) == "local"
    memory = provenance.memory_bytes() if here else None
    seen = past_trials(_name(settings), spec.digest)
    return build(spec, everything=settings.get("everything", False), machine=memory, seen=seen)


def _measure(plan: Plan, store: Store, settings: Settings, again: bool = False) -> Summary:
    """Runs a plan; raises InterruptedSweep."""
    from ringray.lab.driver import run as driver  # with ray

    json, tracking = settings.get("json"), settings.get("tracking", True)
    followers = [*listeners(plan, store, json=json, tracking=tracking), _view(settings)]
    address = settings.get("address")
    summary = driver.run(plan, store=store, listeners=followers, address=address, again=again)
    if summary.interrupted:
        raise InterruptedSweep(summary)
    return summary


def _search(plan: Plan, store: Store, settings: Settings, again: bool = False) -> Summary:
    """Runs a tuning plan and keeps the best point of each problem."""
    tuned.table()  # reports a broken table before hours of measuring
    summary = _measure(plan, store, settings, again)
    trials = summary.trials
    cores = provenance.hardware()["cores"]
    choices, compared = entries(plan, trials, cores), study_results(plan, trials)
    by_key = {row.key: row for row in trials}
    loads = [load_of(plan, study, by_key, cores) or 0 for study in compared if study.better]
    if choices:
        summary.tuned.append(f"{units.plural(len(choices), 'choice')} in {tuned.add(choices)}")
    if busy := [load for load in loads if load > BUSY]:
        summary.tuned.append(
            f"nothing for {units.plural(len(busy), 'problem')}, because other processes used "
            f"{max(busy):.0%} of {units.plural(cores, 'core')} while it was measured: when the "
            "machine is idle, `ringray tune SPEC --again` measures it once more"
        )
    elif not choices and any(study.default for study in compared):
        summary.tuned.append("nothing, because no point beats the default beyond the spread")
    elif not choices:
        summary.tuned.append("nothing, because no point could be measured")
        summary.fruitless = True
    return summary


def _restore(store: Store, selector: str, view: live.View) -> str:
    """Restores the trials that the store lacks from MLflow; returns the digest of the sweep."""
    from ringray.lab.tracking.restore import restore

    try:
        sweep = store.find(selector)
    except PlaceError:
        raise
    except UserError:  # the store has nothing of it
        restored = restore(store.path, selector, None)
    else:
        with store.lease(sweep.digest):
            place = sweep.spec.get("tracking", {})
            restored = restore(store.path, sweep.digest, place.get("uri"))
    text = f"{units.plural(restored.added, 'trial')} taken from MLflow"
    if restored.unreadable:
        text += f"; {units.plural(restored.unreadable, 'run')} there cannot be read"
    view.take(Note(f"{shown(restored.name)} ({restored.digest[:12]}): {text}"))
    return restored.digest


def _record(measured: Measured, environment: dict[str, Any], history: bool) -> dict[str, Any]:
    """Returns a row of :func:`results`."""
    row = measured.row
    where = row.environment or environment
    hardware: dict[str, Any] = where.get("hardware") or {}
    gpus = hardware.get("gpus") or []
    return {
        **row.config,
        "status": row.status,
        "reason": row.reason,
        "attempts": row.attempts,
        "time": row.ended and datetime.fromtimestamp(row.ended, UTC),
        **({"current": measured.current} if history else {}),
        **{f"metric.{name}" if name in FIELDS else name: n for name, n in row.numbers.items()},
        "predicted_ms": row.predicted.get("time_ms"),
        **{f"samples.{name}": values for name, values in row.samples.items()},
        "hardware": gpus[0] if gpus else hardware.get("cpu"),
        "cores": hardware.get("cores"),
        **(where.get("versions") or {}),
        "commit": provenance.commit(where),
    }
