"""``report``: sweeps as one page, as a table and as pictures."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ringray.base.errors import UserError
from ringray.base.redaction import shown
from ringray.lab.cli.options import STORE, Option, Output, options, write, writing
from ringray.lab.cli.outputs import check_file
from ringray.lab.opening import as_it_stands, open_store
from ringray.lab.trial.outcome import SweepRow, TrialRow

_Sweep = tuple[SweepRow, list[TrialRow]]


@options(
    Option("sweeps", metavar="SWEEP", nargs="+", help="name, or the start of its digest"),
    Output("-o", "--output", metavar="FILE", help="page to write (default: SWEEP.html)"),
    Output("--csv", metavar="FILE", new=True, help="also write the trials as a table; - is stdout"),
    Output("--png", metavar="DIR", folder=True, help="also write each figure as a PNG"),
    STORE,
    Option("--force", action="store_true", help="replace files that exist"),
)
def report(arguments: argparse.Namespace) -> int:
    """Writes a page that shows sweeps, in one file that needs nothing else."""
    with open_store(arguments.store, readonly=True) as store:
        by_digest: dict[str, _Sweep] = {}
        for name in arguments.sweeps:
            sweep = as_it_stands(store, store.find(name))
            by_digest[sweep.digest] = sweep, store.trials(sweep.digest)
    sweeps = list(by_digest.values())
    for sweep, trials in sweeps:
        if all(trial.status is None for trial in trials):
            advice = f"`ringray resume {sweep.name}` continues it"
            raise UserError(f"{sweep.name}: nothing of it has been measured yet; {advice}")
    name = _file_name(sweeps[0][0]) if len(sweeps) == 1 else "report"
    output = arguments.output or f"{name}.html"
    check_file("-o", output, arguments, new=True)
    if arguments.csv and Path(arguments.csv).resolve() == Path(output).resolve():
        raise UserError(f"-o {output} and --csv {arguments.csv} are one; name two files")
    if arguments.png:
        _write_pictures(arguments, sweeps)
    if arguments.csv:
        write("--csv", arguments.csv, _csv(sweeps))
    from ringray.lab.report.sweep_report import document

    text = document(sweeps)
    write("-o", output, text)
    if "-" not in (output, arguments.csv):
        print(shown(f"{output}: {len(text.encode()) / 1e6:.1f} MB; open it in a browser"))
    return 0


def _file_name(sweep: SweepRow) -> str:
    """Returns the name of a sweep as part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", sweep.name).strip(".-")[:100] or sweep.digest[:12]


def _csv(sweeps: list[_Sweep]) -> str:
    from ringray.lab.tracking.mlflow_record import results_csv, results_rows

    by_sweep = [(sweep.name, results_rows(sweep, trials)) for sweep, trials in sweeps]
    return results_csv([{"sweep": name, **row} for name, rows in by_sweep for row in rows])


def _write_pictures(arguments: argparse.Namespace, sweeps: list[_Sweep]) -> None:
    from ringray.lab.report.figures import pictures

    drawn: dict[str, bytes] = {}
    for sweep, trials in sweeps:
        prefix = f"{_file_name(sweep)}-{sweep.digest[:12]}-" if len(sweeps) > 1 else ""
        drawn |= {f"{prefix}{name}.png": png for name, png in pictures(trials)}
    folder = Path(arguments.png)
    with writing(arguments.png, "--png"):
        folder.mkdir(exist_ok=True)
    for name in drawn:
        check_file("--png", str(folder / name), arguments, new=True)
    for name, png in drawn.items():
        write("--png", str(folder / name), png)
