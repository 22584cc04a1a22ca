"""``compare``: what changed between two sweeps, and whether it is a regression."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ringray.base.errors import UserError, unknown
from ringray.base.redaction import plain
from ringray.lab.cli.options import ALL, STORE, Option, Output, options, write
from ringray.lab.cli.results import ROWS, say
from ringray.lab.opening import open_store
from ringray.lab.report import comparison_views as views
from ringray.lab.report import tables
from ringray.lab.report.comparison import MARGIN, ComparedSide
from ringray.lab.report.comparison import compare as compared
from ringray.lab.store import jsonl
from ringray.lab.store.store import Store
from ringray.lab.trial.metrics import METRICS
from ringray.lab.trial.outcome import SweepInfo, TrialRow, selected

_SQLITE = b"SQLite format 3\0"
_SIDE = (
    "NAME, DIGEST or NAME@COMMIT of the store; FILE of --json or a store, or FILE:SWEEP; or "
    "runs:/ID of MLflow"
)


def _share(percentage: str) -> float:
    """Reads an option."""
    number = re.fullmatch(r"(\d{1,4}(?:\.\d{1,6})?) ?%", percentage.strip())
    if number is None:
        expected = "expected a percentage such as 5% or 2.5%"
        raise argparse.ArgumentTypeError(f"got {percentage!r}, {expected}")
    return float(number[1]) / 100


_FAIL = "exit with 1 if B is surely worse by more than P, such as 5%%, or lacks a point of A"


@options(
    Option("a", metavar="A", help=f"what was before: {_SIDE}"),
    Option("b", metavar="B", help="what is compared with it, named likewise"),
    Option("--metric", default="median_ms", metavar="M", help="a metric (default: median_ms)"),
    Option("--fail-above", metavar="P", type=_share, help=_FAIL),
    STORE,
    ALL,
    Output("--json", metavar="F", new=True, help="write the comparison to F; - is stdout"),
    Output("--html", metavar="F", new=True, help="write it as a page to F; - is stdout"),
    Option("--force", action="store_true", help="overwrite F"),
)
def compare(arguments: argparse.Namespace) -> int:
    """Compares two sweeps; returns 1 if one is worse by more than is allowed."""
    above: float | None = arguments.fail_above
    directed = [name for name, metric in METRICS.items() if metric.objective]
    if arguments.metric not in directed:
        raise UserError(unknown("--metric", arguments.metric, directed))
    a, b = (side(name, arguments.store) for name in (arguments.a, arguments.b))
    result = compared(a, b, arguments.metric, above or MARGIN)
    failure = views.failure(result, above)
    if arguments.json is not None:
        write("--json", arguments.json, json.dumps(views.record(result, above)) + "\n")
    if arguments.html is not None:
        write("--html", arguments.html, views.html(result, above))
    if "-" not in (arguments.json, arguments.html):
        console = tables.console()
        say(console, f"A: {views.origin(a)}", f"B: {views.origin(b)}")
        say(console, *(f"   {line}" for line in views.changes(result)))
        console.print()
        points = views.worst(result)
        few = points if arguments.all else points[:ROWS]
        tables.show(views.points_table(result, few), console)
        if len(few) < len(points):
            say(console, f"... {len(points) - len(few)} more points hidden (--all)")
        say(console, views.LEGEND, "", *(f"answer: {line}" for line in views.answer(result)))
        if failure:
            say(console, f"regression: {failure}")
        if doubt := views.doubt(result, above):
            say(console, doubt)
    return 1 if failure else 0


def side(named: str, store: str | None) -> ComparedSide:
    """Reads one side.

    Args:
        named: NAME, DIGEST or NAME@COMMIT of the store; FILE or FILE:SWEEP of a store or of JSON
            Lines; runs:/RUN of MLflow.
        store: the path of the store; None is the default one.

    Raises:
        UserError: there is no such side, or it cannot be read.
    """
    if named.startswith("runs:/"):
        from ringray.lab.tracking.restore import fetched

        return _side(named, *fetched(named.removeprefix("runs:/").strip("/")))
    path, sweep = _file(named)
    if path is not None and not _is_store(path):
        return _lines(named, path, sweep)
    with open_store(store if path is None else str(path), readonly=True) as opened:
        if path is not None and not sweep:
            sweep = _only([(row.name, row.digest) for row in opened.sweeps()], named)
        return _stored(named, opened, sweep)


def _is_store(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:  # else the reader of lines says why
        return file.read(len(_SQLITE)) == _SQLITE
    return False


def _file(named: str) -> tuple[Path | None, str]:
    """Returns the file that an argument names, and the sweep in it."""
    if Path(named).is_file():
        return Path(named), ""
    path, _, sweep = named.rpartition(":")
    return (Path(path), sweep) if Path(path).is_file() else (None, named)


def _stored(named: str, store: Store, selector: str) -> ComparedSide:
    name, sign, start = selector.partition("@")
    sweep = store.find(name)
    earlier = [recording.trial for recording in store.history(sweep.digest)]
    rows = [*earlier, *store.trials(sweep.digest)]
    if sign:
        commits = [commit for commit in dict.fromkeys(map(_commit, rows)) if commit]
        meant = [commit for commit in commits if start and commit.startswith(start.lower())]
        if len(meant) != 1:
            raise UserError(
                f"{named}: expected NAME@COMMIT with one of the commits at which {sweep.name} was "
                f"measured: {', '.join(commit[:10] for commit in commits) or 'none is known'}"
            )
        rows = [row for row in rows if _commit(row) == meant[0]]
    return _side(named, sweep, rows)


def _commit(row: TrialRow) -> str:
    git = (row.environment or {}).get("git") or {}
    return str(git.get("commit") or "")


def _lines(named: str, path: Path, sweep: str) -> ComparedSide:
    lines = jsonl.read(path)
    pairs = [(info.name, info.digest) for info, _ in lines]
    digest = selected(sweep, pairs)[-1:] if sweep else [_only(pairs, named)]
    if not digest:
        names = ", ".join(dict.fromkeys(name for name, _ in pairs))
        raise UserError(f"{path} has no sweep {sweep!r}; it has {names}")
    ours = [(info, row) for info, row in lines if info.digest == digest[0]]
    return _side(named, ours[-1][0], [row for _, row in ours])


def _only(sweeps: Sequence[tuple[str, str]], named: str) -> str:
    """Returns the digest of the one sweep of a file."""
    names = {digest: name for name, digest in sweeps}
    if not names:
        raise UserError(f"{named} has no sweep; `ringray run SPEC --json FILE` writes one")
    if len(names) > 1:
        several = ", ".join(f"{name} ({digest[:12]})" for digest, name in names.items())
        raise UserError(f"{named} has several sweeps: {several}; name one as {named}:SWEEP")
    return next(iter(names))


def _side(named: str, sweep: SweepInfo, rows: Iterable[TrialRow]) -> ComparedSide:
    """Returns a side with all measurements of each trial by the code, hardware and versions of its
    last one: a sweep that is run again and again counts as one."""
    measured = {(repr(sorted(row.config.items())), row.ended): row for row in rows}
    last = {config: row.point for (config, _), row in measured.items()}
    placed = [
        replace(row, environment=row.environment or sweep.environment)
        for (config, _), row in measured.items()
        if row.point == last[config]
    ]
    return ComparedSide(plain(named), plain(sweep.name), sweep.digest, sweep.spec, placed)
