"""The parent run's description in MLflow: results, links and figures.

Markdown that fits into one tag; a pure function of the store's rows and the run's place.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

from ringray.lab.report import verdict
from ringray.lab.report.figures import TITLES
from ringray.lab.tracking.location import MODE
from ringray.lab.tracking.mlflow_record import TABLE, run_names
from ringray.lab.trial.metrics import columns as metric_columns
from ringray.lab.trial.outcome import STATUSES, SweepRow, Tracked, TrialRow

FIGURES = "figures"
REPORT = "report.html"
_LENGTH = 7800  # characters; a tag has 8000
_ROWS = 60
_COMPARED = 30  # runs; MLflow's compare page stays readable
_BEST = ("ratio", "median_ms", "error_out")  # less is better


def note(
    sweep: SweepRow,
    trials: Sequence[TrialRow],
    place: Tracked,
    children: Mapping[str, str],
    figures: Sequence[str],
) -> str:
    """Returns the answer, counts, links, figures and a table of trials.

    ``children``: run ids by trial key; ``figures``: names of those among the run's artifacts.
    """
    ended = [trial for trial in trials if trial.status is not None]
    counts = [(status, sum(trial.status == status for trial in ended)) for status in STATUSES]
    ends = ", ".join(f"{count} {status}" for status, count in counts if count) or "none yet"
    title = f"**{_said(sweep.name)}** ({_said(sweep.kind)})"
    lines = _answer(sweep, ended)
    lines += [f"{title}: {len(ended)} of {len(trials)} trials ended: {ends}"]
    if ended:
        lines += ["", _links(ended, place, children, bool(figures))]
    if bare := sum(trial.status == "pruned" and trial.key not in children for trial in ended):
        lines += ["", f"{bare} of the pruned points have no run of their own; `{TABLE}` says why"]
    lines += [""] if figures else []
    for name in figures:
        path = quote(f"{FIGURES}/{name}.png", safe="")
        image = f"get-artifact?path={path}&run_uuid={place.run_id}"
        lines.append(f"![{TITLES.get(name, name)}]({image})\n")
    return "\n".join(lines + _table(sweep, trials, ended, len("\n".join(lines))))


def _links(
    ended: Sequence[TrialRow], place: Tracked, children: Mapping[str, str], report: bool
) -> str:
    """Returns links to MLflow's views of the children, relative, so that they work on any host."""
    runs = f"#/experiments/{place.experiment_id}/runs"
    current = f'tags.`mlflow.parentRunId` = "{place.run_id}" AND tags.`ringray.current` = "true"'
    only = quote(current)
    # Sorted by date, MLflow would fold the trials into their parent.
    best = next((name for name in _BEST if any(name in trial.metrics for trial in ended)), "")
    order = quote(f"metrics.`{best}`" if best else "attributes.`run_name`")
    view = f"searchFilter={only}&orderByKey={order}&orderByAsc=true&{MODE}"
    modes = {"table": "TABLE", "charts": "CHART"}
    links = [f"[{name}]({runs}?{view}&compareRunsMode={mode})" for name, mode in modes.items()]
    good = [trial for trial in ended if trial.status == "ok" and trial.key in children]
    fastest = sorted(good, key=lambda trial: trial.metrics.get(best, math.inf))[:_COMPARED]
    if len(fastest) > 1:
        ids = json.dumps([children[trial.key] for trial in fastest], separators=(",", ":"))
        experiments = json.dumps([place.experiment_id])
        every = "all" if len(fastest) == len(ended) else f"the first {len(fastest)}"
        chosen = f"runs={quote(ids)}&experiments={quote(experiments)}"
        links.append(f"[compare {every}](#/compare-runs?{chosen})")
    if report:
        links.append(f"[report]({runs}/{place.run_id}/artifacts/{REPORT}?{MODE})")
    return "Trials: " + " · ".join(links) + f"; files: `results.csv`, `{TABLE}`, `plan.json`"


def _answer(sweep: SweepRow, ended: Sequence[TrialRow]) -> list[str]:
    """Returns the answer in words, one line for each problem; MLflow folds what is below them."""
    lines = [_said(line) for line in verdict.answer(sweep.kind, ended)]
    mark = "- " if len(lines) > 1 else ""
    return [*(mark + line for line in lines), ""] if lines else []


def _table(
    sweep: SweepRow, trials: Sequence[TrialRow], ended: Sequence[TrialRow], used: int
) -> list[str]:
    if not ended:
        return []
    measured = {name for trial in ended for name in trial.numbers}
    columns = [metric.name for metric in metric_columns("mlflow") if metric.name in measured]
    lines = ["", _row(["trial", "status", *columns]), _row(["---"] * (len(columns) + 2))]
    names = run_names(sweep, trials)
    room = _LENGTH - used - len("\n".join(lines))
    shown = 0
    for trial in ended[:_ROWS]:
        values = [_rounded(trial.numbers.get(name)) for name in columns]
        line = _row([_said(names[trial.key]), trial.status or "", *values])
        room -= len(line) + 1
        if room < 0:
            break
        lines.append(line)
        shown += 1
    if shown < len(ended):
        lines += ["", f"and {len(ended) - shown} more: see `results.csv` under Artifacts"]
    return lines


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) < 1e6 else f"{value:,.0f}"


def _said(text: str) -> str:
    """Returns markdown that shows ``text`` as it is: no link, no picture, no HTML."""
    shown = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*\[\]])", r"\\\1", shown)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
