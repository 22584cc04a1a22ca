"""``run``, ``resume`` and ``tune``: measure a sweep and print its summary."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

from ringray.base import provenance, units
from ringray.lab import sweeps
from ringray.lab.cli.options import AGAIN, MEASURING, SET, SPEC, SWEEP, Option, options
from ringray.lab.cli.results import print_answer, print_page, print_trials, say, title
from ringray.lab.driver.events import Summary
from ringray.lab.driver.studies import results as studies_of
from ringray.lab.plan.plan import Plan
from ringray.lab.report import studies, tables, words
from ringray.lab.search import METHODS
from ringray.lab.store.store import default_path
from ringray.lab.trial.metrics import METRICS


@options(SPEC, SET, *MEASURING, AGAIN)
def run(arguments: argparse.Namespace) -> int:
    """Measures the trials of a spec that have no result in the store."""
    return _measured(arguments, sweeps.run, arguments.spec, again=arguments.again)


@options(SPEC, SET, *MEASURING, AGAIN)
def tune(arguments: argparse.Namespace) -> int:
    """Runs a tuning spec, and keeps the best point of each problem for later calls."""
    return _measured(arguments, sweeps.tune, arguments.spec, again=arguments.again)


_RESTORE = Option(
    "--from-mlflow", action="store_true", help="first restore missing trials from MLflow"
)


@options(SWEEP, SET, *MEASURING, _RESTORE)
def resume(arguments: argparse.Namespace) -> int:
    """Measures the missing trials of a sweep in the store; of a search, keeps the best points."""
    restore = arguments.from_mlflow
    return _measured(arguments, sweeps.resume, arguments.sweep, from_mlflow=restore)


def _measured(
    arguments: argparse.Namespace, measure: Callable[..., Summary], name: str, **own: Any
) -> int:
    """Measures a sweep and prints its summary; returns the exit code."""
    # With `--json -` stdout has the records alone.
    screen = sys.stderr if arguments.json == "-" else sys.stdout
    settings = {option: getattr(arguments, option) for option in ("store", "address", "json")}
    settings |= {"everything": arguments.all, "tracking": not arguments.no_tracking}
    try:
        summary = measure(name, changes=arguments.set, view=screen, **settings, **own)
    except sweeps.InterruptedSweep as interrupted:
        summary = interrupted.summary
    try:
        _print_summary(tables.console(screen), summary, arguments)
    except BrokenPipeError:
        if arguments.json != "-":
            raise
    return summary.exit_code


def _print_summary(console: Console, summary: Summary, arguments: argparse.Namespace) -> None:
    plan, trials = summary.plan, summary.trials
    assert plan is not None
    pending = sum(row.status is None for row in trials)
    option = f" --store {arguments.store}" if arguments.store else ""
    console.print()
    counts = (words.counts(summary.counts, pending), "bold")
    duration = (f"in {units.duration(summary.wall_s)}", "")
    title(console, summary.name, summary.digest, counts, duration)
    ended = [row for row in trials if row.status is not None]
    print_trials(console, summary.digest, ended, f"`ringray status {summary.name}{option} --all`")
    console.print()
    _print_studies(console, plan, summary)
    print_answer(console, plan.spec.kind, ended, provenance.hardware()["cores"])
    compared = words.baseline(plan.runnable[0].config.as_dict(), where=True)
    measured = {name for row in trials for name in row.numbers}
    for metric in METRICS.values():
        if metric.legend and metric.name in measured:
            say(console, metric.legend.format(baseline=compared))
    say(console, f"store:  {arguments.store or default_path()}")
    if arguments.json and arguments.json != "-":
        say(console, f"json:   {arguments.json}")
    if summary.ui_command:
        print_page(console, summary.ui_command)
    if summary.tracking:
        say(console, f"        {summary.tracking}; `ringray sync {summary.name}` writes them")
    say(console, *(f"tuned:  {line}" for line in summary.tuned))
    if summary.stopped:
        say(console, f"stopped: {summary.stopped}")
    if not trials:
        say(console, "interrupted before the first record; run it again to start")
    elif getattr(arguments, "again", False) and summary.interrupted and not pending:
        say(console, f"every trial has a measurement; with --again all {len(trials)} begin anew")
    elif summary.interrupted or pending:
        say(console, f"continue with: ringray resume {summary.name}{option}")


def _print_studies(console: Console, plan: Plan, summary: Summary) -> None:
    """Prints the best points of a search that is over."""
    if summary.interrupted or summary.stopped:
        return
    if not plan.spec.trial_kind.tunes and METHODS[plan.spec.search.method].exhaustive:
        return
    results = studies_of(plan, summary.trials)
    for table in studies.fronts(plan, summary.trials, results):
        tables.show(table, console)
        console.print()
    say(console, *studies.lines(plan, summary.trials, results))
