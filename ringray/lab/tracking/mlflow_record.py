"""What MLflow shows of a sweep, as plain values: names, params, tags, metrics, tables.

Pure functions of the store's rows. MLflow's limits hold here: 6000 characters per param, 8000 per
tag, and no infinities or NaN, which poison its charts.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import re
from typing import TYPE_CHECKING, Any

from ringray.base.redaction import plain, public_spec, without_credentials
from ringray.lab.report import words
from ringray.lab.trial.metrics import METRICS, of_group
from ringray.lab.trial.outcome import STATUSES, SweepRow, TrialRow, record_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TABLE = "results_table.json"
_PARAM_LENGTH = 6000
_TAG_LENGTH = 8000


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Without infinities and NaN, under names that MLflow accepts."""
    return {
        _plain_name(name): float(value) for name, value in metrics.items() if math.isfinite(value)
    }


def run_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """What a child run is given: ``finite``, with what the machine did under ``system/``, which
    MLflow shows in a section of its own."""
    load = of_group("load")
    return {
        f"system/{name}" if name in load else name: value for name, value in finite(metrics).items()
    }


def params(config: dict[str, Any]) -> dict[str, str]:
    """Every field; null, true and numbers as in YAML, so that a filter finds them."""
    return {_plain_name(name): _text(value)[:_PARAM_LENGTH] for name, value in config.items()}


def run_names(sweep: SweepRow, trials: Iterable[TrialRow]) -> dict[str, str]:
    """Returns the name of each trial's run, by its key."""
    return words.names({trial.key: trial.config for trial in trials}, sweep.kind)


def record_digest(trial: TrialRow) -> str:
    """Names one recording of a trial: a child run that carries it is up to date."""
    content = [
        trial.status, trial.reason, trial.metrics, trial.point, trial.attempts,
        trial.started, trial.ended,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def environment_tags(environment: dict[str, Any]) -> dict[str, str]:
    """Hardware, versions, source and git state as flat tags; what is unknown is left out."""
    tags: dict[str, Any] = {
        "os": environment.get("os"),
        "python": environment.get("python"),
        "code": environment.get("code"),
        "kernels": environment.get("kernels"),
    }
    for name, value in (environment.get("hardware") or {}).items():
        tags[f"hardware.{name}"] = ", ".join(value) if isinstance(value, list) else value
    for name, value in (environment.get("versions") or {}).items():
        tags[f"versions.{name}"] = value
    git = environment.get("git") or {}
    tags["git.commit"] = git.get("commit")
    tags["git.dirty"] = git.get("dirty")
    tags["mlflow.source.git.commit"] = git.get("commit")
    return tag_texts(tags)


def sweep_tags(sweep: SweepRow) -> dict[str, str]:
    """The tags of the parent run."""
    return environment_tags(sweep.environment) | tag_texts(
        {
            "ringray.sweep": sweep.digest,
            "ringray.role": "sweep",
            "ringray.kind": sweep.kind,
            "mlflow.source.name": "ringray",
            "mlflow.source.type": "LOCAL",
        }
    )


def trial_tags(sweep: SweepRow, trial: TrialRow, parent_id: str) -> dict[str, str]:
    """The tags of a child run."""
    return (
        environment_tags(trial.environment or sweep.environment)
        | tag_texts(
            {
                "ringray.sweep": sweep.digest,
                "ringray.role": "trial",
                "ringray.kind": sweep.kind,
                "ringray.key": trial.key,
                "ringray.point": trial.point,
                "ringray.status": trial.status,
                "ringray.reason": trial.reason,
                "ringray.attempts": trial.attempts,
                "ringray.record": record_digest(trial),
                "mlflow.parentRunId": parent_id,
                "mlflow.source.name": "ringray",
                "mlflow.source.type": "LOCAL",
            }
        )
        | _fault_tags((trial.environment or {}).get("faults", ()))
    )


def _fault_tags(faults: Iterable[dict[str, Any]]) -> dict[str, str]:
    """What a trial met before it ended, and where: each once, in order."""
    met = {
        f"ringray.fault.{name}": dict.fromkeys(fault[name] for fault in faults if fault.get(name))
        for name in ("kind", "node")
    }
    return tag_texts({name: ", ".join(map(str, values)) for name, values in met.items()})


def tag_texts(tags: dict[str, Any]) -> dict[str, str]:
    """Tags as MLflow takes them; None and the empty text are left out."""
    texts = {name: _text(value)[:_TAG_LENGTH] for name, value in tags.items() if value is not None}
    return {_plain_name(name): text for name, text in texts.items() if text}


def summary_metrics(trials: Iterable[TrialRow]) -> dict[str, float]:
    """Counts per status, the best ratio, the worst share of the error budget per tensor."""
    ended = [trial for trial in trials if trial.status is not None]
    totals = {f"trials_{status}": 0.0 for status in STATUSES}
    for trial in ended:
        totals[f"trials_{trial.status}"] += 1.0
    found = [finite(trial.metrics) for trial in ended if trial.status == "ok"]
    for name, metric in METRICS.items():
        values = [metrics[name] for metrics in found if name in metrics]
        if metric.extreme and values:
            least = metric.less_is_better == (metric.extreme == "best")
            totals[f"{metric.extreme}_{name}"] = min(values) if least else max(values)
    return totals


def spec_yaml(sweep: SweepRow) -> str:
    """The spec as it was written, but for a password in its tracking URI."""
    return without_credentials(sweep.source)


def plan_json(sweep: SweepRow, trials: Sequence[TrialRow]) -> str:
    """The plan as it was begun: the full spec and every trial with its prediction."""
    return json.dumps(
        {
            "sweep": sweep.digest,
            "name": sweep.name,
            "kind": sweep.kind,
            "spec": public_spec(sweep.spec),
            "trials": [
                {
                    "key": trial.key,
                    "index": trial.index,
                    "config": trial.config,
                    "predicted": trial.predicted,
                    "pruned": trial.reason if trial.status == "pruned" else None,
                }
                for trial in trials
            ],
        },
        indent=1,
    )


def results_json(sweep: SweepRow, trials: Sequence[TrialRow]) -> str:
    """The ended trials, each as a line of ``--json``."""
    lines = [record_line(sweep, trial) for trial in trials if trial.status is not None]
    return "[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n"


def results_table(sweep: SweepRow, trials: Sequence[TrialRow]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of the ended trials: what they are, how they ended, config, metrics."""
    ended = [trial for trial in trials if trial.status is not None]
    names = run_names(sweep, trials)
    fields = list(dict.fromkeys(name for trial in ended for name in trial.config))
    metrics = list(dict.fromkeys(name for trial in ended for name in finite(trial.metrics)))
    fixed = ["trial", "key", "status", "reason", "attempts", "point"]
    rows: list[list[Any]] = []
    for trial in ended:
        row: list[Any] = [
            names[trial.key], trial.key, trial.status, trial.reason, trial.attempts, trial.point,
        ]  # fmt: skip
        row += [_text(trial.config.get(name)) for name in fields]
        row += [finite(trial.metrics).get(name) for name in metrics]
        rows.append(row)
    return fixed + fields + metrics, rows


def results_csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """The table as CSV; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """A spreadsheet takes a text that begins so for a formula."""
    return (
        f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value
    )


def _text(value: Any) -> str:
    # Some databases refuse control characters, NUL above all.
    return plain(value if isinstance(value, str) else json.dumps(value), " ")


def _plain_name(name: str) -> str:
    return re.sub(r"[^\w./ -]", "_", name)[:250]
