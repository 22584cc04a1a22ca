"""``watch``: the board of a sweep that another process runs, here or on a cluster."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing

from ringray.base.errors import UserError, reason_of
from ringray.base.signals import INTERRUPTED
from ringray.lab.cli.options import ON_HEAD, STORE, SWEEP, Option, options
from ringray.lab.cli.results import print_state, print_sweep
from ringray.lab.cli.run import stored_spec
from ringray.lab.cli.store import open_store
from ringray.lab.plan.plan import restored
from ringray.lab.plan.trial import Trial
from ringray.lab.report import tables
from ringray.lab.report.live import LiveTable, PlainLines, observer
from ringray.lab.store.feed import Event, Feed
from ringray.lab.trial.outcome import SweepRow, TrialRow

LIFE_S = 3600.0  # seconds after which a command on a head ends, lest its watcher was killed
_CODES = {"complete": 0, "failed": 1, "interrupted": INTERRUPTED}


@options(
    SWEEP, STORE, ON_HEAD, Option("--lines", action="store_true", help="print events as JSON lines")
)
def watch(arguments: argparse.Namespace) -> int:
    """Shows a sweep while another process runs it; exits as the sweep does."""
    if arguments.address:
        return _watch_head(arguments)
    with open_store(arguments.store, readonly=True) as store:
        feed = Feed(store, store.find(arguments.sweep).digest)
        if arguments.lines:
            for event in feed.events(LIFE_S):
                print(json.dumps(event), flush=True)
            return 0
        watcher = Watcher()
        with closing(watcher.view):
            for event in feed.events():
                watcher.take(event)
    return watcher.conclude()


def _watch_head(arguments: argparse.Namespace) -> int:
    """Does the same for a sweep in the store of a cluster's head."""
    from ringray.lab.cli.jobs import store_option
    from ringray.lab.cluster import head_command, job_package, job_server

    option = store_option(arguments)
    url = job_server.address(arguments.address)
    watcher = Watcher()
    with closing(watcher.view), job_package.packed() as shipment:

        def take(line: str) -> bool:
            try:
                watcher.take(json.loads(line))
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                what = f"{line[:80]!r} ({reason_of(error)})"
                raise UserError(f"the head of {url} says what no ringray says: {what}") from None
            return watcher.over is not None

        command = ("watch", arguments.sweep, "--lines", *option)
        head_command.follow(url, shipment, take, watcher.view.note, *command)
    return watcher.conclude()


class Watcher:
    """Events of a feed on the screen. ``over``: the status of the sweep, None until it ends."""

    def __init__(self) -> None:
        self.view: LiveTable | PlainLines = observer(sys.stdout)
        self.over: str | None = None
        self._sweep: SweepRow | None = None
        self._rows: dict[str, TrialRow] = {}
        self._trials: dict[str, Trial] = {}  # from the begin of the view on

    def take(self, event: Event) -> None:
        """Shows an event."""
        match event:
            case {"sweep": sweep}:
                self._sweep, self._rows, self._trials = SweepRow(**sweep), {}, {}
            case {"row": row}:
                self._end(TrialRow(**row))
            case {"begin": {"done": done, "ago": ago}} if self._sweep is not None:
                self._begin(self._sweep, done, float(ago))
            case {"started": key, "attempt": attempt, "ago": ago}:
                self.view.trial_started(self._trials[key], int(attempt), float(ago))
            case {"note": text}:
                self.view.note(str(text))
            case {"over": "complete" | "failed" | "interrupted" as status}:
                self.over = status
            case _:
                raise ValueError("an unknown event")

    def conclude(self) -> int:
        """Prints the results of the sweep that is over; returns its exit code."""
        assert self._sweep is not None
        assert self.over is not None
        rest, console = f"`ringray status {self._sweep.name} --all`", tables.console()
        print_state(console, self._sweep)
        print_sweep(console, self._sweep, list(self._rows.values()), rest)
        return _CODES[self.over]

    def _begin(self, sweep: SweepRow, done: list[str], ago: float) -> None:
        if sweep.status != "running":  # its results follow
            return
        plan = restored(stored_spec(sweep), self._rows.values())
        self._trials = {trial.key: trial for trial in plan.trials}
        if plan.runnable:
            ended = {key: self._rows[key] for key in done}
            self.view.sweep_started(plan, ended, ago)

    def _end(self, row: TrialRow) -> None:
        before, self._rows[row.key] = self._rows.get(row.key), row
        if row.key in self._trials and row.status is not None and row != before:
            self.view.trial_ended(self._trials[row.key], row)
