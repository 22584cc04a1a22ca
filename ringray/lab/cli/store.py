"""``list``, ``status``, ``sync`` and ``recover``: the content of the store."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ringray.base import units
from ringray.base.errors import UserError
from ringray.base.redaction import shown
from ringray.lab.cli.options import ALL, JSON, ON_HEAD, STORE, SWEEP, Option, append, options
from ringray.lab.cli.results import print_history, print_page, print_state, print_sweep, say
from ringray.lab.opening import as_it_stands, open_store
from ringray.lab.report import tables
from ringray.lab.store.recover import recover as mend
from ringray.lab.store.store import default_path
from ringray.lab.tracking import location, tracker
from ringray.lab.trial.outcome import UNKNOWN, SweepRow, record_line


@options(STORE, ON_HEAD)
def sweeps(arguments: argparse.Namespace) -> int:
    """Lists the sweeps, the newest first."""
    if arguments.address:
        from ringray.lab.cli.jobs import on_head  # with the planner

        on_head(arguments, "list")
        return 0
    path = Path(arguments.store) if arguments.store else default_path()
    rows: list[SweepRow] = []
    if arguments.store or path.exists():
        with open_store(arguments.store, readonly=True) as store:
            rows = [as_it_stands(store, row) for row in store.sweeps()]
    if not rows:
        print(f"no sweeps in {path} yet; `ringray run experiments/quickstart.yaml` makes one")
        return 0
    tables.show(tables.sweeps_table(rows), tables.console())
    return 0


_HISTORY = "show all measurements, the earlier ones too"


@options(SWEEP, STORE, ALL, JSON, ON_HEAD, Option("--history", action="store_true", help=_HISTORY))
def status(arguments: argparse.Namespace) -> int:
    """Prints the state of a sweep and the results of its trials, or appends these to a file."""
    if arguments.address:
        from ringray.lab.cli.jobs import on_head  # with the planner

        switches = [f"--{name}" for name in ("all", "history") if getattr(arguments, name)]
        on_head(arguments, "status", arguments.sweep, *switches)
        return 0
    with open_store(arguments.store, readonly=True) as store:
        sweep = as_it_stands(store, store.find(arguments.sweep))
        trials = store.trials(sweep.digest)
        earlier = [recording.trial for recording in store.history(sweep.digest)]
        owner, place = store.owner(sweep.digest), store.tracked(sweep.digest)
    if arguments.json:
        ended = [json.dumps(record_line(sweep, row)) for row in trials if row.status is not None]
        append(arguments.json, "".join(f"{line}\n" for line in ended))
        return 0
    console = tables.console()
    pending = sweep.total - sum(sweep.counts.values())
    run_by = f"; run by {owner}" if owner else ""
    print_state(console, sweep, run_by)
    if arguments.history:
        print_history(console, trials, earlier, everything=arguments.all)
    else:
        print_sweep(console, sweep, trials, "--all", all_rows=arguments.all)
    if place is not None:
        print_page(console, location.ui_command(*place))
    if pending and owner is None:
        console.print()
        option = f" --store {arguments.store}" if arguments.store else ""
        say(console, f"`ringray resume {sweep.name}{option}` continues")
    return 0


@options(SWEEP, STORE)
def sync(arguments: argparse.Namespace) -> int:
    """Writes the trials of a sweep to MLflow that it lacks."""
    with open_store(arguments.store, readonly=True) as store:
        sweep = store.find(arguments.sweep)
        path = store.path
    place = sweep.spec.get("tracking", {})
    experiment = place.get("experiment") or sweep.name
    state = tracker.sync(path, sweep.digest, place.get("uri"), experiment)
    written = units.plural(state.written, "trial")
    print(f"{sweep.name}: {written} in MLflow, {state.pending} missing")
    if state.error or state.pending:
        raise UserError(f"MLflow lacks some of it: {state.error or 'it gave no answer'}")
    return 0


@options(STORE)
def recover(arguments: argparse.Namespace) -> int:
    """Saves the readable part of a damaged store."""
    path = Path(arguments.store) if arguments.store else default_path()
    result = mend(path)
    if result.aside is None:
        print(f"{path} is not damaged; nothing was done")
        return 0
    print(f"{path} was damaged and is kept as {result.aside.name}; the new store has:")
    for sweep, trials, ended, earlier in result.sweeps:
        saved = f"{units.plural(trials, 'trial')}, {ended} of them ended"
        if earlier:
            saved += f", {units.plural(earlier, 'earlier measurement')}"
        print(f"  {shown(sweep.name)} ({sweep.digest[:12]}): {saved}")
        if sweep.kind == UNKNOWN:
            print("    its name and spec are lost: `ringray run` with its spec continues it")
    print(
        "`ringray resume SWEEP` measures the missing trials, `ringray resume SWEEP --from-mlflow` "
        "restores them from MLflow"
    )
    return 0
