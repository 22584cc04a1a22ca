"""``run`` and ``resume``: from a spec to a summary, through the driver."""

from __future__ import annotations

import json
import statistics
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ringray.base import units
from ringray.base.errors import PlaceError, SpecError, UserError
from ringray.base.redaction import shown
from ringray.lab.cli.store import doubted, open_store, print_hops, print_results, say
from ringray.lab.kinds import KINDS
from ringray.lab.plan.plan import build
from ringray.lab.report import words
from ringray.lab.report.live import observer
from ringray.lab.search import METHODS
from ringray.lab.spec import model as specs
from ringray.lab.store.store import Store, default_path
from ringray.lab.trial.outcome import UNKNOWN

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from ringray.lab.driver.observer import Summary
    from ringray.lab.plan.plan import Plan
    from ringray.lab.spec.model import Spec
    from ringray.lab.tracking.tracker import Tracker
    from ringray.lab.trial.outcome import SweepRow, TrialRow


def run(arguments: argparse.Namespace) -> int:
    """Measures the trials of a spec that the store has no result of."""
    plan = build(specs.load(arguments.spec))
    with doubted(Store(arguments.store or default_path())) as store:
        return execute(plan, store, arguments)


def resume(arguments: argparse.Namespace) -> int:
    """Measures what a sweep in the store still lacks; of a search, keeps what it has found."""
    if arguments.from_mlflow:
        return _resume_from_mlflow(arguments)
    with open_store(arguments.store) as store:
        return _go_on(store, arguments.sweep, arguments)


def _resume_from_mlflow(arguments: argparse.Namespace) -> int:
    """Takes what the store lacks of a sweep from MLflow, then continues it."""
    from ringray.lab.tracking.restore import restore

    with doubted(Store(arguments.store or default_path())) as store:
        try:
            known = store.find(arguments.sweep)
        except PlaceError:
            raise
        except UserError:  # the whole of it is lost
            found = restore(store.path, arguments.sweep, None)
        else:
            with store.lease(known.digest):
                place = known.spec.get("tracking", {})
                found = restore(store.path, known.digest, place.get("uri"))
        said = f"{units.plural(found.added, 'trial')} taken from MLflow"
        if found.unreadable:
            said += f"; {found.unreadable} there cannot be read and will be measured again"
        screen = sys.stderr if arguments.json == "-" else sys.stdout
        print(f"{shown(found.name)} ({found.digest[:12]}): {said}", file=screen, flush=True)
        return _go_on(store, found.digest, arguments)


def _go_on(store: Store, sweep: str, arguments: argparse.Namespace) -> int:
    plan = build(stored_spec(store.find(sweep)))
    if not KINDS[plan.spec.kind].tunes:
        return execute(plan, store, arguments)
    return search(plan, store, arguments)


def search(plan: Plan, store: Store, arguments: argparse.Namespace) -> int:
    """Runs a tuning plan and keeps the best point of each problem; the exit code."""
    from ringray.tuning import table as tuned

    tuned.table()  # a broken one is said before hours are spent
    code = execute(plan, store, arguments)
    if code == 130:
        return code
    from ringray.lab.driver import studies

    found = studies.entries(plan, store.trials(plan.digest))
    screen = sys.stderr if arguments.json == "-" else sys.stdout
    if not found:
        print("tuned:  nothing, for no point could be measured", file=screen)
        return code or 1
    path = tuned.add(found)
    print(f"tuned:  {units.plural(len(found), 'choice')} in {path}", file=screen)
    return code


def stored_spec(sweep: SweepRow) -> Spec:
    """The spec that a sweep was begun with.

    Raises:
        UserError: this version of ringray reads it as another sweep, or not at all.
    """
    if sweep.kind == UNKNOWN:
        raise UserError(
            f"the spec of sweep {sweep.name} was lost with a damaged store: `ringray run` with "
            "that spec takes up what was saved, or --from-mlflow asks MLflow for it"
        )
    # Defaults may have changed since; the stored meaning has them all filled in (JSON is YAML).
    for text in (sweep.source, json.dumps(sweep.spec, indent=2)):
        with suppress(SpecError):
            spec = specs.parse(text, f"<{sweep.name} in the store>")
            if spec.digest == sweep.digest:
                return spec
    raise UserError(
        f"sweep {sweep.name} ({sweep.digest[:12]}) was begun by another version of ringray, "
        "to which its spec meant something else; use that one, or start anew: `ringray run SPEC`"
    )


def execute(plan: Plan, store: Store, arguments: argparse.Namespace) -> int:
    """Runs a plan and prints its summary; the exit code."""
    to_stdout = arguments.json == "-"
    json_path = _json_path(arguments.json)
    # With --json - stdout carries the records and nothing else.
    screen = sys.stderr if to_stdout else sys.stdout
    with ExitStack() as closing:
        view = observer(screen)
        closing.callback(view.close)
        tracker = None
        if plan.spec.tracking.enabled and not arguments.no_tracking:
            tracker = _tracking(plan, store, closing, view.note)
        from ringray.lab.driver import run as driver

        summary = driver.run(
            plan,
            store=store,
            address=arguments.address,
            observer=view,
            tracking=tracker,
            json_path=json_path,
        )
    try:
        from ringray.lab.report import tables

        _print_summary(tables.console(screen), plan, store, summary, arguments)
    except BrokenPipeError:
        if not to_stdout:
            raise
    return summary.exit_code


def _tracking(
    plan: Plan, store: Store, closing: ExitStack, note: Callable[[str], None]
) -> Callable[[], Tracker]:
    """What starts the sweep's tracking process; ``closing`` ends it if that is never called.

    A place that has taken this sweep before and does not answer now is only noted.

    Raises:
        PlaceError: MLflow cannot be used; before Ray starts, which takes seconds.
    """
    from ringray.lab.tracking import location, tracker

    place = plan.spec.tracking
    settled = tracker.settled(store, plan.digest, place.uri)
    if settled:
        try:
            location.check(tracker.resolve_uri(place.uri))
        except PlaceError as error:
            why = str(error).partition(";")[0]
            missing = f"`ringray sync {plan.spec.name}` writes what is missing"
            note(f"{why}; the sweep goes on, {missing}")
    made = tracker.Tracker(store.path, plan.digest, place.uri, place.experiment, settled)
    closing.callback(made.close)
    return made.start


def _json_path(given: str | None) -> Path | None:
    """Where the driver appends; UserError before anything runs if it cannot."""
    if given is None:
        return None
    if given == "-":
        return Path("/dev/stdout")
    try:
        with Path(given).open("a", encoding="utf-8"):
            return Path(given)
    except OSError as error:
        raise UserError(
            f"--json {given}: cannot be written: {(error.strerror or str(error)).lower()}; "
            "name a file in a folder that you may write to, or - for stdout"
        ) from error


def _print_found(console: Console, plan: Plan, trials: Sequence[TrialRow], over: bool) -> None:
    """What a search has found."""
    if not KINDS[plan.spec.kind].tunes and METHODS[plan.spec.search.method].exhaustive:
        return
    from ringray.lab.driver import studies
    from ringray.lab.report import studies as shown
    from ringray.lab.report import tables

    found = studies.found(plan, trials, over=over)
    for table in shown.fronts(plan, trials, found):
        tables.show(table, console)
        console.print()
    for line in shown.lines(plan, trials, found):
        say(console, line)


def _print_summary(
    console: Console, plan: Plan, store: Store, summary: Summary, arguments: argparse.Namespace
) -> None:
    from ringray.lab.report import tables

    trials = store.trials(plan.digest)
    pending = sum(row.status is None for row in trials)
    option = f" --store {arguments.store}" if arguments.store else ""
    console.print()
    console.print(
        tables.heading(
            [
                (plan.spec.name, "bold cyan"),
                (plan.digest[:12], "bright_black"),
                (words.counts(summary.counts, pending), "bold"),
                (f"in {units.duration(summary.wall_s)}", ""),
            ]
        )
    )
    more = f"`ringray status {plan.spec.name}{option} --all`"
    ended = [row for row in trials if row.status is not None]
    print_results(console, ended, everything=False, more=more)
    print_hops(console, plan.digest, ended, everything=False, more=more)
    console.print()
    _print_found(console, plan, trials, over=not summary.interrupted)
    if any("ratio" in row.metrics for row in trials):
        compared = words.baseline(plan.runnable[0].config.as_dict())
        say(
            console,
            f"ratio: the ring's time ÷ that of {compared} in one process, in turns; "
            "below 1 the ring is faster",
        )
    if any("error_out" in row.metrics for row in trials):
        say(console, "error: share of the budget, 2 × flash SDPA's own error; up to 1 is right")
    if any("hidden" in row.metrics for row in trials):
        say(console, "hidden: share of the transfers' own time for which no rank had to wait")
    if len(summary.gaps_ms) >= 10:
        gap = statistics.median(summary.gaps_ms)
        say(console, f"driver: {gap:.1f} ms between two trials on a warm ring (median)")
    say(console, f"store:  {store.path}")
    if arguments.json and arguments.json != "-":
        say(console, f"json:   {arguments.json}")
    if summary.ui_command:
        say(console, f"mlflow: {summary.ui_command}")
    if summary.tracking:
        say(console, f"        {summary.tracking}; `ringray sync {plan.spec.name}` writes them")
    if not trials:
        say(console, "interrupted before anything was recorded; run it again to start")
    elif summary.interrupted or pending:
        say(console, f"continue with: ringray resume {plan.spec.name}{option}")
