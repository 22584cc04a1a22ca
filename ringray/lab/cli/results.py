"""Results of sweeps on the screen, as ``run`` and ``status`` print them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from ringray.base import units
from ringray.base.redaction import shown
from ringray.lab.kinds import KINDS
from ringray.lab.report import history, replicas, tables, verdict, words
from ringray.lab.store.traces import folder_of
from ringray.lab.trial.outcome import SweepRow, TrialRow

ROWS = 40  # rows of a table of results, unless all are shown


def say(console: Console, *lines: str) -> None:
    """Prints lines of plain text, never cut."""
    for line in lines:
        console.print(shown(line), markup=False, soft_wrap=True)


def title(console: Console, name: str, digest: str, *parts: tuple[str, str]) -> None:
    """Prints the name of a sweep, its short digest and further parts, each with its style."""
    parts = ((name, "bold cyan"), (digest[:12], "bright_black"), *parts)
    console.print(tables.heading(parts))


def print_state(console: Console, sweep: SweepRow, run_by: str = "") -> None:
    """Prints the title of a sweep and the numbers of its trials."""
    state = (sweep.status, tables.STYLES[sweep.status])
    when = (tables.when(sweep.updated), "bright_black")
    title(console, sweep.name, sweep.digest, (sweep.kind, ""), state, when)
    pending = sweep.total - sum(sweep.counts.values())
    say(console, words.counts(sweep.counts, pending) + run_by)


def print_sweep(
    console: Console, sweep: SweepRow, trials: Sequence[TrialRow], rest: str, all_rows: bool = False
) -> None:
    """Prints the results of a sweep and its answer; ``rest`` as in ``print_trials``."""
    print_trials(console, sweep.digest, trials, rest, all_rows)
    console.print()
    cores = (sweep.environment.get("hardware") or {}).get("cores", 0)
    print_answer(console, sweep.kind, trials, cores)


def print_trials(
    console: Console, digest: str, trials: Sequence[TrialRow], rest: str, all_rows: bool = False
) -> None:
    """Prints the constants, the results of trials that are not pruned, replicas as one, and the
    hops if a trial measured them; ``rest`` is the option or command that shows all rows."""
    measured = [row for row in trials if row.status != "pruned"]
    if not measured:
        return
    configs = [row.config for row in measured]
    fields = words.varying(configs)
    rows = measured if all_rows else replicas.merged(measured)
    say(console, f"{words.constants(configs[0], fields)}; {words.measured(configs[0])}")
    console.print()
    few = rows if all_rows else tables.most_telling(rows, ROWS)
    tables.show(tables.results_table(few, fields, verdict.winners(measured)), console)
    if len(few) < len(rows):
        hidden = units.plural(len(rows) - len(few), "more point")
        say(console, f"... {hidden} hidden ({rest})")
    elif len(rows) < len(measured):
        say(console, f"medians over the replicas of each point, {len(measured)} trials ({rest})")
    _print_hops(console, digest, trials, rest, all_rows)


def print_history(
    console: Console, trials: Sequence[TrialRow], earlier: Sequence[TrialRow], everything: bool
) -> None:
    """Prints every measurement of every trial."""
    measured = history.measurements([row for row in trials if row.status != "pruned"], earlier)
    if not measured:
        return
    shown = measured if everything else measured[:ROWS]
    console.print()
    fields = words.varying(measurement.row.config for measurement in measured)
    tables.show(history.history_table(shown, fields), console)
    if len(shown) < len(measured):
        hidden = units.plural(len(measured) - len(shown), "more measurement")
        say(console, f"... {hidden} hidden (--all)")


def print_answer(console: Console, kind: str, trials: Sequence[TrialRow], cores: int) -> None:
    """Prints the fastest of each problem in words, and whether a host of ``cores`` was busy.

    Prints nothing of kinds whose ranks work alone: those beside a trial's own are no other
    processes.
    """
    if (facts := KINDS.get(kind)) and facts.independent_ranks:
        return
    say(console, *(f"answer: {line}" for line in verdict.answer(kind, trials)))
    if errors := verdict.predictions(trials):
        say(console, f"prediction: {errors}")
    if disturbed := verdict.busy(trials, cores):
        say(console, f"busy:   {disturbed}")


def print_page(console: Console, ui_command: str) -> None:
    """Prints where MLflow shows a sweep."""
    first, *lines = ui_command.splitlines()
    say(console, f"mlflow: {first}", *(f"        {line}" for line in lines))


def _print_hops(
    console: Console, digest: str, trials: Sequence[TrialRow], rest: str, all_rows: bool
) -> None:
    few, hidden = tables.with_hops(trials, sys.maxsize if all_rows else ROWS)
    if not few:
        return
    console.print()
    tables.show(tables.hops_table(digest, few), console)
    if hidden:
        say(console, f"... the hops of {units.plural(hidden, 'trial')} hidden ({rest})")
    console.print()
    legend = "largest time of any rank; transfer: without computation beside it, wait: in the pass"
    say(console, legend, f"traces: {folder_of(digest)} (https://ui.perfetto.dev opens them)")
