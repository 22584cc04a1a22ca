"""A sweep as MLflow takes it, in plain values: names, params, tags, metrics, tables, description.

Pure functions of the store's rows. MLflow's limits hold here: 6000 characters per param, 8000 per
tag, and no infinities or NaN, which break its charts.
"""

from __future__ import annotations

import hashlib
import html
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from ringray.base.redaction import plain, without_credentials
from ringray.lab.report import verdict, words
from ringray.lab.report.figures import TITLES
from ringray.lab.tracking.location import MODE
from ringray.lab.trial.metrics import METRICS, of_group, prediction_errors
from ringray.lab.trial.outcome import STATUSES, SweepRow, Tracked, TrialRow

FIGURES, REPORT = "figures", "report.html"
_PARAM_LENGTH = 6000
_TAG_LENGTH = 8000
_CURVE = 500  # points of a curve
_DESCRIBED = ("os", "python", "code", "kernels", "hardware", "versions", "git")
_BEST = ("ratio", "median_ms", "error_out")  # metrics that sort the trials; less is better


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Returns the finite metrics under names that MLflow accepts."""
    good = ((name, value) for name, value in metrics.items() if math.isfinite(value))
    return {_plain_name(name): float(value) for name, value in good}


def run_curves(trial: TrialRow) -> Iterator[tuple[str, float, int]]:
    """Yields name, value and step of what a training reports of each step."""
    for name in of_group("training"):
        values = trial.samples.get(name, [])
        every = -(-len(values) // _CURVE)
        for step, value in enumerate(values, start=1):
            if math.isfinite(value) and (step % every == 0 or step == 1):
                yield name, value, step


def run_metrics(trial: TrialRow) -> dict[str, float]:
    """Returns the metrics of a child run, also over their predictions; those of the machine's load
    begin with ``system/``, which MLflow shows in a section of its own."""
    load, curves = of_group("load"), of_group("training")
    return {
        f"system/{name}" if name in load else name: value
        for name, value in finite(trial.numbers).items()
        if name not in trial.samples or name not in curves
    }


def params(config: dict[str, Any]) -> dict[str, str]:
    """Returns every field; null, true and numbers as in YAML, so that a filter finds them."""
    return {_plain_name(name): _text(value)[:_PARAM_LENGTH] for name, value in config.items()}


def run_names(sweep: SweepRow, trials: Iterable[TrialRow]) -> dict[str, str]:
    """Returns the name of each trial's run, by its key."""
    return words.names({trial.key: trial.config for trial in trials}, sweep.kind)


def record_digest(trial: TrialRow) -> str:
    """Returns the name of one recording of a trial: a child run that has it is up to date."""
    fields = ("status", "reason", "metrics", "point", "attempts", "started", "ended")
    content = [getattr(trial, name) for name in fields]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def environment_tags(environment: dict[str, Any]) -> dict[str, str]:
    """Returns hardware, versions, source and git state as flat tags, without unknown ones."""
    described = {name: environment.get(name) for name in _DESCRIBED}
    tags = {
        name: ", ".join(value) if isinstance(value, list) else value
        for name, value in words.flat(described, ".")
    }
    return tag_texts(tags | {"mlflow.source.git.commit": tags.get("git.commit")})


def sweep_tags(sweep: SweepRow) -> dict[str, str]:
    """Returns the tags of the parent run."""
    return environment_tags(sweep.environment) | _run_tags(sweep, "sweep")


def trial_tags(sweep: SweepRow, trial: TrialRow, parent_id: str) -> dict[str, str]:
    """Returns the tags of a child run."""
    of_trial = {
        "ringray.key": trial.key,
        "ringray.point": trial.point,
        "ringray.status": trial.status,
        "ringray.reason": trial.reason,
        "ringray.attempts": trial.attempts,
        "ringray.record": record_digest(trial),
        "mlflow.parentRunId": parent_id,
    }
    return (
        environment_tags(trial.environment or sweep.environment)
        | _run_tags(sweep, "trial")
        | tag_texts(of_trial)
        | _fault_tags((trial.environment or {}).get("faults", ()))
    )


def _run_tags(sweep: SweepRow, role: str) -> dict[str, str]:
    return {
        "ringray.sweep": sweep.digest,
        "ringray.role": role,
        "ringray.kind": sweep.kind,
        "mlflow.source.name": "ringray",
        "mlflow.source.type": "LOCAL",
    }


def _fault_tags(faults: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Returns the faults that a trial met and their nodes: each once, in order."""
    met = {
        f"ringray.fault.{name}": dict.fromkeys(fault[name] for fault in faults if fault.get(name))
        for name in ("kind", "node")
    }
    return tag_texts({name: ", ".join(map(str, values)) for name, values in met.items()})


def tag_texts(tags: dict[str, Any]) -> dict[str, str]:
    """Returns tags as MLflow takes them, without None and empty texts."""
    texts = {name: _text(value)[:_TAG_LENGTH] for name, value in tags.items() if value is not None}
    return {_plain_name(name): text for name, text in texts.items() if text}


def summary_metrics(trials: Sequence[TrialRow]) -> dict[str, float]:
    """Returns counts per status and, over all trials, the best or worst of some metrics and how far
    predictions were off."""
    counts = Counter(trial.status for trial in trials)
    totals = {f"trials_{status}": float(counts[status]) for status in STATUSES}
    measured = [finite(trial.numbers) for trial in trials if trial.status == "ok"]
    for name, metric in METRICS.items():
        values = [metrics[name] for metrics in measured if name in metrics]
        if metric.extreme and values:
            least = metric.less_is_better == (metric.extreme == "best")
            totals[f"{metric.extreme}_{name}"] = min(values) if least else max(values)
    return totals | prediction_errors(measured)


def files(sweep: SweepRow, trials: Sequence[TrialRow]) -> dict[str, str]:
    """Returns the texts of the files beside the runs, by name: the spec as it was written, without
    a password in its tracking URI, and the results."""
    return {
        "spec.yaml": without_credentials(sweep.source),
        "results.csv": results_csv(results_rows(sweep, trials)),
    }


def note(
    sweep: SweepRow, trials: Sequence[TrialRow], place: Tracked, figures: Sequence[str]
) -> str:
    """Returns the parent run's description, as markdown: the answer, counts, links, figures. MLflow
    folds all but its beginning; ``figures`` are names of those among the run's artifacts."""
    ended = [trial for trial in trials if trial.status is not None]
    counts = words.counts(Counter(str(trial.status) for trial in ended))
    lines = [f"{_escaped(line)}\n" for line in verdict.answer(sweep.kind, ended)]
    title = f"**{_escaped(sweep.name)}** ({_escaped(sweep.kind)})"
    lines.append(f"{title}: {len(ended)} of {len(trials)} trials ended: {counts}\n")
    lines.append(_links(ended, place, report=bool(figures)) + "\n")
    for name in figures:
        path = quote(f"{FIGURES}/{name}.png", safe="")
        image = f"get-artifact?path={path}&run_uuid={place.run_id}"
        lines.append(f"![{TITLES[name]}]({image})\n")
    return "\n".join(lines)[:_TAG_LENGTH]


def _links(ended: Sequence[TrialRow], place: Tracked, *, report: bool) -> str:
    """Returns links to MLflow's views of the trials, relative, so that they work on any host."""
    runs = f"#/experiments/{place.experiment_id}/runs"
    current = f'tags.`mlflow.parentRunId` = "{place.run_id}" AND tags.`ringray.current` = "true"'
    # Sorted by date, MLflow would fold the trials into their parent.
    best = next((name for name in _BEST if any(name in trial.metrics for trial in ended)), None)
    order = f"metrics.`{best}`" if best else "attributes.`run_name`"
    view = f"searchFilter={quote(current)}&orderByKey={quote(order)}&orderByAsc=true&{MODE}"
    modes = {"table": "TABLE", "charts": "CHART"}
    links = [f"[{name}]({runs}?{view}&compareRunsMode={mode})" for name, mode in modes.items()]
    if report:
        links.append(f"[report]({runs}/{place.run_id}/artifacts/{REPORT}?{MODE})")
    return "Trials: " + " · ".join(links)


def _escaped(text: str) -> str:
    """Returns markdown that shows ``text`` as it is: no link, no picture, no HTML."""
    shown = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*\[\]])", r"\\\1", shown)


def results_rows(sweep: SweepRow, trials: Sequence[TrialRow]) -> list[dict[str, Any]]:
    """Returns the ended trials, each with its name, how it ended, its config and its metrics."""
    ended = [trial for trial in trials if trial.status is not None]
    names = run_names(sweep, trials)
    # A column has one meaning: `repeats` is what was measured, not what the spec asks for.
    fields = dict.fromkeys(name for trial in ended for name in trial.config if name not in METRICS)
    rows = []
    for trial in ended:
        ends = {name: getattr(trial, name) for name in ("status", "reason", "attempts", "point")}
        config = {name: _text(trial.config.get(name)) for name in fields}
        row = {"trial": names[trial.key], "key": trial.key, **ends, **config}
        rows.append(row | finite(trial.numbers))
    return rows


def results_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns rows as CSV, with the columns of all; what a row lacks is an empty cell."""
    import pandas as pd  # takes a while to import

    return str(pd.DataFrame(rows, dtype=object).map(_cell).to_csv(index=False))


def _cell(value: Any) -> Any:
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@"))
    return f"'{value}" if formula else value  # so that a spreadsheet takes it for a text


def _text(value: Any) -> str:
    # Some databases refuse control characters, NUL above all.
    return plain(value if isinstance(value, str) else json.dumps(value), " ")


def _plain_name(name: str) -> str:
    return re.sub(r"[^\w./ -]", "_", name)[:250]
