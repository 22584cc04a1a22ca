"""A sweep that the store lost, taken back from MLflow: ``resume --from-mlflow``; or only read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ringray.base.deadline import within
from ringray.base.errors import RingrayError, UserError
from ringray.base.redaction import without_credentials
from ringray.lab.store.store import Store
from ringray.lab.tracking import archive
from ringray.lab.tracking.archive import STORE
from ringray.lab.tracking.location import cannot_be_used, check, client_of, resolve_uri
from ringray.lab.tracking.sink import service_of
from ringray.lab.tracking.tracker import UNHURRIED_S
from ringray.lab.tracking.worker import brief, environment
from ringray.lab.trial.outcome import Kept, SweepInfo, TrialRow, selected

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_T = TypeVar("_T")


class Restored(NamedTuple):
    """A sweep that MLflow has. ``added``: trials that the store lacked; ``unreadable``: runs there
    from which no trial can be rebuilt; ``earlier``: other measurements that the store lacked."""

    digest: str
    name: str
    added: int
    unreadable: int
    earlier: int = 0


def restore(store_path: Path, sweep: str, uri: str | None, timeout: float = 600.0) -> Restored:
    """Adds to the store the trials of a sweep (name, or start of its digest) that only MLflow has.

    Raises:
        PlaceError: MLflow cannot be used, or gave no answer.
        UserError: it has no such sweep, or several, or cannot rebuild it.
    """

    def call(client: MlflowClient, resolved: str) -> Restored:
        with Store(store_path, create=False) as store:
            return rebuild(client, store, sweep, resolved)

    return _from_mlflow(uri, timeout, call)


def fetched(run: str, timeout: float = 600.0) -> tuple[SweepInfo, list[TrialRow]]:
    """Returns the sweep of a parent run in MLflow and all its measurements, and changes
    nothing.

    Raises:
        PlaceError: MLflow cannot be used, or gave no answer.
        UserError: it has no such run, or it is not a sweep that can be read.
    """
    return _from_mlflow(None, timeout, lambda client, _: read_run(client, run))


def _from_mlflow(uri: str | None, timeout: float, call: Callable[[MlflowClient, str], _T]) -> _T:
    """Returns what ``call`` returns for a client and its URI; whatever else MLflow, its database or
    the network raise becomes a UserError."""
    resolved = resolve_uri(uri)
    if service_of(resolved):
        raise UserError(f"{resolved} is not MLflow, from which alone a sweep can be read back")
    check(resolved, UNHURRIED_S)

    def attempt() -> _T:
        try:
            return call(client_of(resolved), resolved)
        except RingrayError:
            raise
        except Exception as error:
            raise UserError(brief(error)) from error

    before = dict(os.environ)
    os.environ.update(environment(resolved, UNHURRIED_S))
    try:
        with warnings.catch_warnings(action="ignore"):
            return within(timeout, "MLflow", attempt)
    except TimeoutError:
        raise cannot_be_used(resolved, "it gave no answer") from None
    finally:
        os.environ.clear()
        os.environ.update(before)


def read_run(client: MlflowClient, run: str) -> tuple[SweepInfo, list[TrialRow]]:
    """Returns the sweep of the parent run ``run`` and all its measurements, the current ones last.

    Raises:
        UserError: it is not the run of a sweep that can be read.
    """
    parent = client.get_run(run)
    is_sweep = parent.data.tags.get("ringray.role") == "sweep"
    record = archive.read(client, parent) if is_sweep else None
    if record is None:
        raise UserError(
            f"runs:/{run} is not the run of a sweep: expected the id of a parent run, which "
            "MLflow's page of the sweep shows"
        )
    return record.sweep, [trial for trial, _ in _in_order([record])]


def rebuild(client: MlflowClient, store: Store, selector: str, uri: str) -> Restored:
    """Adds the sweep and its measurements, of all stores that wrote it, and changes nothing that
    the store has. Of a trial that it lacks the newest that is current in a store becomes current.

    A store that has nothing of the sweep takes its runs in MLflow over if one other store of the
    same user wrote them all and its parent run has ended; otherwise they stay as they are.

    Raises:
        UserError: MLflow has no such sweep, several that fit, or one that cannot be rebuilt.
    """
    where = without_credentials(uri)
    experiments = archive.experiments_of(client)
    parents = archive.runs_of(client, experiments, "tags.`ringray.role` = 'sweep'")
    parents.sort(key=lambda run: run.info.start_time or 0, reverse=True)
    parents = _choose(parents, selector, where)
    records = [record for parent in parents if (record := archive.read(client, parent))]
    if not records:
        raise UserError(
            f"sweep {selector!r} at {where} cannot be rebuilt: its run lacks a readable "
            f"{archive.TRIALS}; start anew: `ringray run SPEC`"
        )
    sweep = records[0].sweep
    recordings = _in_order(records)
    current = {recording.trial.key: recording for recording in recordings}
    earlier = [past for past in recordings if current[past.trial.key] is not past]
    if not store.knows(sweep.digest):
        _take_over(client, parents, store.identity)
    created = records[0].created
    added, earlier_added = store.restore(sweep, created, list(current.values()), earlier)
    unreadable = sum(record.unreadable for record in records)
    return Restored(sweep.digest, sweep.name, added, unreadable, earlier_added)


def _in_order(records: list[archive.ArchivedSweep]) -> list[Kept]:
    """Returns all recordings. The one of a trial to become current comes last: the newest of those
    that are current in their store."""

    def order(pair: tuple[bool, Kept]) -> tuple[bool, bool, float, int]:
        current, (trial, seq) = pair
        return trial.status != "pruned", current, trial.ended or 0.0, seq

    pairs = [pair for record in records for pair in record.recordings]
    return [recording for _, recording in sorted(pairs, key=order)]


def _take_over(client: MlflowClient, parents: list[Run], identity: str) -> None:
    """Makes ``identity`` the owner of a sweep, if one other store of the same user wrote its runs
    and is not writing."""
    if len(parents) != 1 or parents[0].info.status == "RUNNING":
        return
    (parent,) = parents
    if archive.user_tag().items() <= parent.data.tags.items():
        condition = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
        children = archive.runs_of(client, [parent.info.experiment_id], condition)
        for run in (*children, parent):  # in this order it can be repeated
            client.set_tag(run.info.run_id, STORE, identity)


def _choose(parents: list[Run], selector: str, where: str) -> list[Run]:
    """Returns the runs of the newest sweep of that name, or of the one whose digest begins so.

    ``parents``: the newest first.
    """
    sweeps = [(str(run.info.run_name), run.data.tags.get("ringray.sweep", "")) for run in parents]
    names = {name for name, _ in sweeps}
    digests = selected(selector, sweeps)
    if not digests:
        others = ", ".join(sorted(names)[:10]) or "none of ringray's"
        raise UserError(
            f"there is no sweep {selector!r} in MLflow at {where}, which has {others}; "
            "MLFLOW_TRACKING_URI names another place"
        )
    if len(digests) > 1 and selector not in names:
        several = ", ".join(digest[:12] for digest in digests)
        raise UserError(f"sweep {selector!r} is not unique at {where}: {several}; give more digits")
    return [run for run in parents if run.data.tags.get("ringray.sweep") == digests[0]]
