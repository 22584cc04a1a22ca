"""The process that writes a sweep to MLflow while its driver measures.

It runs at the lowest priority, so that it does not disturb what is measured, and outlives its
driver just long enough to write what the store holds. It is started and spoken to by
:class:`ringray.lab.tracking.tracker.Tracker`, in JSON lines:

    stdin   {"store": ..., "digest": ..., "uri": ..., "experiment": ..., "artifacts": ...,
             "driver": pid or null, "settled": null or [experiment_id, run_id],
             "request": seconds for one call}
    stdout  {"ready": true, "experiment_id": ..., "run_id": ...}     or {"error": ...}
    stdin   {"finish": true, "timeout": seconds, "patience": seconds}
    stdout  {"written": n, "pending": n, "error": ... or null, "experiment_id": ..., "run_id": ...}

``settled`` is where MLflow has taken the sweep before: then ready is said without asking it, and
that it is down now is an outage like any other. After that answer it draws the figures, and ends.

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from ringray.base.errors import PlaceError
from ringray.lab.store.store import Store
from ringray.lab.tracking.channel import Channel, brief, log, take_channel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ringray.lab.tracking.projection import Projection
    from ringray.lab.trial.outcome import TrialRow

POLL_S = 0.25
SUMMARY_S = 60.0
BACKOFF_S = (0.25, 10.0)
# When the driver is gone nobody waits for us, and `ringray sync` can do what is left.
ORPHAN_TIMEOUT_S = 120.0
ORPHAN_PATIENCE_S = 15.0
TERMINATED_S = 3.0  # for the driver to say how the sweep ended
LEASE_WAIT_S = 30.0
# A server does several things at once, and most of a call to it is waiting.
WRITERS = 4


class Session:
    """The loop: tail the store, write each change, until told to finish."""

    def __init__(
        self,
        store: Store,
        digest: str,
        projection: Projection,
        channel: Channel,
        opened: bool = True,
        writers: int = 1,
        request_s: int = 10,
    ) -> None:
        self._request_s = request_s  # for one call, as long as there is no hurry
        self._opened = opened
        self._writers = writers
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
        self._failed = False  # ever: an answer may have been lost, and come too late to be seen
        self._pool = ThreadPoolExecutor(writers, "write")
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
                self._attempt(self._write_some)
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
            where = self._projection
            self._channel.send(
                {
                    "written": len(self._done),
                    "pending": len(self._backlog),
                    "error": self.error,
                    "experiment_id": where.experiment_id,
                    "run_id": where.run_id,
                }
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

    def _write_some(self) -> None:
        batch = list(islice(self._backlog.items(), self._writers))
        # To the end of the queue first: a trial that MLflow refuses must not block the others.
        for key, row in batch:
            del self._backlog[key]
            self._backlog[key] = row
        failed: Exception | None = None
        for (key, _), written in zip(batch, self._write(row for _, row in batch), strict=True):
            if isinstance(written, Exception):
                failed = failed or written
                continue
            self._changed |= written
            del self._backlog[key]
            self._done.add(key)
        if failed:
            raise failed

    def _write(self, rows: Iterable[TrialRow]) -> list[bool | Exception]:
        """All of them, whatever becomes of one; no call is under way afterwards."""

        def one(row: TrialRow) -> bool | Exception:
            try:
                return self._projection.write(row)
            except Exception as error:  # see _attempt
                return error

        if self._writers == 1:
            return [one(row) for row in rows]
        return list(self._pool.map(one, rows))

    def _open(self) -> None:
        self._answers = False
        self._projection.open()
        self._opened = self._answers = True

    def _summarise(self) -> None:
        self._summarised, self._changed = time.monotonic(), False
        self._projection.summarise()

    def _conclude(self, plan_logged: bool) -> None:
        self._await_driver()
        if self._failed:
            self._insist(self._projection.refresh, tries=2)
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
        if self._deadline is not None:
            left = int(self._deadline - time.monotonic())
            os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(min(max(left, 1), self._request_s))
        try:
            if not self._opened:
                self._open()
            elif self._failing_since is not None:
                # The answer to the call that failed may have been lost, not the call.
                self._answers = False
                self._projection.refresh()
                self._answers = True
            action()
        except Exception as error:
            now = time.monotonic()
            self._failing_since, self._failed = self._failing_since or now, True
            self._retry_at, self._delay = now + self._delay, min(2 * self._delay, BACKOFF_S[1])
            self.error = brief(error)
            log(f"{self.error}; again in {self._retry_at - now:.1f} s\n{traceback.format_exc()}")
            return False
        self._failing_since, self._delay, self.error = None, BACKOFF_S[0], None
        return True


def main() -> int:
    """Speaks the protocol above; exit 0 when everything was written."""
    channel = take_channel()
    os.nice(19)
    os.umask(0o077)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import_ahead("ringray.lab.tracking.projection")
    while (settings := channel.receive(60.0)) is None:
        if channel.closed:  # a driver that did not get so far as to begin the sweep
            return 1
    with ExitStack() as stack:
        try:
            store = stack.enter_context(Store(settings["store"], create=False))
            _lease(stack, store, settings["digest"], settings["driver"])
            os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(settings["request"])
            projection = _project(store, settings)
            settled = settings.get("settled")
            if settled:
                projection.experiment_id, projection.run_id = settled
            else:
                projection.open()
        except Exception as error:
            log(traceback.format_exc())
            channel.send({"error": brief(error)})
            return 1
        writers = WRITERS if settings["uri"].lower().startswith("http") else 1
        session = Session(
            store,
            settings["digest"],
            projection,
            channel,
            opened=not settled,
            writers=writers,
            request_s=settings["request"],
        )
        signal.signal(signal.SIGTERM, session.terminate)
        channel.send(
            {"ready": True, "experiment_id": projection.experiment_id, "run_id": projection.run_id}
        )
        # In time that is nobody's: the driver is starting its ranks now.
        _import_ahead("ringray.lab.report.figures.style")
        session.run()
        return 0 if session.error is None else 1


def _import_ahead(module: str) -> None:
    """So that it is there when it is needed; what is wrong with it is said then."""
    with suppress(Exception):
        importlib.import_module(module)


def _project(store: Store, settings: dict[str, Any]) -> Projection:
    from ringray.lab.tracking.projection import Projection

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


if __name__ == "__main__":
    sys.exit(main())
