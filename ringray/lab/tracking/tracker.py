"""MLflow as a projection of the store, seen from the driver.

A :class:`Tracker` is a process of its own (:mod:`.process`) that tails the store
and writes one parent run per sweep and one child run per ended trial. The sweep never waits for
it, and nothing is lost with it: :func:`sync` writes from the store what is missing, at any time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ringray.base import private_files, provenance
from ringray.base.errors import PlaceError
from ringray.base.redaction import TOKENS, without_credentials
from ringray.lab.driver.observer import SyncState
from ringray.lab.store.store import Store
from ringray.lab.tracking.channel import Channel
from ringray.lab.tracking.location import (
    artifact_root,
    cannot_be_used,
    check,
    resolve_uri,
    ui_command,
)
from ringray.lab.trial.outcome import Tracked, part_of_a_path

__all__ = ["Prepared", "SyncState", "Tracker", "resolve_uri", "settled", "sync"]

READY_S = 60.0
FINISH_S = 30.0  # for what is left when a sweep ends, however slow MLflow is
PER_TRIAL_S = 0.5  # and so much more for each trial of a sweep whose trials are shorter than that
PATIENCE_S = 10.0  # of these with failures and nothing else
UNHURRIED_S = 60.0  # for an answer, where nothing else waits
FIGURES_S = 120.0  # on a machine that is busy with other things
_LOG_BYTES = 1 << 20
# MLflow's own retries (minutes of them) would hide an outage; the tracker has its own.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class Prepared:
    """A tracking process that imports what it needs, and waits to be told of its sweep.

    MLflow takes seconds to import, which pass while Ray starts.
    """

    def __init__(self, digest: str, module: str = "ringray.lab.tracking.process") -> None:
        self.log_path = _log_path(digest)
        package_root = str(provenance.packages()[0].parent)
        paths = [package_root, os.environ.get("PYTHONPATH", "")]
        # It has nothing to do with Ray, whose token it does not need.
        kept = {name: os.environ[name] for name in os.environ if name not in TOKENS}
        environment = kept | _ENVIRONMENT
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with self.log_path.open("ab") as log:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                # -P: the working directory is the user's and not a place to import from.
                [sys.executable, "-P", "-W", "ignore", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                bufsize=0,
                # Ctrl-C in the terminal is for the driver; the tracker must still drain.
                start_new_session=True,
            )

    def take(self) -> tuple[subprocess.Popen[bytes], Channel]:
        """The process, which is the caller's from now on, and the channel to it."""
        process = self._process
        assert process
        assert process.stdin
        assert process.stdout
        self._process = None
        return process, Channel(process.stdout.fileno(), process.stdin.fileno())

    def close(self) -> None:
        """Ends the process, unless somebody took it."""
        if self._process is not None:
            end(self._process, patience=0.0)
            self._process = None


class Tracker:
    """The driver's end of one tracking process.

    In order: :meth:`start` before anything slow (MLflow needs seconds to open), :meth:`wait_ready`
    before the first trial, then only the store is written; :meth:`finish` after
    ``Store.finish``. A driver that dies in between needs nothing: the process notices, writes
    what the store holds, marks the parent run as killed and ends.
    """

    def __init__(
        self,
        store_path: Path,
        digest: str,
        uri: str,
        experiment: str,
        driver: int | None,
        prepared: Prepared | None = None,
        settled: Tracked | None = None,
    ) -> None:
        self.driver = driver
        self.store_path = store_path
        self.digest = digest
        self.uri = uri
        self.experiment = experiment
        self.experiment_id = ""
        self.run_id = ""
        self.log_path = prepared.log_path if prepared else _log_path(digest)
        self._until: float | None = None  # when the finish that was asked for is given up
        self._settled = settled
        self._process, self._channel = self._spawn(prepared)

    @classmethod
    def start(
        cls,
        store_path: str | Path,
        digest: str,
        uri: str | None,
        experiment: str,
        prepared: Prepared | None = None,
        settled: Tracked | None = None,
    ) -> Tracker:
        """Checks that the place can be used, then starts the process without waiting for it.

        The sweep must have begun in the store (``Store.begin``). ``prepared``: a process that was
        started for this sweep before; ``settled``: where MLflow has taken the sweep before, see
        :func:`settled`, which need not answer now.

        Raises:
            PlaceError: nobody answers at the URI, it is malformed, or its file cannot be used.
        """
        resolved = resolve_uri(uri) if settled else checked(uri)
        path = absolute(store_path)
        return cls(path, digest, resolved, experiment, os.getpid(), prepared, settled)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ui_command(self) -> str:
        """The command, or for a server the address, that shows this sweep."""
        return ui_command(self.uri, self.experiment_id, self.run_id)

    def wait_ready(self, timeout: float = READY_S) -> None:
        """Returns when MLflow has accepted the sweep.

        Raises:
            PlaceError: it refused, or did not answer within ``timeout`` seconds; the process is
                ended then.
        """
        if self.run_id:
            return
        message = self._channel.receive(timeout)
        if message and message.get("ready"):
            self.experiment_id = str(message["experiment_id"])
            self.run_id = str(message["run_id"])
            return
        if message is None:
            self._end()
            why = "its process ended" if self._channel.closed else f"no answer in {timeout:.0f} s"
            message = {"error": f"{why} (see {self.log_path})"}
        self._end()
        raise cannot_be_used(self.uri, str(message.get("error")))

    def ask_to_finish(self, trials: int = 0, timeout: float = FINISH_S) -> None:
        """Has the rest written from now on, for at most ``timeout`` seconds and half a second for
        each of the ``trials`` that may be left, and does not wait. Where MLflow only fails, it is
        given up sooner, after ``PATIENCE_S``."""
        timeout += PER_TRIAL_S * trials
        self._until = time.monotonic() + timeout
        patience = min(timeout, PATIENCE_S)
        self._channel.send({"finish": True, "timeout": timeout, "patience": patience})

    @property
    def asked(self) -> bool:
        """Whether it was asked to finish."""
        return self._until is not None

    def finish(self, timeout: float = FINISH_S) -> SyncState:
        """Waits until every recorded trial is in MLflow and the parent run is ended.

        After :meth:`ask_to_finish` it waits for what is left of the time given there.

        Never raises for an outage: what is missing after ``timeout`` seconds is ``pending``, and
        :func:`sync` writes it later. A process that was killed meanwhile is started once more.
        """
        until = self._until or time.monotonic() + timeout
        patience = min(timeout, PATIENCE_S)
        state = self._drain(until, patience)
        if state is None and self._channel.closed and time.monotonic() < until:
            code = self._end()
            self._process, self._channel = self._spawn()
            self.run_id, self._until = "", None
            state = self._drain(until, patience)
            if state is None:
                state = self._lost(f"the tracking process ended with {_ending(code)}")
        if state is None:
            state = self._lost(f"no answer in {timeout:.0f} s")
            self._end()
        else:  # it draws the figures now
            self._end(max(2.0, until - time.monotonic()))
        return state

    def _drain(self, until: float, patience: float) -> SyncState | None:
        """None when the process gives no (or no good) answer."""
        try:
            self.wait_ready(max(0.0, until - time.monotonic()))
        except PlaceError as error:
            return None if self._channel.closed else self._lost(str(error))
        left = max(0.0, until - time.monotonic())
        if self._until is None:
            self._channel.send({"finish": True, "timeout": left, "patience": patience})
        # The tracker keeps the time itself and then says how much is missing.
        message = self._channel.receive(left + 1.0)
        if message is None:
            return None
        self.experiment_id, self.run_id = message["experiment_id"], message["run_id"]
        return SyncState(int(message["written"]), int(message["pending"]), message["error"])

    def _lost(self, why: str) -> SyncState:
        """The state when the tracker cannot tell: all that was recorded may be missing."""
        with Store(self.store_path, create=False) as store:
            recorded = sum(store.find(self.digest).counts.values())
        return SyncState(0, recorded, why)

    def _spawn(self, prepared: Prepared | None = None) -> tuple[subprocess.Popen[bytes], Channel]:
        process, channel = (prepared or Prepared(self.digest)).take()
        # Through the pipe and not as arguments, which every user of the machine can read.
        settings: dict[str, Any] = {
            "store": str(self.store_path),
            "digest": self.digest,
            "uri": self.uri,
            "experiment": self.experiment,
            "artifacts": artifact_root(self.uri),
            "request": 10 if self.driver else int(UNHURRIED_S),
            "driver": self.driver,
            "settled": self._settled and [self._settled.experiment_id, self._settled.run_id],
        }
        channel.send(settings)
        return process, channel

    def _end(self, patience: float = 2.0) -> int:
        """Ends the process if it has not ended itself in that time; its exit code."""
        return end(self._process, patience)


def settled(store: Store, digest: str, uri: str | None) -> Tracked | None:
    """Where MLflow has taken this sweep before, if that is where it is to be tracked now.

    That place is right, and one that does not answer keeps nobody from going on.
    """
    place = store.tracked(digest) if store.knows(digest) else None
    return place if place and place.uri == without_credentials(resolve_uri(uri)) else None


def sync(
    store_path: str | Path, digest: str, uri: str | None, experiment: str, timeout: float = 3600.0
) -> SyncState:
    """Writes to MLflow what it lacks of a sweep, and returns when that is done.

    Safe to repeat and to interrupt: nothing is doubled. Nobody waits for anything else, so that a
    server may take a minute for each answer; gives up after another minute of failures.

    Raises:
        PlaceError: the place cannot be used, or the sweep's own tracker is still writing.
    """
    resolved = checked(uri, UNHURRIED_S)
    tracker = Tracker(absolute(store_path), digest, resolved, experiment, driver=None)
    tracker.wait_ready(10 * UNHURRIED_S)
    state = tracker._drain(time.monotonic() + timeout, patience=UNHURRIED_S)
    code = tracker._end(2.0 if state is None else FIGURES_S)
    return state or tracker._lost(f"the tracking process ended with {_ending(code)}")


def end(process: subprocess.Popen[bytes], patience: float) -> int:
    """Ends ``process`` if it has not ended itself; its exit code."""
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()
    try:
        # One that has answered ends by itself, in the time that an interpreter needs.
        process.wait(timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return process.returncode


def absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()


def checked(uri: str | None, seconds: float | None = None) -> str:
    """The URI that counts, where somebody answers; PlaceError if nobody does in that time."""
    resolved = resolve_uri(uri)
    check(resolved, seconds)
    return resolved


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _log_path(digest: str) -> Path:
    folder = private_files.create_home() / "logs"
    path = folder / f"tracking-{part_of_a_path(digest)[:12]}.log"
    try:
        private_files.folder(folder)
        private_files.create(path)
        if path.stat().st_size > _LOG_BYTES:
            os.truncate(path, 0)
    except OSError as error:
        raise PlaceError(
            f"the log {path} cannot be written: {error.strerror}; set RINGRAY_HOME to a folder "
            "that you may write to"
        ) from error
    return path
