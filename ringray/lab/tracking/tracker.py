"""MLflow as a projection of the store, seen from the driver.

The sweep never waits for the process that writes it, and no result is lost with it: :func:`sync`
writes what is missing from the store, at any time.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from ringray.base.errors import PlaceError
from ringray.base.redaction import without_credentials
from ringray.lab.store.store import Store
from ringray.lab.tracking.location import cannot_be_used, check, resolve_uri, ui_command
from ringray.lab.tracking.worker import Worker, receive, send
from ringray.lab.trial.outcome import SyncState, Tracked

READY_S = 180.0  # to import MLflow and make a database, on a busy machine
FINISH_S = 30.0  # for the rest when a sweep ends, however slow MLflow is
PER_TRIAL_S = 0.5  # added for each trial: short trials end faster than MLflow takes them
PATIENCE_S = 10.0  # within this time, with failures only
REQUEST_S = 10.0
SYNC_S = 3600.0  # for all trials of a sweep, when nothing else waits
UNHURRIED_S = 60.0  # for one request, when nothing else waits
FIGURES_S = 120.0  # on a machine that is busy with other things
_ANSWER_S = 5.0  # after the deadline that the process keeps


class Tracker:
    """The driver's end of one tracking process.

    Call order: the constructor before anything slow (the process imports MLflow while Ray starts),
    :meth:`start` when the store knows the sweep (``Store.begin``), :meth:`wait_ready` before the
    first trial; then write only to the store; :meth:`finish` after ``Store.finish``. If the driver
    dies in between, the process notices, writes what the store holds, marks the parent run as
    killed and ends.

    Args:
        settled: where MLflow has taken the sweep before (see :func:`settled`); it need not answer
            now.
        request_s: seconds that MLflow may take for one answer.

    Raises:
        PlaceError: no server answers at the URI, it is malformed, or its file cannot be used.
    """

    def __init__(
        self,
        store_path: Path,
        digest: str,
        uri: str | None,
        experiment: str,
        settled: Tracked | None = None,
        request_s: float = REQUEST_S,
    ) -> None:
        self.uri = resolve_uri(uri)
        if not settled:
            check(self.uri, None if request_s == REQUEST_S else request_s)
        self.place = Tracked(self.uri, "", "")
        self._sweep = (store_path, digest, self.uri, experiment, settled)
        self._patience = max(PATIENCE_S, request_s)
        self._until: float | None = None  # deadline of finishing, on time.monotonic
        self._started = False
        self._worker = Worker(digest, "ringray.lab.tracking.process", request_s, self.uri)

    def start(self) -> Tracker:
        """Tells the process its sweep, and does not wait until it has opened MLflow."""
        send(self._worker.connection, self._sweep)
        self._started = True
        return self

    def close(self) -> None:
        """Ends the process unless :meth:`start` was called."""
        if not self._started:
            self._worker.end(0.0)

    @property
    def ui_command(self) -> str:
        """The command, or for a server the address, that shows this sweep."""
        return ui_command(self.uri, self.place.experiment_id, self.place.run_id)

    def wait_ready(self, timeout: float = READY_S) -> None:
        """Returns when MLflow has accepted the sweep.

        Raises:
            PlaceError: it refused, or did not answer within ``timeout`` seconds; the process is
                ended then.
        """
        if self.place.run_id:
            return
        why = f"no answer in {timeout:.0f} s"
        try:
            answer = receive(self._worker.connection, timeout)
        except EOFError:
            answer, why = None, "its process ended"
        if isinstance(answer, Tracked):
            self.place = answer
            return
        self._worker.end()
        raise cannot_be_used(self.uri, answer or f"{why} (see {self._worker.log_path})")

    def ask_to_finish(self, trials: int = 0, timeout: float = FINISH_S) -> None:
        """Asks the process to write the rest, and does not wait.

        It has ``timeout`` seconds and ``PER_TRIAL_S`` more for each of the ``trials`` that may be
        left, but gives up earlier if MLflow only fails for ``PATIENCE_S``.
        """
        seconds = timeout + PER_TRIAL_S * trials
        self._until = time.monotonic() + seconds
        send(self._worker.connection, (seconds, min(seconds, self._patience)))

    def finish(self, timeout: float = FINISH_S) -> SyncState:
        """Waits until every recorded trial is in MLflow and the parent run has ended, or the time
        of :meth:`ask_to_finish` is up. An outage raises no error: missing trials are ``pending``.
        """
        if self._until is None:
            self.ask_to_finish(timeout=timeout)
        try:
            self.wait_ready(self._left())
            answer = receive(self._worker.connection, self._left() + _ANSWER_S)
        except EOFError:
            return self._lost(f"the tracking process ended with {self._worker.end()}")
        except PlaceError as error:
            return self._lost(str(error))
        if answer is None:
            self._worker.end()
            return self._lost("the tracking process gave no answer in time")
        state: SyncState
        self.place, state = answer
        patience = min(FIGURES_S, max(2.0, self._left()))
        ended = self._worker.end(patience)  # it draws the figures now
        if ended == "SIGKILL" and not state.error:
            state = replace(state, error=f"figures and report took more than {patience:.0f} s")
        return state

    def _left(self) -> float:
        return max(0.0, (self._until or 0.0) - time.monotonic())

    def _lost(self, why: str) -> SyncState:
        """Returns the state when the process cannot tell: all that was recorded may be missing."""
        path, digest, *_ = self._sweep
        with Store(path, create=False) as store:
            recorded = sum(store.find(digest).counts.values())
        return SyncState(0, recorded, why)


def settled(store: Store, digest: str, uri: str | None) -> Tracked | None:
    """Returns where MLflow has taken this sweep before, if it is to be tracked there now.

    That place is known to be right: if it does not answer now, the sweep can still go on.
    """
    place = store.tracked(digest) if store.knows(digest) else None
    return place if place and place.uri == without_credentials(resolve_uri(uri)) else None


def sync(store_path: str | Path, digest: str, uri: str | None, experiment: str) -> SyncState:
    """Writes to MLflow what it lacks of a sweep, and returns when that is done.

    Safe to repeat and to interrupt: runs are never duplicated. Nothing else waits, so that a server
    may take a minute for each answer; gives up after another minute of failures.

    Raises:
        PlaceError: the place cannot be used, or the sweep's own tracker is still writing.
    """
    path = Path(store_path).expanduser().absolute()
    tracker = Tracker(path, digest, uri, experiment, request_s=UNHURRIED_S).start()
    tracker.wait_ready(10 * UNHURRIED_S)
    return tracker.finish(SYNC_S)
