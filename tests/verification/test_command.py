"""``ringray verify``: its exit codes, what it prints and writes, and its end by a signal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ringray.lab import cli
from ringray.verification import defaults, target
from ringray.verification.probes import PROBES
from ringray.verification.target import ADAPTERS
from ringray.verification.verdict import MISTAKES
from tests.support.place import REPOSITORY, Place, lives, wait_until

ODD = "tests.support.odd_targets"


def test_a_right_target_exits_with_0_and_is_told_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    line = ["verify", f"{ODD}:refuses_documents", "--probe", "logits", "--probe", "documents"]
    assert cli.main([*line, "--json", "-", "-o", str(page)]) == 0
    out, err = capsys.readouterr()
    assert not err  # no progress where there is no terminal
    verdict = json.loads(out)
    assert out.count("\n") == 1
    assert verdict.pop("seconds") > 0
    assert verdict == {
        "target": f"{ODD}:refuses_documents",
        "adapter": "ring",
        "ranks": 2,
        "probes": {"logits": "right", "documents": "skipped: ValueError: takes no documents"},
        "findings": [],
        "notes": [defaults._NO_LOSS],
        "right": True,
    }
    text = page.read_text()
    HTMLParser().feed(text)
    for expected in (
        "refuses_documents on 2 ranks, by ring: right",
        "takes no documents",
        "no loss",
    ):
        assert expected in text
    assert "Findings" not in text
    assert "prefers-color-scheme: dark" in text


def test_a_wrong_target_exits_with_1_and_says_where_and_what_to_look_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, data = tmp_path / "page.html", tmp_path / "verdict.json"
    line = ["verify", f"{ODD}:scaled_on_rank_1", "--probe", "logits", "--limit", "5m"]
    assert cli.main([*line, "-o", str(page), "--json", str(data)]) == 1
    first, *lines = capsys.readouterr().out.splitlines()
    (finding,) = json.loads(data.read_text())["findings"]
    assert first == f"{ODD}:scaled_on_rank_1 on 2 ranks, by ring: WRONG: {finding['mistake']}"
    assert "  logits  wrong" in lines
    (sentence,) = [x for x in lines if x.startswith("logits (")]
    assert sentence.startswith(f"logits (rank 1, layer qkv, token {finding['token']}): ")
    assert any(x.startswith("  look at ") for x in lines)
    assert finding["sentence"] in sentence
    assert "Findings" in page.read_text()


def test_a_target_that_cannot_run_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (["nowhere.py"], [ODD, "--ranks", "1"], [ODD, "--limit", "0s"], []):
        assert cli.main(["verify", *line]) == 2
        assert capsys.readouterr().err.startswith("ringray: error: ")


def test_the_page_names_all_that_there_is() -> None:
    text = (REPOSITORY / "docs" / "verify.md").read_text()
    names = [*PROBES, *ADAPTERS, *MISTAKES, *target.FUNCTIONS, *target.CONSTANTS]
    names += defaults._SYNONYMS
    assert [name for name in names if not re.search(rf"\| .*`{name}\b.* \|", text)] == []


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from ringray.lab.cli import main; main(['verify', '--help'])\n"
        "print(*{'torch', 'numpy', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 130),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_all_processes(place: Place, number: int, code: int) -> None:
    temporary, hanging = place.home / "temporary", place.home / "hanging"
    temporary.mkdir()
    hanging.mkdir()
    place.variables |= {"TMPDIR": str(temporary), "ODD_TARGETS": str(hanging)}
    command = place.start("verify", f"{ODD}:hangs_in_build")
    wait_until("all hang", lambda: len(list(hanging.iterdir())) == 3)
    os.kill(command.pid, number)
    assert place.end(command).code == code
    pids = [int(x.name) for x in hanging.iterdir()]
    wait_until("the ranks have ended", lambda: not any(map(lives, pids)))
    wait_until("the folder is removed", lambda: not list(temporary.iterdir()))
