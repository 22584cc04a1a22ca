"""The artifact ``trials.jsonl`` of a parent run, from which a lost store is rebuilt exactly.

Its first line is the sweep; each other line is one recording of a trial, the earlier ones included.
Params, metrics and tags of the runs are for people: long and non-finite values are missing there.
Earlier versions kept the same rows in tags of the runs, compressed and in pieces; they are read.
"""

from __future__ import annotations

import base64
import getpass
import json
import tempfile
import zlib
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ringray.base.errors import PlaceError
from ringray.base.redaction import public_spec, without_credentials
from ringray.lab.trial.outcome import STATUSES, Kept, SweepInfo, TrialRow, part_of_a_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mlflow import MlflowClient
    from mlflow.entities import Run

    from ringray.lab.store.store import Store

TRIALS = "trials.jsonl"
STORE, CURRENT = "ringray.store", "ringray.current"  # tags
_MOST_RUNS = 50_000  # MLflow gives no more at once
_SWEEP = ("digest", "name", "kind", "spec", "source", "environment", "created")
_SWEEP_TAG, _TRIAL_TAG = "mlflow.ringray.sweep", "mlflow.ringray.trial"  # of earlier versions
_MOST = 64 << 20  # bytes of a tag, unpacked; it may be a decompression bomb


class ArchivedSweep(NamedTuple):
    """A sweep as one store wrote it. ``created``: its first start; ``recordings``: each with
    whether it is the current one of its trial; ``unreadable``: how many could not be read."""

    sweep: SweepInfo
    created: float
    recordings: list[tuple[bool, Kept]]
    unreadable: int


def lines(store: Store, digest: str) -> Iterator[str]:
    """Yields the lines of the artifact.

    If the tracking URI of the spec has a password, the URI and the source text are left out.
    """
    sweep = store.find(digest)
    content = {name: getattr(sweep, name) for name in _SWEEP}
    if without_credentials(sweep.source) != sweep.source:
        content["source"] = ""
    if public_spec(sweep.spec) != sweep.spec:
        content["spec"] = sweep.spec | {"tracking": sweep.spec["tracking"] | {"uri": None}}
    yield json.dumps(content)
    recordings, _ = store.changed_since(digest, 0)
    # Read last: what becomes an earlier recording meanwhile is not current twice.
    earlier = {(past.trial.key, past.seq) for past in store.history(digest)}
    for trial, seq in recordings:
        current = (trial.key, seq) not in earlier
        yield json.dumps(asdict(trial) | {"seq": seq, "current": current})


def read(client: MlflowClient, parent: Run) -> ArchivedSweep | None:
    """Returns what a parent run holds of its sweep; None if that cannot be read."""
    run_id = parent.info.run_id
    if TRIALS in (file.path for file in client.list_artifacts(run_id)):
        with tempfile.TemporaryDirectory() as folder:
            text = Path(client.download_artifacts(run_id, TRIALS, folder)).read_text("utf-8")
        first, *rest = [_parsed(line) for line in text.splitlines() or [""]]
    else:
        first = _unpacked(parent.data.tags, _SWEEP_TAG)
        children = runs_of(
            client, [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{run_id}'"
        )
        rest = [_of_tags(run.data.tags) for run in children]
    try:
        created = float(first.pop("created"))
        sweep = SweepInfo(**first)
        part_of_a_path(sweep.digest)
    except (AttributeError, KeyError, TypeError, ValueError, PlaceError):
        return None
    recordings = [recording for content in rest if (recording := _recording(content))]
    return ArchivedSweep(sweep, created, recordings, len(rest) - len(recordings))


def _recording(content: Any) -> tuple[bool, Kept] | None:
    """Returns whether a recording is current, and the recording; None if it cannot be read."""
    try:
        current, seq = bool(content.pop("current")), int(content.pop("seq"))
        trial = TrialRow(**content)
        part_of_a_path(trial.key)
    except (AttributeError, KeyError, TypeError, ValueError, PlaceError):
        return None
    return (current, Kept(trial, seq)) if trial.status in STATUSES else None


def _parsed(line: str) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(line)


def _of_tags(tags: Mapping[str, str]) -> Any:
    """Returns the row in the tags of a child run, as a line of the artifact has it."""
    content = _unpacked(tags, _TRIAL_TAG)
    return content and content | {"current": tags.get(CURRENT) != "false"}


def _unpacked(tags: Mapping[str, str], name: str) -> Any:
    """Returns the row in a tag and its pieces (``NAME``, ``NAME.1``, ...); None if there is none or
    it was changed."""
    count, _, text = tags.get(name, "").partition(":")
    try:
        text += "".join(tags[f"{name}.{number}"] for number in range(1, int(count)))
        packed = base64.b64decode(text, validate=True)
        return json.loads(zlib.decompressobj().decompress(packed, _MOST))
    except (KeyError, ValueError, RecursionError, zlib.error):
        return None


def user_tag() -> dict[str, str]:
    """Returns the tag with the user's name; empty for a container's user without one."""
    with suppress(OSError, KeyError):
        return {"mlflow.user": getpass.getuser()}
    return {}


def runs_of(client: MlflowClient, experiments: list[str], condition: str) -> list[Run]:
    """Returns all runs of the experiments that match an MLflow filter, the oldest first."""
    order = ["attributes.start_time ASC"]
    return list(client.search_runs(experiments, condition, max_results=_MOST_RUNS, order_by=order))


def experiments_of(client: MlflowClient) -> list[str]:
    """Returns the ids of all experiments."""
    experiments = client.search_experiments(max_results=_MOST_RUNS)
    return [str(experiment.experiment_id) for experiment in experiments]
