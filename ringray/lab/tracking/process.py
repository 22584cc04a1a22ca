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
PAUSE_S = (0.25, 10.0)  # between tries
# When the driver is gone nothing waits for this process, and `ringray sync` can do the rest.
ORPHAN_TIMEOUT_S, ORPHAN_PATIENCE_S = 120.0, 15.0
DYING_S = 1.0  # from the end of a killed driver's connection until it is seen to be dead
LEASE_WAIT_S = 30.0
LIVE = 1000  # points; MLflow takes no more at once


class Follower:
    """Writes the changes of the store to a sink: follows the sweep, and then finishes it.

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
        self._summary_due = 0.0
        # After a failed call, which was refused or whose answer was lost, the sink is asked what
        # it holds before the next one.
        self._sure = opened
        self._errors: dict[str, str] = {}  # of steps that failed and have not succeeded since
        self._failing_since: float | None = None
        self._paused_until = 0.0
        self._request_s = float(os.environ.get(REQUEST_TIMEOUT, "10"))
        self._deadline = self._patience = inf  # set when told to finish
        self._asked = False  # whether the driver waits for an answer

    def run(self) -> bool:
        """Follows the sweep to its end; returns whether the sink has everything."""
        step: Callable[[], object] | None = None
        while not self._listen(POLL_S if step is None else 0.0):
            if step is not None:
                self._attempt(step)
            self._live += self._log.curve_points()
            self._read()
            step = self._next()
        self._finish()
        return not self._errors

    def _next(self) -> Callable[[], object] | None:
        """Returns the next step while the sweep runs; None if there is nothing to do now."""
        now = time.monotonic()
        if now < self._paused_until:
            return None
        if now > self._summary_due:
            return self._summarise
        if self._backlog:
            return self._write_one
        return self._write_live if self._live else None

    def _finish(self) -> None:
        """Writes the rest and the end of the sweep, and tells the driver what is missing."""
        self._drain()
        complete = not self._backlog
        done = self._repeat(self._check)
        if done and complete and self._backlog:
            self._drain()
            done = self._repeat(self._check)
        # Files may lie elsewhere (S3, a proxy) and fail for good while the runs are all right.
        steps = (self._sink.summarise, self._sink.close, self._sink.log_files)
        done = done and all(map(self._repeat, steps))
        if self._asked:
            error = next(reversed(self._errors.values()), None)
            missing = {key for key, _ in self._backlog}
            state = SyncState(len(self._seen - missing), len(missing), error)
            send(self._driver, (self._sink.place, state))
        if done:
            self._repeat(self._sink.log_figures)

    def _drain(self) -> None:
        """Writes all trials. A trial that is refused for itself does not keep the sweep's run from
        its end."""
        while self._time_left() > 0:
            self._read()
            if not self._backlog and "store" not in self._errors:
                return
            if not self._backlog or not self._attempt(self._write_one):
                self._wait()

    def _repeat(self, step: Callable[[], object]) -> bool:
        """Repeats a step until it succeeds; False if there is no time for that."""
        while not self._attempt(step):
            if not self._wait():
                return False
        return True

    def _wait(self) -> bool:
        """Waits until a failed step may be repeated; returns whether there is time for it."""
        pause = max(self._paused_until - time.monotonic(), PAUSE_S[0])
        time.sleep(max(0.0, min(pause, self._time_left())))
        return self._time_left() > 0

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
            if not self._sure:
                self._sink.refresh()
                self._sure = True
            step()
        except Exception as error:
            now = time.monotonic()
            self._sure = False
            self._failing_since = self._failing_since or now
            failing = now - self._failing_since
            self._paused_until = now + min(max(failing, PAUSE_S[0]), PAUSE_S[1])
            self._errors[name] = brief(error)
            log(f"{name}: {self._errors[name]}\n{traceback.format_exc()}")
            return False
        self._failing_since = None
        return True

    def _summarise(self) -> None:
        self._summary_due = inf
        self._sink.summarise()
        self._sink.log_files()

    def _write_live(self) -> None:
        some = self._live[:LIVE]
        self._sink.log_live(some)
        del self._live[: len(some)]

    def _write_one(self) -> None:
        # A trial that is refused must not block the others: to the end of the queue first.
        place = next(iter(self._backlog))
        row = self._backlog[place] = self._backlog.pop(place)
        if self._sink.write(row):
            self._summary_due = min(self._summary_due, time.monotonic() + SUMMARY_S)
        del self._backlog[place]

    def _check(self) -> None:
        """Asks the sink what it lacks: a server or a proxy may have answered well to what it did
        not do, or done it after it was given up."""
        self._sink.refresh()
        for row in self._store.changed_since(self._digest, 0)[0]:
            if self._sink.lacks(row):
                self._backlog[row.trial.key, row.seq] = row

    def _read(self) -> None:
        """Reads the changes of the store into the backlog."""
        try:
            rows, self._cursor = self._store.changed_since(self._digest, self._cursor)
        except PlaceError as error:
            # A damaged store does not heal, and its user can mend it once nothing holds it.
            self._failing_since = self._failing_since or time.monotonic()
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
        """Waits ``timeout`` seconds for the end of the sweep; returns whether it has come."""
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
    with suppress(Exception):  # ahead; an error in it is reported when it is needed
        importlib.import_module(sys.argv[2])
    with ExitStack() as stack:
        try:
            follower = _open(stack, driver)
        except EOFError:  # the driver did not get so far as to begin the sweep
            return 1
        except Exception as error:
            log(traceback.format_exc())
            send(driver, brief(error))
            return 1
        return 0 if follower.run() else 1


def _open(stack: ExitStack, driver: Connection) -> Follower:
    """Returns a follower whose sink has accepted the sweep, and tells the driver."""
    path, digest, *where, settled = driver.recv()
    store = stack.enter_context(Store(path, create=False))
    _lease(stack, store, digest)
    sink: Sink = importlib.import_module(sys.argv[2]).open_sink(store, digest, *where, settled)
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
