"""``compare``: what changed between two sweeps, and whether it is a regression."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from ringray.base.errors import UserError, unknown
from ringray.lab.cli.options import ALL, STORE, Option, Output, options, write
from ringray.lab.cli.results import ROWS, say
from ringray.lab.cli.sides import side
from ringray.lab.report import comparison_views as views
from ringray.lab.report import tables
from ringray.lab.report.comparison import MARGIN
from ringray.lab.report.comparison import compare as compared
from ringray.lab.trial.metrics import METRICS

_SIDE = (
    "NAME, DIGEST or NAME@COMMIT of the store; FILE of --json or a store, or FILE:SWEEP; or "
    "runs:/ID of MLflow"
)


@options(
    Option("a", metavar="A", help=f"what was before: {_SIDE}"),
    Option("b", metavar="B", help="what is compared with it, named likewise"),
    Option("--metric", default="median_ms", metavar="M", help="a metric (default: median_ms)"),
    Option(
        "--fail-above", metavar="P",
        help="exit with 1 if B is surely worse by more than P, such as 5%%, or lacks a point of A",
    ),
    STORE, ALL,
    Output("--json", metavar="F", new=True, help="write the comparison to F; - is stdout"),
    Output("--html", metavar="F", new=True, help="write it as a page to F; - is stdout"),
    Option("--force", action="store_true", help="overwrite F"),
)  # fmt: skip
def compare(arguments: argparse.Namespace) -> int:
    """Compares two sweeps; returns 1 if one is worse by more than is allowed."""
    above = _share(arguments.fail_above)
    directed = [name for name, metric in METRICS.items() if metric.objective]
    if arguments.metric not in directed:
        raise UserError(unknown("--metric", arguments.metric, directed))
    files = {f"--{name}": getattr(arguments, name) for name in ("json", "html")}
    outputs = {option: name for option, name in files.items() if name is not None}
    if len({Path(name).resolve() for name in outputs.values()}) < len(outputs):
        raise UserError(f"--json and --html are both {arguments.json}; name two files")
    a, b = (side(name, arguments.store) for name in (arguments.a, arguments.b))
    result = compared(a, b, arguments.metric, above or MARGIN)
    failure = views.failure(result, above)
    for option, name in outputs.items():
        page = option == "--html"
        text = views.html(result, above) if page else json.dumps(views.record(result, above)) + "\n"
        write(option, name, text)
    if "-" not in outputs.values():
        console = tables.console()
        say(console, f"A: {views.origin(a)}", f"B: {views.origin(b)}")
        say(console, *(f"   {line}" for line in views.changes(result)))
        console.print()
        points = views.worst(result.points, result.metric.less_is_better)
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


def _share(percentage: str | None) -> float | None:
    if percentage is None:
        return None
    number = re.fullmatch(r"(\d{1,4}(?:\.\d{1,6})?) ?%", percentage.strip())
    if number is None:
        raise UserError(
            f"--fail-above: got {percentage!r}, expected a percentage such as 5% or 2.5%"
        )
    return float(number[1]) / 100
