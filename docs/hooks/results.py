"""Measured results by hardware, from the records under experiments/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from choosing import table

from ringray.base import units
from ringray.lab.report import tables, words
from ringray.lab.trial.metrics import columns

_FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "results"
_SAID = """\
Every sweep whose records (`--json F`) the repository keeps. Add yours:
`ringray run SPEC --json experiments/results/HARDWARE.SPEC.jsonl`."""


def page() -> str:
    """Writes a table for each file of records, under its hardware."""
    found: dict[str, list[str]] = {}
    for path in sorted(_FOLDER.glob("*.jsonl")):
        if path.name.startswith("gpu-"):  # of kernels alone
            continue
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found.setdefault(_hardware(records[0]), []).append(_sweep(path, records))
    parts = ["# Results by hardware", _SAID]
    for hardware, sweeps in found.items():
        parts += [f"## {hardware}", *sweeps]
    if len(found) == 1:
        kernels = "[kernels are measured on one](../kernels.md#measured-on-an-h100)"
        parts.append(f"No sweep on a GPU is among them yet; {kernels}.")
    return "\n\n".join(parts) + "\n"


def _hardware(record: dict[str, Any]) -> str:
    given = record["environment"]["hardware"]
    if given["gpus"]:
        return f"{len(given['gpus'])} × {given['gpus'][0]}"
    return f"{given['cpu']}, {given['cores']} cores, {units.memory(given['memory_bytes'])}"


def _sweep(path: Path, records: list[dict[str, Any]]) -> str:
    configs = [record["config"] for record in records]
    fields = words.varying(configs)
    shown = [
        metric
        for metric in columns("results")
        if all(metric.name in record["metrics"] for record in records)
    ]
    rows = [
        [
            ", ".join(words.value(name, record["config"].get(name)) for name in fields),
            *(str(tables.metric_cell(metric, record["metrics"])) for metric in shown),
        ]
        for record in records
    ]
    first = records[0]
    versions = first["environment"]["versions"]
    said = [f"{name} {versions[name]}" for name in ("torch", "triton") if name in versions]
    days = sorted({record["time"][:10] for record in records if "time" in record})
    heads = ", ".join(words.HEADS[name] for name in fields)
    name = path.stem.partition(".")[2]
    return (
        f"### {name}\n\n{words.constants(configs[0], fields)}; {words.measured(configs[0])}; "
        f"{', '.join([*days[:1], *said])}; commit "
        f"`{first['environment']['git']['commit'][:7]}`; "
        f"[records](../../experiments/results/{path.name}).\n\n"
        + table([heads, *(metric.heading for metric in shown)], rows)
    )
