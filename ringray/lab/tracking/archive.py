"""The store's rows as tags of MLflow's runs, from which a lost store can be rebuilt exactly.

Params, metrics and other tags are for people: long and non-finite values are missing there.
Therefore each run also has a tag with the whole row: compressed JSON in base64, in pieces if it is
long (``NAME``, ``NAME.1``, ...), under a name that MLflow's pages do not show. A missing or changed
piece makes this row unreadable and no other.
"""

from __future__ import annotations

import base64
import getpass
import json
import zlib
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ringray.base.errors import PlaceError
from ringray.base.redaction import public_spec, without_credentials
from ringray.lab.tracking.mlflow_record import record_digest
from ringray.lab.trial.outcome import STATUSES, Kept, SweepInfo, SweepRow, TrialRow, part_of_a_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run
    from mlflow.store.entities import PagedList

_Record = TypeVar("_Record")
_Item = TypeVar("_Item")

SWEEP_TAG = "mlflow.ringray.sweep"
TRIAL_TAG = "mlflow.ringray.trial"
STORE, CURRENT = "ringray.store", "ringray.current"
_PAGE = 1000
_PIECE = 4900  # characters; older servers take 5000 per tag
_MOST = 64 << 20  # bytes of one record, unpacked; a tag may be a decompression bomb


def sweep_tags(sweep: SweepRow) -> dict[str, str]:
    """Returns the tags with a sweep and the time of its first start.

    If the tracking URI of the spec has a password, the URI and the source text are left out.
    """
    names = ("digest", "name", "kind", "spec", "source", "environment", "created")
    content = {name: getattr(sweep, name) for name in names}
    if without_credentials(sweep.source) != sweep.source:
        content["source"] = ""
    if public_spec(sweep.spec) != sweep.spec:
        content["spec"] = sweep.spec | {"tracking": sweep.spec["tracking"] | {"uri": None}}
    return _packed(SWEEP_TAG, content)


def trial_tags(trial: TrialRow, seq: int) -> dict[str, str]:
    """Returns the tags with a recorded trial; ``seq``: the number of the recording."""
    return _packed(TRIAL_TAG, asdict(trial) | {"seq": seq})


def sweep_of(tags: Mapping[str, str]) -> tuple[SweepInfo, float] | None:
    """Returns the sweep of a parent run and its first start; None if it cannot be read."""
    return _record(SweepInfo, "digest", "created", _unpacked(tags, SWEEP_TAG))


def trial_of(tags: Mapping[str, str]) -> Kept | None:
    """Returns the trial of a child run; None if it cannot be read or contradicts its tags."""
    record = _record(TrialRow, "key", "seq", _unpacked(tags, TRIAL_TAG))
    if record is None:
        return None
    trial, seq = record
    if trial.status not in STATUSES or record_digest(trial) != tags.get("ringray.record"):
        return None
    return Kept(trial, int(seq))


def _record(
    made: Callable[..., _Record], named: str, beside: str, content: Any
) -> tuple[_Record, float] | None:
    """Returns a record and the number kept with it; None if its name cannot be part of a path."""
    try:
        number = float(content.pop(beside))
        record = made(**content)
        part_of_a_path(getattr(record, named))
    except (AttributeError, KeyError, TypeError, ValueError, PlaceError):
        return None
    return record, number


def _packed(name: str, content: dict[str, Any]) -> dict[str, str]:
    text = base64.b64encode(zlib.compress(json.dumps(content).encode(), 9)).decode()
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    rest = {f"{name}.{number}": piece for number, piece in enumerate(pieces[1:], start=1)}
    return {name: f"{len(pieces)}:{pieces[0]}"} | rest


def _unpacked(tags: Mapping[str, str], name: str) -> Any:
    count, _, text = tags.get(name, "").partition(":")
    try:
        text += "".join(tags[f"{name}.{number}"] for number in range(1, int(count)))
        reader = zlib.decompressobj()
        content = reader.decompress(base64.b64decode(text, validate=True), _MOST)
        return json.loads(content) if reader.eof else None
    except (KeyError, ValueError, RecursionError, zlib.error):
        return None


def user_tag() -> dict[str, str]:
    """Returns the tag with the user's name; empty for a container's user without one."""
    with suppress(OSError, KeyError):
        return {"mlflow.user": getpass.getuser()}
    return {}


def claim(
    client: MlflowClient, runs: Sequence[Run], parent: str, owner: str | None, new: str
) -> bool:
    """Makes the store ``new`` the owner of the run ``parent`` and of its children, as far as they
    are of ``owner`` (None: a version that named no store); returns whether the parent is."""
    theirs = [run for run in runs if run.data.tags.get(STORE) == owner]
    parents = [run for run in theirs if run.info.run_id == parent]
    if parents:
        children = [run for run in theirs if run.data.tags.get("mlflow.parentRunId") == parent]
        for run in (*children, *parents):  # in this order it can be repeated
            client.set_tag(run.info.run_id, STORE, new)
    return bool(parents)


def runs_of(client: MlflowClient, experiments: list[str], condition: str) -> list[Run]:
    """Returns all runs of the experiments that match an MLflow filter, the oldest first."""
    order = ["attributes.start_time ASC"]
    search = partial(client.search_runs, experiments, condition, order_by=order)
    return _all(lambda token: search(max_results=_PAGE, page_token=token))


def experiments_of(client: MlflowClient) -> list[str]:
    """Returns the ids of all experiments."""
    search = partial(client.search_experiments, max_results=_PAGE)
    experiments: list[Experiment] = _all(lambda token: search(page_token=token))
    return [str(experiment.experiment_id) for experiment in experiments]


def _all(search: Callable[[str | None], PagedList[_Item]]) -> list[_Item]:
    page = search(None)
    items = list(page)
    while page.token:
        page = search(page.token)
        items += page
    return items
