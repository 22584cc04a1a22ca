"""``tuned``: the choices that are kept."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from ringray.base import units
from ringray.base.errors import UserError
from ringray.lab.cli.options import Option, Output, options, write
from ringray.lab.report import tables
from ringray.tuning import table as tuned
from ringray.tuning.table import Entry


@options(
    Output("--export", metavar="F", help="write all of them to F"),
    Option("--import", metavar="F", dest="take", help="add those in F"),
)
def show(arguments: argparse.Namespace) -> int:
    """Lists, exports or imports tuned choices."""
    if arguments.take is not None:
        if arguments.export is not None:
            raise UserError("argument --import: not allowed with argument --export")
        entries = tuned.read(Path(arguments.take))
        path = tuned.add(entries)
        print(f"{len(entries)} choices from {arguments.take} are in {path} now")
        return 0
    entries = tuned.table().entries
    if arguments.export is not None:
        if not entries:
            raise UserError(f"nothing is tuned in {tuned.folder()}; `ringray tune SPEC` does it")
        write("--export", arguments.export, tuned.text(entries))
        if arguments.export != "-":
            print(f"{len(entries)} choices are in {arguments.export}")
        return 0
    if not entries:
        print(f"nothing is tuned in {tuned.folder()} yet; `ringray tune SPEC` does it")
        return 0
    _print(entries)
    return 0


def _print(entries: list[Entry]) -> None:
    here = tuned.here()
    console = tables.console()
    table = tables.bare_table()
    for head in ("for", "choice", "reached", "on", "usable"):
        table.add_column(head, no_wrap=head in ("reached", "usable"))
    for entry in sorted(entries, key=lambda entry: (entry.use, str(entry.bucket))):
        bucket = entry.bucket
        problem = (
            f"{entry.use}: ring {bucket.ring_size}, "
            f"{f'{bucket.batch} × ' if bucket.batch > 1 else ''}{bucket.tokens} tokens, "
            f"{bucket.heads}/{bucket.kv_heads} heads × {bucket.head_dim}, {bucket.dtype}, "
            f"{bucket.mask}, {'forward+backward' if bucket.backward else 'forward'}"
        )
        if bucket.threads:
            problem += f", {units.plural(bucket.threads, 'thread')}"
        reached = f"{units.digits(entry.metrics.get('median_ms'))} ms"
        place, usable = entry.place.hardware, _usable(entry.place, here)
        table.add_row(problem, entry.text, reached, place, usable)
    tables.show(table, console)


def _usable(place: tuned.Place, here: tuned.Place) -> str:
    """Returns whether an entry is used here, as far as known without the cluster's GPUs."""
    if replace(here, hardware=place.hardware, device=place.device) != place:
        return "no: other kernels or versions"
    if place.device == "cuda":
        return "on such GPUs"
    return "yes" if place == here else "no: other hardware"
