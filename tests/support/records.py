"""The records under experiments/results, and the pages that say what is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "experiments" / "results"
CPU = "cpu-amd-epyc-2-cores"
PAPER = "experiments/paper/README.md"
MIB = 1 << 20


def page(name: str) -> str:
    """Returns the text of a page as one line."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def rows(name: str) -> list[Any]:
    """Returns the rows of a record."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines()]
    return list(json.loads(text)["rows"])


def gpu_lines(name: str) -> list[dict[str, Any]]:
    """Returns the lines of a kernel benchmark that have a case."""
    return [line for line in rows(name) if "case" in line]
