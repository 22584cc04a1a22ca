"""Records under experiments/results: linked, and made by a command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from experiments import record
from tests.support.records import FOLDER, PAPER, ROOT, gpu_lines, rows

PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / PAPER]


def links() -> set[str]:
    names = set()
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#]*results/[\w.-]+\.jsonl?)\)", path.read_text()):
            assert (path.parent / target).resolve().parent == FOLDER, (path, target)
            names.add(Path(target).name)
    return names


def test_records_are_linked_and_links_have_records() -> None:
    assert links() == {path.name for path in FOLDER.iterdir()}


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_a_record_says_how_and_where_it_was_made(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert "/tmp/" not in text
    assert "/home/" not in text
    if name.startswith("gpu-"):  # whose command is `make gpu`
        for line in gpu_lines(name):
            assert line["environment"]["device"].startswith("NVIDIA")
            assert line["environment"]["torch"]
            assert re.fullmatch(r"[0-9a-f]{40}", line["environment"]["commit"])
        return
    if name.endswith(".jsonl"):  # whose command is `ringray run` with the spec of its name
        spec = name.split(".")[-2]
        assert (ROOT / "experiments" / f"{spec}.yaml").exists()
        heads = [row["environment"] for row in rows(name)]
    else:
        heads = [json.loads(text)]
        (words,) = [head["command"].split() for head in heads]
        assert words[0] in ("python", "ringray")
        for word in words[1:]:
            assert "/" not in word or (ROOT / word).exists(), word
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", heads[0]["date"])
        assert rows(name)
    for head in heads:
        assert head["hardware"]["cpu"]
        assert head["versions"]["torch"]
        assert re.fullmatch(r"[0-9a-f]{40}", head["git"]["commit"])


def trial(status: str, error: float, **config: object) -> dict[str, Any]:
    metrics = {"error_out": error, "error_dq": 0.1, "median_ms": 7.0}
    return {"config": config, "status": status, "reason": None, "metrics": metrics}


def test_a_record_keeps_the_worst_of_measured_trials_and_what_differs() -> None:
    trials = [
        trial("ok", 0.25, dtype="a", size=1, same=0),
        trial("ok", 0.5, dtype="a", size=2, same=0),
        trial("pruned", 9.0, dtype="a", size=3, same=0),
        trial("ok", 0.75, dtype="b", size=1, same=0),
    ]
    assert record.rows(trials, ["dtype"], ["error_out"]) == [
        {"dtype": "a", "trials": 2, "status": "ok", "error_out": 0.5},
        {"dtype": "b", "trials": 1, "status": "ok", "error_out": 0.75},
    ]
    assert [row["size"] for row in record.rows(trials, [], [""])] == [1, 2, 3, 1]
    assert "same" not in record.rows(trials, [], [""])[0]
