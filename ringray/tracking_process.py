"""The process that writes a sweep to MLflow while its driver measures.

It runs at the lowest priority, so that it does not disturb what is measured, and outlives its
driver just long enough to write what the store holds. It is started and spoken to by
:class:`ringray.tracking.Tracker`, in JSON lines:

    stdin   {"store": ..., "digest": ..., "uri": ..., "experiment": ..., "artifacts": ...,
             "driver": pid or null}
    stdout  {"ready": true, "experiment_id": ..., "run_id": ...}     or {"error": ...}
    stdin   {"finish": true, "timeout": seconds, "patience": seconds}
    stdout  {"written": n, "pending": n, "error": ... or null}

After that answer it draws the figures, and ends.

The end of stdin means finish too, and then nobody is told. So does SIGTERM, unless the driver says
so itself within moments: whoever stops a whole job signals both. MLflow may be down for hours in
between: it is tried again, the trials wait in the store. When it still fails at the end, the
process gives up after ``patience`` seconds of failure or ``timeout`` seconds in all.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from ringray.errors import PlaceError, RingrayError
from ringray.store import Store, TrialRow
from ringray.tracking_channel import Channel
from ringray.tracking_format import without_credentials

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringray.tracking_mlflow import Projection

POLL_S = 0.25
SUMMARY_S = 60.0
BACKOFF_S = (0.25, 10.0)
# When the driver is gone nobody waits for us, and `ringray sync` can do what is left.
ORPHAN_TIMEOUT_S = 120.0
ORPHAN_PATIENCE_S = 15.0
TERMINATED_S = 3.0  # for the driver to say how the sweep ended
LEASE_WAIT_S = 30.0


class Session:
    """The loop: tail the store, write each change, until told to finish."""

    def __init__(self, store: Store, digest: str, projection: Projection, channel: Channel) -> None:
        self._store = store
        self._digest = digest
        self._projection = projection
        self._channel = channel
        self._backlog: dict[str, TrialRow] = {}
        self._cursor = 0
        self._unread = True
        self._done: set[str] = set()
        self._summarised = time.monotonic()
        self._changed = False
        self._deadline: float | None = None  # set when told to finish
        self._asked = False
        self._patience = ORPHAN_PATIENCE_S
        self._failing_since: float | None = None
        self._answers = True  # whether MLflow itself works, when single calls fail
        self._retry_at = 0.0
        self._delay = BACKOFF_S[0]
        self.error: str | None = None
        self.terminated: float | None = None  # when SIGTERM came, on time.monotonic

    def run(self) -> None:
        """Returns when everything is written, or given up."""
        plan_logged = self._attempt(self._projection.log_plan)
        while True:
            self._listen(0.0 if self._backlog and self._ready() else POLL_S)
            self._tail()
            if self._backlog and self._ready():
                self._attempt(self._write_one)
            elif self._changed and time.monotonic() - self._summarised > SUMMARY_S:
                self._attempt(self._summarise)
            drained = not self._backlog and not self._unread
            if self._deadline is not None and (drained or self._given_up()):
                break
        stuck = None if drained else self.error
        # A trial that MLflow refuses for itself does not keep the parent run from its end.
        if drained or self._answers:
            self._retry_at = 0.0
            self._conclude(plan_logged)
        self.error = self.error or stuck
        if self._asked:
            self._channel.send(
                {"written": len(self._done), "pending": len(self._backlog), "error": self.error}
            )
        # Last, and not waited for with the answer: no trial is missing without them.
        if drained or self._answers:
            self._retry_at = 0.0
            self._insist(self._projection.log_figures, tries=2)

    def terminate(self, *_: object) -> None:
        """SIGTERM came."""
        self.terminated = self.terminated or time.monotonic()

    def _listen(self, timeout: float) -> None:
        if self._deadline is not None:
            # Nothing more is expected; only give a failing server time to come back.
            time.sleep(0.0 if self._ready() else min(timeout, 0.05))
            return
        message = self._channel.receive(timeout)
        if message and message.get("finish"):
            self._asked = True
            self._finish(message["timeout"], message["patience"])
        elif self._channel.closed or self._abandoned():
            self._finish(ORPHAN_TIMEOUT_S, ORPHAN_PATIENCE_S)

    def _abandoned(self) -> bool:
        return self.terminated is not None and time.monotonic() > self.terminated + TERMINATED_S

    def _finish(self, timeout: float, patience: float) -> None:
        self._deadline = time.monotonic() + timeout
        self._patience = patience
        # Whoever waits for the end learns at once whether MLflow answers now.
        self._failing_since, self._retry_at, self._delay = None, 0.0, BACKOFF_S[0]

    def _tail(self) -> None:
        try:
            rows, self._cursor = self._store.changed_since(self._digest, self._cursor)
        except PlaceError as error:
            self._unread, self.error = True, brief(error)
            self._failing_since = self._failing_since or time.monotonic()
            return
        self._unread = False
        for row in rows:
            self._backlog[row.key] = row
            self._done.discard(row.key)

    def _write_one(self) -> None:
        key, row = next(iter(self._backlog.items()))
        # To the end of the queue first: a trial that MLflow refuses must not block the others.
        del self._backlog[key]
        self._backlog[key] = row
        self._changed |= self._projection.write(row)
        del self._backlog[key]
        self._done.add(key)

    def _summarise(self) -> None:
        self._summarised, self._changed = time.monotonic(), False
        self._projection.summarise()

    def _conclude(self, plan_logged: bool) -> None:
        self._await_driver()
        self._insist(self._projection.summarise)
        self._insist(self._projection.close)
        # Files may lie elsewhere (S3, a proxy) and fail for good while the runs are all right:
        # they come last and are tried twice.
        if not plan_logged:
            self._insist(self._projection.log_plan, tries=2)
        self._insist(self._projection.log_results, tries=2)

    def _insist(self, action: Callable[[], None], tries: int = 1000) -> None:
        for _ in range(tries):
            while not self._ready():
                time.sleep(0.02)
            if self._attempt(action) or self._given_up():
                return

    def _await_driver(self) -> None:
        """A killed driver's pipes close a moment before it is seen to be dead."""
        until = time.monotonic() + 1.0
        while self._channel.closed and time.monotonic() < until:
            if self._store.owner(self._digest) is None:
                return
            time.sleep(0.02)

    def _ready(self) -> bool:
        return time.monotonic() >= self._retry_at

    def _given_up(self) -> bool:
        now = time.monotonic()
        failing = 0.0 if self._failing_since is None else now - self._failing_since
        return self._deadline is not None and (now > self._deadline or failing > self._patience)

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Does ``action``, or notes the failure and when to try again.

        Everything is caught: whatever MLflow, its database or the network raise, a sweep of days
        must not lose its tracking to it.
        """
        if not self._ready():
            return False
        try:
            if self._failing_since is not None:
                # The answer to the call that failed may have been lost, not the call.
                self._answers = False
                self._projection.refresh()
                self._answers = True
            action()
        except Exception as error:
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            self._retry_at, self._delay = now + self._delay, min(2 * self._delay, BACKOFF_S[1])
            self.error = brief(error)
            log(f"{self.error}; again in {self._retry_at - now:.1f} s\n{traceback.format_exc()}")
            return False
        self._failing_since, self._delay, self.error = None, BACKOFF_S[0], None
        return True


def main() -> int:
    """Speaks the protocol above; exit 0 when everything was written."""
    channel = _take_channel()
    os.nice(19)
    os.umask(0o077)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import_ahead("ringray.tracking_mlflow")
    while (settings := channel.receive(60.0)) is None:
        if channel.closed:  # a driver that did not get so far as to begin the sweep
            return 1
    with ExitStack() as stack:
        try:
            store = stack.enter_context(Store(settings["store"], create=False))
            _lease(stack, store, settings["digest"], settings["driver"])
            projection = _project(store, settings)
            projection.open()
        except Exception as error:
            log(traceback.format_exc())
            channel.send({"error": brief(error)})
            return 1
        session = Session(store, settings["digest"], projection, channel)
        signal.signal(signal.SIGTERM, session.terminate)
        channel.send(
            {"ready": True, "experiment_id": projection.experiment_id, "run_id": projection.run_id}
        )
        # In time that is nobody's: the driver is starting its ranks now.
        _import_ahead("ringray.report.figures.style")
        session.run()
        return 0 if session.error is None else 1


def brief(error: BaseException) -> str:
    """One line, without credentials, for a user's eyes."""
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0]
    kind = type(error).__name__
    if not isinstance(error, RingrayError) and kind not in ("MlflowException", first):
        first = f"{type(error).__name__}: {first}"
    return without_credentials(first)[:500]


def log(text: str) -> None:
    """To the tracking log, which is this process's stderr."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    with suppress(OSError):  # a full disk: what is to be tracked goes on
        print(f"{stamp} {without_credentials(text)}", file=sys.stderr, flush=True)


def _import_ahead(module: str) -> None:
    """So that it is there when it is needed; what is wrong with it is said then."""
    with suppress(Exception):
        importlib.import_module(module)


def _project(store: Store, settings: dict[str, Any]) -> Projection:
    from ringray.tracking_mlflow import Projection

    return Projection(
        store,
        settings["digest"],
        settings["uri"],
        settings["experiment"],
        settings["artifacts"],
    )


def _lease(stack: ExitStack, store: Store, digest: str, our_driver: int | None) -> None:
    """One tracker per sweep. That of a driver that was just killed is given time to end."""
    until = time.monotonic() + LEASE_WAIT_S
    while True:
        driver = store.owner(digest)
        foreign = driver is not None and driver.pid != our_driver
        try:
            stack.enter_context(store.lease(digest, role="tracker"))
            return
        except PlaceError:
            if foreign or time.monotonic() > until:
                raise
            time.sleep(0.2)


def _take_channel() -> Channel:
    """Keeps stdin and stdout for the protocol; what MLflow prints goes to the log."""
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return Channel(source, sink)


if __name__ == "__main__":
    sys.exit(main())
