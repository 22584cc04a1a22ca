"""``run`` and ``resume``: from a spec to a summary, through the driver."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from rich.console import Console

from ringray.base import output_files, provenance, units
from ringray.base.errors import PlaceError, SpecError, UserError
from ringray.base.redaction import shown
from ringray.lab.cli.options import AGAIN, MEASURING, SET, SPEC, SWEEP, Option, options, writing
from ringray.lab.cli.outputs import check_file, named_files
from ringray.lab.cli.results import print_answer, print_page, print_trials, say, title
from ringray.lab.cli.spec import past_trials
from ringray.lab.cli.store import open_store
from ringray.lab.driver import schedule
from ringray.lab.driver.observer import Summary
from ringray.lab.driver.studies import entries, load_of, results
from ringray.lab.plan.plan import Plan, build
from ringray.lab.report import studies, tables, words
from ringray.lab.report.live import LiveTable, PlainLines, observer
from ringray.lab.search import METHODS
from ringray.lab.specs import model as specs
from ringray.lab.store.store import Store
from ringray.lab.tracking import location, tracker
from ringray.lab.trial.machine_load import BUSY
from ringray.lab.trial.metrics import METRICS
from ringray.lab.trial.outcome import UNKNOWN, SweepRow, TrialRow
from ringray.tuning import table as tuned


@options(SPEC, SET, *MEASURING, AGAIN)
def run(arguments: argparse.Namespace) -> int:
    """Measures the trials of a spec that have no result in the store."""
    plan = planned(specs.load(arguments.spec, arguments.set), arguments)
    with open_store(arguments.store, create=True) as store:
        return execute(plan, store, arguments)


def planned(spec: specs.Spec, arguments: argparse.Namespace) -> Plan:
    """Plans a spec for the Ray on which it is measured."""
    from ringray.lab.cluster import connect

    here = connect.target(arguments.address) == "local"
    memory = provenance.memory_bytes() if here else None
    seen = past_trials(arguments.store, spec.digest)
    return build(spec, everything=arguments.all, machine=memory, seen=seen)


_RESTORE = Option(
    "--from-mlflow", action="store_true", help="first restore missing trials from MLflow"
)


@options(SWEEP, *MEASURING, _RESTORE)
def resume(arguments: argparse.Namespace) -> int:
    """Measures the missing trials of a sweep in the store; of a search, keeps the best points."""
    if arguments.from_mlflow:
        return _resume_from_mlflow(arguments)
    with open_store(arguments.store) as store:
        return _go_on(store, arguments.sweep, arguments)


def _resume_from_mlflow(arguments: argparse.Namespace) -> int:
    """Restores the trials that the store lacks from MLflow, then continues the sweep."""
    from ringray.lab.tracking.restore import restore

    with open_store(arguments.store, create=True) as store:
        try:
            sweep = store.find(arguments.sweep)
        except PlaceError:
            raise
        except UserError:  # the store has nothing of it
            restored = restore(store.path, arguments.sweep, None)
        else:
            with store.lease(sweep.digest):
                place = sweep.spec.get("tracking", {})
                restored = restore(store.path, sweep.digest, place.get("uri"))
        text = f"{units.plural(restored.added, 'trial')} taken from MLflow"
        if restored.earlier:
            text += f" and {units.plural(restored.earlier, 'earlier measurement')}"
        if restored.stores > 1:
            text += f", which {restored.stores} stores wrote"
        if restored.unreadable:
            lost = units.plural(restored.unreadable, "run")
            text += f"; {lost} there cannot be read: what only they hold is measured again"
        called = f"{shown(restored.name)} ({restored.digest[:12]})"
        print(f"{called}: {text}", file=_screen(arguments), flush=True)
        return _go_on(store, restored.digest, arguments)


def _go_on(store: Store, sweep: str, arguments: argparse.Namespace) -> int:
    plan = planned(stored_spec(store.find(sweep)), arguments)
    follow = search if plan.spec.trial_kind.tunes else execute
    return follow(plan, store, arguments)


def search(plan: Plan, store: Store, arguments: argparse.Namespace) -> int:
    """Runs a tuning plan and keeps the best point of each problem; returns the exit code."""
    tuned.table()  # reports a broken table before hours of measuring
    code = execute(plan, store, arguments)
    if code == 130:
        return code
    trials = store.trials(plan.digest)
    cores = provenance.hardware()["cores"]
    choices, compared = entries(plan, trials, cores), results(plan, trials)
    by_key = {row.key: row for row in trials}
    loads = [load_of(plan, study, by_key, cores) or 0 for study in compared if study.better]
    lines = []
    if choices:
        lines.append(f"{units.plural(len(choices), 'choice')} in {tuned.add(choices)}")
    if busy := [load for load in loads if load > BUSY]:
        lines.append(
            f"nothing for {units.plural(len(busy), 'problem')}, because other processes used "
            f"{max(busy):.0%} of {units.plural(cores, 'core')} while it was measured: when the "
            "machine is idle, `ringray tune SPEC --again` measures it once more"
        )
    elif not choices and any(study.default for study in compared):
        lines.append("nothing, because no point beats the default beyond the spread")
    elif not choices:
        lines.append("nothing, because no point could be measured")
        code = code or 1
    print(*(f"tuned:  {line}" for line in lines), sep="\n", file=_screen(arguments))
    return code


def stored_spec(sweep: SweepRow) -> specs.Spec:
    """Returns the spec that a sweep was started with.

    Raises:
        UserError: this version of ringray reads it as another sweep, or cannot read it.
    """
    if sweep.kind == UNKNOWN:
        raise UserError(
            f"the spec of sweep {sweep.name} was lost with a damaged store: `ringray run` with "
            "that spec takes up the saved trials, or --from-mlflow restores it"
        )
    # Defaults may have changed since; the stored fields include them (JSON is YAML).
    for text in (sweep.source, json.dumps(sweep.spec, indent=2)):
        with suppress(SpecError):
            spec = specs.parse(text, f"<{sweep.name} in the store>")
            if spec.digest == sweep.digest:
                return spec
    raise UserError(
        f"sweep {sweep.name} ({sweep.digest[:12]}) was started by another version of "
        "ringray, which reads its spec differently; use that one, or start again: "
        "`ringray run SPEC`"
    )


def execute(plan: Plan, store: Store, arguments: argparse.Namespace) -> int:
    """Runs a plan and prints its summary; returns the exit code."""
    if arguments.json not in (None, "-"):
        place = plan.spec.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        used = store.path, location.sqlite_path(place), *named_files(plan.spec.source)
        check_file("--json", arguments.json, arguments, *used)
    json_path = _json_path(arguments.json)
    screen = _screen(arguments)
    summary = measure(plan, store, arguments, observer(screen), json_path)
    try:
        _print_summary(tables.console(screen), plan, store, summary, arguments)
    except BrokenPipeError:
        if arguments.json != "-":
            raise
    return summary.exit_code


def measure(
    plan: Plan,
    store: Store,
    arguments: argparse.Namespace,
    view: LiveTable | PlainLines,
    json_path: Path | None = None,
) -> Summary:
    """Runs a plan, shown by ``view``, which it closes."""
    with ExitStack() as closing:
        closing.callback(view.close)
        tracking = None
        if plan.spec.tracking.enabled and not arguments.no_tracking:
            tracking = _tracking(plan, store, closing, view.note)
        from ringray.lab.driver import run as driver  # with ray

        run = partial(driver.run, plan, store=store, address=arguments.address, observer=view)
        again = getattr(arguments, "again", False)
        return run(tracking=tracking, json_path=json_path, again=again)


def _tracking(
    plan: Plan, store: Store, closing: ExitStack, note: Callable[[str], None]
) -> Callable[[], tracker.Tracker]:
    """Returns a function that starts tracking in a process prepared here, which ``closing`` ends.

    If MLflow has this sweep already and does not answer now, a note says so.

    Raises:
        PlaceError: MLflow cannot be used.
    """
    place = plan.spec.tracking
    settled = tracker.settled(store, plan.digest, place.uri)
    if settled:
        try:
            location.check(location.resolve_uri(place.uri))
        except PlaceError as error:
            why = str(error).partition(";")[0]
            missing = f"`ringray sync {plan.spec.name}` writes what is missing"
            note(f"{why}; the sweep goes on, {missing}")
    made = tracker.Tracker(store.path, plan.digest, place.uri, place.experiment, settled)
    closing.callback(made.close)
    return made.start


def _screen(arguments: argparse.Namespace) -> TextIO:
    """Returns stdout; with ``--json -`` stdout has the records alone, and messages go to stderr."""
    return sys.stderr if arguments.json == "-" else sys.stdout


def _json_path(name: str | None) -> Path | None:
    """Returns the file to which the driver appends, if any; UserError if it cannot."""
    if name in (None, "-"):
        return Path("/dev/stdout") if name else None
    path = Path(name)
    if not path.is_fifo():  # that the driver opens once: its reader ends with its first writer
        with writing(name):
            os.close(output_files.opened(path, os.O_APPEND))
    return path


def _print_studies(console: Console, plan: Plan, trials: Sequence[TrialRow], over: bool) -> None:
    """Prints the best points of a search."""
    if not plan.spec.trial_kind.tunes and METHODS[plan.spec.search.method].exhaustive:
        return
    results = schedule.found(plan, trials, over=over)
    for table in studies.fronts(plan, trials, results):
        tables.show(table, console)
        console.print()
    say(console, *studies.lines(plan, trials, results))


def _print_summary(
    console: Console, plan: Plan, store: Store, summary: Summary, arguments: argparse.Namespace
) -> None:
    trials = store.trials(plan.digest)
    pending = sum(row.status is None for row in trials)
    option = f" --store {arguments.store}" if arguments.store else ""
    console.print()
    counts = (words.counts(summary.counts, pending), "bold")
    duration = (f"in {units.duration(summary.wall_s)}", "")
    title(console, plan.spec.name, plan.digest, counts, duration)
    ended = [row for row in trials if row.status is not None]
    print_trials(console, plan.digest, ended, f"`ringray status {plan.spec.name}{option} --all`")
    console.print()
    _print_studies(console, plan, trials, over=not summary.interrupted)
    print_answer(console, plan.spec.kind, ended, provenance.hardware()["cores"])
    compared = words.baseline(plan.runnable[0].config.as_dict(), where=True)
    measured = {name for row in trials for name in row.numbers}
    for metric in METRICS.values():
        if metric.legend and metric.name in measured:
            say(console, metric.legend.format(baseline=compared))
    if len(summary.gaps_ms) >= 10:
        gap = statistics.median(summary.gaps_ms)
        say(console, f"driver: {gap:.1f} ms between two trials on a running ring (median)")
    say(console, f"store:  {store.path}")
    if arguments.json and arguments.json != "-":
        say(console, f"json:   {arguments.json}")
    if summary.ui_command:
        print_page(console, summary.ui_command)
    if summary.tracking:
        say(console, f"        {summary.tracking}; `ringray sync {plan.spec.name}` writes them")
    if not trials:
        say(console, "interrupted before the first record; run it again to start")
    elif getattr(arguments, "again", False) and summary.interrupted and not pending:
        say(console, f"every trial has a measurement; with --again all {len(trials)} begin anew")
    elif summary.interrupted or pending:
        say(console, f"continue with: ringray resume {plan.spec.name}{option}")
