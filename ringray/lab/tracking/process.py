"""The process that writes a sweep to MLflow while its driver measures.

It runs at the lowest priority, so that it does not disturb measurements, and outlives its driver
just long enough to write what the store holds. Its driver, a
:class:`ringray.lab.tracking.tracker.Tracker`, exchanges these messages with it:

    driver   path of the store, digest, URI, experiment, Tracked or None
    process  Tracked when MLflow has accepted the sweep, else an error
    driver   seconds to finish in, and how many of them with failures only
    process  Tracked and SyncState

If the driver sends a Tracked, MLflow has accepted the sweep before: then the first answer does not
wait for MLflow, and an outage at the start is treated like any other.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from ringray.base.errors import PlaceError
from ringray.lab.driver.observer import SyncState
from ringray.lab.store import progress
from ringray.lab.store.store import Store
from ringray.lab.tracking.location import is_server
from ringray.lab.tracking.worker import (
    REQUEST_TIMEOUT,
    brief,
    connection_to_driver,
    log,
    receive,
    send,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from typing import TypeAlias

    from ringray.lab.tracking.projection import Projection
    from ringray.lab.trial.outcome import Kept

    Phase: TypeAlias = "Callable[[], Phase | None]"

POLL_S = 0.25
SUMMARY_S = 60.0
PAUSE_S = (0.25, 10.0)  # between tries
# When the driver is gone nothing waits for this process, and `ringray sync` can do the rest.
ORPHAN_TIMEOUT_S, ORPHAN_PATIENCE_S = 120.0, 15.0
TERMINATED_S = 3.0  # for the driver to say how the sweep ended
DYING_S = 1.0  # from the end of a killed driver's connection until it is seen to be dead
LEASE_WAIT_S = 30.0
# A server handles several calls at once, and most of a call to it is waiting.
WRITERS = 4


class Session:
    """Writes the changes of the store to MLflow, in phases: following, draining, concluding,
    drawing. Each returns the next one, or itself to go on; None ends the session.

    MLflow may be down for hours: calls are repeated, and the trials wait in the store.
    """

    def __init__(
        self, projection: Projection, driver: Connection, writers: int = 1, opened: bool = True
    ) -> None:
        self._projection, self._driver = projection, driver
        self._store, self._digest = projection.store, projection.digest
        self._pool, self._writers = ThreadPoolExecutor(writers, "write"), writers
        self._cursor = 0
        self._backlog: dict[tuple[str, int], Kept] = {}  # by trial key and number
        self._seen: set[str] = set()  # keys of trials
        self._summary_due = inf
        self._progress = progress.path_of(self._digest)
        self._live: list[progress.CurvePoint] = []  # of running trainings, not written yet
        self._told = 0  # bytes of them that were read
        # After a failed call, which was refused or whose answer was lost, MLflow is asked what it
        # holds before the next one.
        self._sure, self._checked = opened, False
        self._errors: dict[str, str] = {}  # of actions that failed and have not succeeded since
        self._failing_since: float | None = None
        self._request_s = float(os.environ.get(REQUEST_TIMEOUT, "10"))
        self._deadline = self._patience = inf  # set when told to finish
        self._asked = False  # whether the driver waits for an answer
        self._terminated = inf

    def run(self) -> bool:
        """Goes through the phases; returns whether MLflow has everything."""
        self._insist(self._projection.log_files, tries=1)
        phase: Phase | None = self._follow
        while phase is not None:
            phase = phase()
        return not self._errors

    def terminate(self, *_: object) -> None:
        """Handles SIGTERM. Stopping a whole job signals the driver as well, which may still say how
        the sweep ended."""
        self._terminated = min(self._terminated, time.monotonic())

    def _follow(self) -> Phase:
        """Writes each trial that ends, until told to finish or the driver is gone."""
        self._wait(0.0 if self._backlog else POLL_S)
        if self._deadline < inf:
            return self._drain
        points, self._told = progress.told(self._progress, self._told)
        self._live += points
        if self._live:
            self._insist(self._write_live, tries=1)
        if self._backlog:
            self._insist(self._write_some)
        elif time.monotonic() > self._summary_due:
            self._summary_due = inf
            self._insist(self._projection.summarise, tries=1)
            self._insist(self._projection.log_files, tries=1)
        return self._follow

    def _drain(self) -> Phase | None:
        """Writes the rest, until nothing is left or time is up."""
        self._errors.pop("_write_live", None)  # what it wrote was of the trials under way
        if self._tail() and not self._backlog:
            return self._conclude
        if self._time_left() > 0:
            if self._backlog:
                self._insist(self._write_some)
            else:
                time.sleep(POLL_S)
            return self._drain
        # A trial that MLflow refuses for itself does not keep the parent run from its end.
        if self._sure or self._attempt(self._projection.refresh):
            return self._conclude
        self._answer()
        return None

    def _check(self) -> None:
        """Asks MLflow what it holds, and takes what is missing into the backlog: a server or a
        proxy may have answered well to what it did not do, or done it after it was given up."""
        self._projection.refresh()
        for row in self._store.changed_since(self._digest, 0)[0]:
            if self._projection.lacks(row):
                self._backlog[row.trial.key, row.seq] = row

    def _conclude(self) -> Phase:
        """Ends the parent run and writes its tables; skipped if MLflow is down."""
        until = time.monotonic() + DYING_S
        while not self._asked and self._store.owner(self._digest) and time.monotonic() < until:
            time.sleep(0.02)
        before = set(self._backlog)
        self._insist(self._check, tries=2)
        if self._backlog.keys() - before and not self._checked and self._time_left() > 0:
            self._checked = True
            return self._drain
        self._insist(self._projection.summarise)
        self._insist(self._projection.close)
        # Files may lie elsewhere (S3, a proxy) and fail for good while the runs are all right:
        # they come last and are tried twice.
        self._insist(self._projection.log_files, tries=2)
        self._answer()
        return self._draw

    def _draw(self) -> None:
        """Writes the figures, for which the driver does not wait; skipped likewise."""
        self._insist(self._projection.log_figures, tries=2)

    def _answer(self) -> None:
        error = next(reversed(self._errors.values()), None)
        if self._asked:
            missing = {key for key, _ in self._backlog}
            state = SyncState(len(self._seen - missing), len(missing), error)
            send(self._driver, (self._projection.place, state))

    def _tail(self) -> bool:
        """Reads the changes of the store into the backlog; returns False if it cannot be read."""
        try:
            rows, self._cursor = self._store.changed_since(self._digest, self._cursor)
        except PlaceError as error:
            self._errors["store"] = brief(error)
            return False
        self._errors.pop("store", None)
        for row in rows:
            self._backlog[row.trial.key, row.seq] = row
            self._seen.add(row.trial.key)
        return True

    def _write_live(self) -> None:
        some = self._live[:1000]  # MLflow takes no more at once
        self._projection.log_live(some)
        del self._live[: len(some)]

    def _write_some(self) -> None:
        # Of one trial one recording at a time: which of them is current changes.
        first: dict[str, Kept] = {}
        for row in self._backlog.values():
            first.setdefault(row.trial.key, row)
            if len(first) == self._writers:
                break
        batch = list(first.values())
        calls = [self._pool.submit(self._projection.write, row) for row in batch]
        wait(calls)
        for row, call in zip(batch, calls, strict=True):
            del self._backlog[row.trial.key, row.seq]
            if call.exception():
                # To the end of the queue: a trial that MLflow refuses must not block the others.
                self._backlog[row.trial.key, row.seq] = row
            elif call.result():
                self._summary_due = min(self._summary_due, time.monotonic() + SUMMARY_S)
        for call in calls:
            call.result()  # raises what failed

    def _insist(self, action: Callable[[], object], tries: int | None = None) -> None:
        """Repeats ``action`` until it succeeds, ``tries`` are used up or time is up.

        Not a library's retries: a message from the driver ends a pause and shortens the next ones.
        """
        for number in count(1):
            if self._attempt(action) or number == tries or self._time_left() <= 0:
                return
            failing = time.monotonic() - (self._failing_since or 0.0)
            self._wait(min(max(failing, PAUSE_S[0]), PAUSE_S[1]))

    def _attempt(self, action: Callable[[], object]) -> bool:
        """Does ``action`` once; returns whether it succeeded.

        Everything is caught: whatever MLflow, its database or the network raise, a sweep of days
        must not lose its tracking to it.
        """
        seconds = min(max(self._deadline - time.monotonic(), 1.0), self._request_s)
        os.environ[REQUEST_TIMEOUT] = str(int(seconds))
        name = action.__name__
        self._errors.pop(name, None)
        try:
            if not self._sure:
                self._projection.refresh()
            self._sure = True
            action()
        except Exception as error:
            self._sure = False
            self._failing_since = self._failing_since or time.monotonic()
            self._errors[name] = brief(error)
            log(f"{name}: {self._errors[name]}\n{traceback.format_exc()}")
            return False
        self._failing_since = None
        return True

    def _time_left(self) -> float:
        """Returns the seconds until this session gives up."""
        since = inf if self._failing_since is None else self._failing_since
        return min(self._deadline, since + self._patience) - time.monotonic()

    def _wait(self, seconds: float) -> None:
        """Waits, listening to the driver and reading the store; returns when told to finish."""
        until = time.monotonic() + seconds
        ending = False
        while not ending:
            seconds = min(until - time.monotonic(), self._time_left())
            ending = self._listen(min(max(seconds, 0.0), POLL_S))
            self._tail()
            if seconds <= POLL_S:
                return

    def _listen(self, timeout: float) -> bool:
        """Waits ``timeout`` seconds for the end of the sweep; returns whether it has come now."""
        if self._deadline < inf:
            time.sleep(timeout)
            return False
        try:
            order = receive(self._driver, timeout)
            orphaned = time.monotonic() > self._terminated + TERMINATED_S
        except EOFError:
            order, orphaned = None, True
        if order is None and not orphaned:
            return False
        self._asked = order is not None
        timeout, self._patience = order or (ORPHAN_TIMEOUT_S, ORPHAN_PATIENCE_S)
        self._deadline = time.monotonic() + timeout
        # The driver, which waits for the end, learns at once whether MLflow answers now.
        self._failing_since = None
        return True


def main() -> int:
    """Exchanges the messages above; returns 0 when everything was written."""
    driver = connection_to_driver()
    os.nice(19)
    os.umask(0o077)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import_ahead("ringray.lab.tracking.projection")
    with ExitStack() as stack:
        try:
            session = _open(stack, driver)
        except EOFError:  # the driver did not get so far as to begin the sweep
            return 1
        except Exception as error:
            log(traceback.format_exc())
            send(driver, brief(error))
            return 1
        # While nothing waits for it: the driver is starting its ranks now.
        _import_ahead("ringray.lab.report.figures.style")
        return 0 if session.run() else 1


def _import_ahead(module: str) -> None:
    """Imports ``module`` before it is needed; an error in it is reported when it is needed."""
    with suppress(Exception):
        importlib.import_module(module)


def _open(stack: ExitStack, driver: Connection) -> Session:
    """Returns a session that MLflow has accepted and that handles signals, and tells the driver."""
    from ringray.lab.tracking.projection import Projection

    path, digest, uri, experiment, settled = driver.recv()
    store = stack.enter_context(Store(path, create=False))
    _lease(stack, store, digest)
    projection = Projection(store, digest, uri, experiment, settled)
    if not settled:
        projection.refresh()
    writers = WRITERS if is_server(uri) else 1
    session = Session(projection, driver, writers, opened=not settled)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, session.terminate)
    send(driver, projection.place)
    return session


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
