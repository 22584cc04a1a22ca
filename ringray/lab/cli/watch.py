"""``watch``: the board of a sweep that another process runs, here or on a cluster."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing

from ringray.base.signals import INTERRUPTED
from ringray.lab import sweeps
from ringray.lab.cli.options import ON_HEAD, STORE, SWEEP, Option, options
from ringray.lab.cli.results import print_state, print_sweep
from ringray.lab.opening import open_store
from ringray.lab.report import live, tables
from ringray.lab.store.feed import Feed

LIFE_S = 3600.0  # seconds after which a command on a head ends, lest its watcher was killed
_CODES = {"complete": 0, "failed": 1, "interrupted": INTERRUPTED}


@options(
    SWEEP, STORE, ON_HEAD, Option("--lines", action="store_true", help="print events as JSON lines")
)
def watch(arguments: argparse.Namespace) -> int:
    """Shows a sweep while another process runs it; exits as the sweep does."""
    if arguments.lines and not arguments.address:
        with open_store(arguments.store, readonly=True) as store:
            feed = Feed(store, store.find(arguments.sweep).digest)
            for line in feed.events(LIFE_S):
                print(json.dumps(line), flush=True)
        return 0
    if arguments.address:
        replay = _watch_head(arguments)
    else:
        replay = sweeps.watch(arguments.sweep, sys.stdout, arguments.store)
    rest, console = f"`ringray status {replay.sweep.name} --all`", tables.console()
    print_state(console, replay.sweep)
    print_sweep(console, replay.sweep, list(replay.rows.values()), rest)
    return _CODES[replay.over or ""]


def _watch_head(arguments: argparse.Namespace) -> sweeps.Replay:
    """Shows a sweep in the store of a cluster's head."""
    from ringray.lab.cli.jobs import store_option
    from ringray.lab.cluster import head_command, job_package, job_server

    option = store_option(arguments)
    url = job_server.address(arguments.address)
    replay = sweeps.Replay(live.view(sys.stdout))
    with closing(replay.view), job_package.packed() as shipment:

        def take(line: str) -> bool:
            replay.take(json.loads(line))
            return replay.over is not None

        command = ("watch", arguments.sweep, "--lines", *option)
        head_command.events(url, shipment, take, *command)
    return replay
