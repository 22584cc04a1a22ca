"""The process that puts into the store what MLflow has of a sweep: ``resume --from-mlflow``.

It is started and spoken to by :func:`ringray.lab.tracking.restore.restore`, in JSON lines:

    stdin   {"store": ..., "sweep": name or start of the digest, "uri": ...,
             "request": seconds for one call}
    stdout  {"digest": ..., "name": ..., "added": n, "unreadable": n}     or {"error": ...}
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

from mlflow import MlflowClient

from ringray.base.errors import UserError
from ringray.base.redaction import without_credentials
from ringray.lab.store.store import Store
from ringray.lab.tracking.archive import sweep_of, trial_of
from ringray.lab.tracking.channel import brief, log, take_channel

if TYPE_CHECKING:
    from mlflow.entities import Run

    from ringray.lab.trial.outcome import Kept, SweepInfo

_PAGE = 1000


def restore(client: MlflowClient, store: Store, selector: str, uri: str) -> dict[str, Any]:
    """Adds the sweep and its ended trials, and changes nothing that the store has.

    Raises:
        UserError: MLflow has no such sweep, several that fit, or one that cannot be rebuilt.
    """
    experiments = _experiments(client)
    parents = _search(client, experiments, "tags.`ringray.role` = 'sweep'")
    sweep, created = _choose(parents, selector, without_credentials(uri))
    runs = _search(client, experiments, f"tags.`ringray.sweep` = '{sweep.digest}'")
    kept: dict[str, Kept] = {}
    children = {run.data.tags["ringray.key"] for run in runs if "ringray.key" in run.data.tags}
    for run in runs:
        one = trial_of(run.data.tags)
        # Of doubles (an answer that was lost) the later recording counts.
        if one and (one.trial.key not in kept or one.seq > kept[one.trial.key].seq):
            kept[one.trial.key] = one
    added = store.restore(sweep, created, sorted(kept.values(), key=lambda one: one.seq))
    return {
        "digest": sweep.digest,
        "name": sweep.name,
        "added": added,
        "unreadable": len(children - set(kept)),
    }


def _choose(parents: list[Run], selector: str, where: str) -> tuple[SweepInfo, float]:
    """The newest sweep of that name, or the one whose digest begins so."""
    named: list[tuple[SweepInfo, float]] = []
    begun: dict[str, tuple[SweepInfo, float] | None] = {}
    names = set()
    for run in sorted(parents, key=lambda run: -(run.info.start_time or 0)):
        found = sweep_of(run.data.tags)
        name = found[0].name if found else run.info.run_name
        names.add(name)
        digest = run.data.tags.get("ringray.sweep", "")
        if name == selector and (found or not named):
            named += [found] if found else []
            begun.setdefault(digest, found)
        elif len(selector) >= 4 and digest.startswith(selector.lower()):
            begun[digest] = begun.get(digest) or found
    if named:
        return named[0]
    if len(begun) > 1:
        several = ", ".join(digest[:12] for digest in begun)
        raise UserError(f"sweep {selector!r} is not unique at {where}: {several}; give more digits")
    for found in begun.values():
        if found:
            return found
        raise UserError(
            f"sweep {selector!r} at {where} cannot be rebuilt: its parent run lacks what the store "
            "held (another version of ringray wrote it, or its tags were changed); start anew: "
            "`ringray run SPEC`"
        )
    known = ", ".join(sorted(names)[:10]) or "none of ringray's"
    raise UserError(
        f"there is no sweep {selector!r} in MLflow at {where}, which has {known}; "
        "MLFLOW_TRACKING_URI names another place"
    )


def _experiments(client: MlflowClient) -> list[str]:
    found: list[str] = []
    token: str | None = None
    while True:
        page = client.search_experiments(max_results=_PAGE, page_token=token)
        found += [str(one.experiment_id) for one in page]
        token = page.token
        if not token:
            return found


def _search(client: MlflowClient, experiments: list[str], condition: str) -> list[Run]:
    runs: list[Run] = []
    token: str | None = None
    while True:
        page = client.search_runs(
            experiments, filter_string=condition, max_results=_PAGE, page_token=token
        )
        runs += page
        token = page.token
        if not token:
            return runs


def main() -> int:
    """Speaks the protocol above."""
    channel = take_channel()
    settings = channel.receive(60.0)
    if settings is None:
        return 1
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(settings["request"])
    try:
        with Store(settings["store"], create=False) as store:
            client = MlflowClient(tracking_uri=settings["uri"])
            answer = restore(client, store, settings["sweep"], settings["uri"])
    except Exception as error:  # whatever MLflow, its database or the network raise
        log(traceback.format_exc())
        answer = {"error": brief(error)}
    return 0 if channel.send(answer) and "error" not in answer else 1


if __name__ == "__main__":
    sys.exit(main())
