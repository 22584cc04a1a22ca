"""Makes a record of ``experiments/results/``: a small JSON file, with the command and where it ran.

    ringray run SPEC --json TRIALS.jsonl
    python experiments/record.py --command 'ringray run SPEC' TRIALS.jsonl > RECORD.json
    COMMAND | python experiments/record.py --command COMMAND > RECORD.json

The last one keeps what a command prints. Of measured trials it keeps status, metrics and the fields
in which they differ. ``--by FIELDS`` keeps a row for each value of these fields instead, with the
largest value of each metric. ``--metrics NAMES`` keeps the metrics that begin so. ``--note``: what
a reader must know of the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

from ringray.base import provenance

Trial = Mapping[str, Any]
WHERE = ("hardware", "os", "python", "versions", "git", "code")


def varied(trials: Sequence[Trial]) -> list[str]:
    """Returns the fields of the configuration in which trials differ."""
    return [
        field
        for field in trials[0]["config"]
        if len({json.dumps(trial["config"].get(field)) for trial in trials}) > 1
    ]


def row(trials: Sequence[Trial], fields: Iterable[str], kept: Sequence[str]) -> dict[str, Any]:
    """Returns what is kept of trials that agree in ``fields``."""
    config = {field: trials[0]["config"].get(field) for field in fields}
    metrics: dict[str, float] = {}
    for trial in trials:
        # Of a trained task also the score at each length, the mean over depths.
        examined = trial.get("samples", {}).items()
        scores = {name: mean(depths) for name, depths in examined if name.startswith("score ")}
        for name, value in {**trial["metrics"], **scores}.items():
            if name.startswith(tuple(kept)):
                metrics[name] = max(metrics.get(name, value), value)
    digits = {name: float(f"{value:.5g}") for name, value in metrics.items()}
    status = sorted({trial["status"] for trial in trials})
    reason = {"reason": trials[0]["reason"]} if trials[0]["reason"] else {}
    return {**config, "trials": len(trials), "status": ", ".join(status), **reason, **digits}


def rows(trials: Sequence[Trial], by: Sequence[str], kept: Sequence[str]) -> list[dict[str, Any]]:
    """Returns a row for each trial, or for each value of the fields ``by``."""
    fields = by or varied(trials)
    groups: dict[str, list[Trial]] = {}
    for number, trial in enumerate(trials):
        if by and trial["status"] == "pruned":
            continue
        key = json.dumps([trial["config"].get(field) for field in by]) if by else str(number)
        groups.setdefault(key, []).append(trial)
    return [row(group, fields, kept) for group in groups.values()]


def _names(text: str) -> list[str]:
    return text.split(",")


def main(words: Sequence[str]) -> None:
    """Prints a record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trials", nargs="*", help="JSON Lines of `ringray run --json`")
    parser.add_argument("--command", required=True)
    parser.add_argument("--by", default=[], type=_names)
    parser.add_argument("--metrics", default=[""], type=_names)
    parser.add_argument("--note", default="")
    options = parser.parse_args(words)
    if options.trials:
        lines = [line for path in options.trials for line in Path(path).read_text().splitlines()]
        trials = [json.loads(line) for line in lines]
        measured = [trial for trial in trials if trial["status"] != "pruned"]
        environment = measured[0]["environment"]
        date = max(trial["time"] for trial in measured)
        body: Sequence[Any] = rows(trials, options.by, options.metrics)
    else:
        environment, date = provenance.describe(), datetime.now(UTC).isoformat()
        body = [line.rstrip() for line in sys.stdin]
    head = {
        "command": options.command,
        "date": date[:10],
        **({"note": options.note} if options.note else {}),
        **{name: environment[name] for name in WHERE},
    }
    text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
    listed = ",\n".join(f"  {json.dumps(kept, ensure_ascii=False)}" for kept in body)
    print(f'{text},\n "rows": [\n{listed}\n ]\n}}')


if __name__ == "__main__":
    main(sys.argv[1:])
