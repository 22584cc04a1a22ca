"""The process that writes a sweep to a sink while its driver measures.

It runs at the lowest priority, so that it does not disturb measurements, and outlives its driver
just long enough to write what the store holds. Its driver, a
:class:`ringray.lab.tracking.tracker.Tracker`, exchanges these messages with it:

    driver   path of the store, digest, URI, experiment, Tracked or None
    process  Tracked when the sink has accepted the sweep, else an error
    driver   seconds to finish in, and how many of them with failures only
    process  Tracked and SyncState

If the driver sends a Tracked, the sink has accepted the sweep before: then the first answer does
not wait for it, and an outage at the start is treated like any other.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from math import inf
from typing import TYPE_CHECKING

from ringray.base.errors import PlaceError
from ringray.lab.store.feed import CurvePoint, LogReader, path_of
from ringray.lab.store.store import Store
from ringray.lab.tracking.sink import service_of
from ringray.lab.tracking.worker import (
    REQUEST_TIMEOUT,
    brief,
    connection_to_driver,
    log,
    receive,
    send,
)
from ringray.lab.trial.outcome import SyncState

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from ringray.lab.tracking.sink import Sink
    from ringray.lab.trial.outcome import Kept

POLL_S = 0.25
SUMMARY_S = 60.0  # from one summary with its files to the next, at least
SUMMARY_SHARE = 0.05  # of the time for them, at most
PAUSE_S = (0.25, 10.0)  # between tries
# When the driver is gone nothing waits for this process, and `ringray sync` can do the rest.
ORPHAN_TIMEOUT_S, ORPHAN_PATIENCE_S = 120.0, 15.0
DYING_S = 1.0  # from the end of a killed driver's connection until it is seen to be dead
LEASE_WAIT_S = 30.0
LIVE = 1000  # points; MLflow takes no more at once


class Follower:
    """Writes the changes of the store to a sink: a loop that takes one step at a time.

    The sink may be down for hours: steps are repeated, and the trials wait in the store.
    """

    def __init__(
        self, sink: Sink, store: Store, digest: str, driver: Connection, opened: bool = True
    ) -> None:
        self._sink, self._store, self._digest, self._driver = sink, store, digest, driver
        self._cursor = 0
        self._backlog: dict[tuple[str, int], Kept] = {}  # by trial key and number
        self._seen: set[str] = set()  # keys of trials
        self._log = LogReader(path_of(store.path, digest))
        self._live: list[CurvePoint] = []  # of running trainings, not written yet
        self._summary_due, self._summary_pause = 0.0, SUMMARY_S
        # After a failed call, which was refused or whose answer was lost, the sink is asked what
        # it holds before the next one.
        self._sure = opened
        self._errors: dict[str, str] = {}  # of steps that failed and have not succeeded since
        self._failing_since: float | None = None
        self._paused_until = 0.0
        self._request_s = float(os.environ.get(REQUEST_TIMEOUT, "10"))
        self._deadline = self._patience = inf  # set when told to finish
        self._asked = False  # whether the driver waits for an answer
        self._draining, self._checked = True, False
        # Files may lie elsewhere (S3, a proxy) and fail for good while the runs are all right.
        runs, files = [self._check, sink.summarise, sink.close], [sink.log_files]
        self._last: list[Callable[[], object]] = [*runs, *files, self._answer, sink.log_figures]

    def run(self) -> bool:
        """Takes steps until none is left; returns whether the sink has everything."""
        while self._last:
            self._read()
            step = self._next()
            ending = self._listen(POLL_S if step is None else 0.0)
            if step is not None and not ending:
                self._take(step)
        return not self._errors

    def _next(self) -> Callable[[], object] | None:
        """Returns the next step; None if there is nothing to do now."""
        now, in_time = time.monotonic(), self._time_left() > 0
        following = self._deadline == inf
        if in_time and now < self._paused_until:
            return None
        if following and now > self._summary_due:
            return self._summarise
        if self._draining and in_time and self._backlog:
            return self._write_one
        if following:
            return self._write_live if self._live else None
        if self._draining and in_time and "store" in self._errors:
            return None
        # A trial that is refused for itself does not keep the sweep's run from its end.
        self._draining = False
        return self._last[0]

    def _take(self, step: Callable[[], object]) -> None:
        """Does a step; one that failed is tried again later, while there is time."""
        done = self._attempt(step)
        if not done:
            now = time.monotonic()
            failing = now - (self._failing_since or now)
            self._paused_until = now + min(max(failing, PAUSE_S[0]), PAUSE_S[1])
        if self._draining:
            return
        if done:
            self._last.pop(0)
        elif self._time_left() <= 0:
            self._last = [self._answer] if self._answer in self._last else []

    def _attempt(self, step: Callable[[], object]) -> bool:
        """Does a step once; returns whether it succeeded.

        Everything is caught: whatever MLflow, its database or the network raise, a sweep of days
        must not lose its tracking to it.
        """
        seconds = min(max(self._deadline - time.monotonic(), 1.0), self._request_s)
        os.environ[REQUEST_TIMEOUT] = str(int(seconds))
        name = step.__name__
        self._errors.pop(name, None)
        try:
            if not self._sure and step != self._answer:
                self._sink.refresh()
                self._sure = True
            step()
        except Exception as error:
            self._sure = False
            self._failing_since = self._failing_since or time.monotonic()
            self._errors[name] = brief(error)
            log(f"{name}: {self._errors[name]}\n{traceback.format_exc()}")
            return False
        self._failing_since = None
        return True

    def _summarise(self) -> None:
        began, self._summary_due = time.monotonic(), inf
        try:
            self._sink.summarise()
            self._sink.log_files()
        finally:
            took = time.monotonic() - began
            self._summary_pause = max(SUMMARY_S, took / SUMMARY_SHARE)

    def _write_live(self) -> None:
        some = self._live[:LIVE]
        self._sink.log_live(some)
        del self._live[: len(some)]

    def _write_one(self) -> None:
        # A trial that is refused must not block the others: to the end of the queue first.
        place = next(iter(self._backlog))
        row = self._backlog[place] = self._backlog.pop(place)
        if self._sink.write(row):
            due = time.monotonic() + self._summary_pause
            self._summary_due = min(self._summary_due, due)
        del self._backlog[place]

    def _check(self) -> None:
        """Asks the sink what it holds, and writes what is missing, once: a server or a proxy may
        have answered well to what it did not do, or done it after it was given up."""
        self._sink.refresh()
        complete = not self._backlog
        for row in self._store.changed_since(self._digest, 0)[0]:
            if self._sink.lacks(row):
                self._backlog[row.trial.key, row.seq] = row
        if complete and self._backlog and not self._checked:
            self._draining = self._checked = True

    def _answer(self) -> None:
        error = next(reversed(self._errors.values()), None)
        if self._asked:
            missing = {key for key, _ in self._backlog}
            state = SyncState(len(self._seen - missing), len(missing), error)
            send(self._driver, (self._sink.place, state))

    def _read(self) -> None:
        """Reads the changes of the store into the backlog, and the curves of running trials."""
        if self._deadline == inf:
            self._live += self._log.curve_points()
        try:
            rows, self._cursor = self._store.changed_since(self._digest, self._cursor)
        except PlaceError as error:
            self._errors["store"] = brief(error)
            return
        self._errors.pop("store", None)
        for row in rows:
            self._backlog[row.trial.key, row.seq] = row
            self._seen.add(row.trial.key)

    def _time_left(self) -> float:
        """Returns the seconds until this process gives up."""
        since = inf if self._failing_since is None else self._failing_since
        return min(self._deadline, since + self._patience) - time.monotonic()

    def _listen(self, timeout: float) -> bool:
        """Waits ``timeout`` seconds for the end of the sweep; returns whether it has come now."""
        if self._deadline < inf:
            time.sleep(timeout)
            return False
        try:
            order = receive(self._driver, timeout)
            self._asked = order is not None
        except EOFError:
            order = ORPHAN_TIMEOUT_S, ORPHAN_PATIENCE_S
            until = time.monotonic() + DYING_S
            while self._store.owner(self._digest) and time.monotonic() < until:
                time.sleep(0.02)
        if order is None:
            return False
        timeout, self._patience = order
        self._deadline = time.monotonic() + timeout
        # The driver, which waits for the end, learns at once whether the sink answers now.
        self._failing_since, self._paused_until = None, 0.0
        for step in (self._write_live, self._summarise):  # which were of the trials under way
            self._errors.pop(step.__name__, None)
        return True


def main() -> int:
    """Exchanges the messages above; returns 0 when everything was written."""
    driver = connection_to_driver()
    os.nice(19)
    os.umask(0o077)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends after its driver, which has them too
    _import_ahead(sys.argv[2])
    with ExitStack() as stack:
        try:
            follower = _open(stack, driver)
        except EOFError:  # the driver did not get so far as to begin the sweep
            return 1
        except Exception as error:
            log(traceback.format_exc())
            send(driver, brief(error))
            return 1
        # While nothing waits for it: the driver is starting its ranks now.
        _import_ahead("ringray.lab.report.figures.style")
        return 0 if follower.run() else 1


def _import_ahead(module: str) -> None:
    """Imports ``module`` before it is needed; an error in it is reported when it is needed."""
    with suppress(Exception):
        importlib.import_module(module)


def _open(stack: ExitStack, driver: Connection) -> Follower:
    """Returns a follower whose sink has accepted the sweep, and tells the driver."""
    path, digest, uri, experiment, settled = driver.recv()
    store = stack.enter_context(Store(path, create=False))
    _lease(stack, store, digest)
    sink: Sink
    if service := service_of(uri):
        sink = service.open_sink(store, digest, uri, experiment, settled)
    else:
        from ringray.lab.tracking.mlflow_sink import MLflowSink

        sink = MLflowSink(store, digest, uri, experiment, settled)
    if not settled:
        sink.refresh()
    send(driver, sink.place)
    return Follower(sink, store, digest, driver, opened=not settled)


def _lease(stack: ExitStack, store: Store, digest: str) -> None:
    """Takes the lease of the only tracker of a sweep; waits for that of a killed driver to end."""
    until = time.monotonic() + LEASE_WAIT_S
    while True:
        owner = store.owner(digest)
        foreign = owner is not None and owner.pid != os.getppid()
        try:
            stack.enter_context(store.lease(digest, role="tracker"))
            return
        except PlaceError:
            if foreign or time.monotonic() > until:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
