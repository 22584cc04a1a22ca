"""The dashboard of Grafana, the files around it and the page about them follow from the table of
exported metrics."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ringray.lab.trial.exported import EXPORTED
from tests.support import prometheus
from tests.support.place import REPOSITORY
from tests.support.prometheus import BOARD, expressions


def test_it_is_the_generated_one() -> None:
    code = "import dashboard; print(dashboard.text(), end='')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY / "cluster", capture_output=True, text=True
    )
    assert done.stdout == BOARD.read_text(), f"python cluster/dashboard.py {done.stderr}"


@pytest.mark.prometheus
def test_promtool_reads_every_expression(tmp_path: Path) -> None:
    def check(texts: list[str]) -> int:
        rules = [{"record": f"chart:{at}", "expr": text} for at, text in enumerate(texts)]
        file = tmp_path / "rules.yaml"
        file.write_text(yaml.safe_dump({"groups": [{"name": "charts", "rules": rules}]}))
        return subprocess.run(["promtool", "check", "rules", file], capture_output=True).returncode

    assert check(list(expressions().values())) == 0
    assert check(["max by (sweep (ray_ringray_trials)"]) != 0


@pytest.mark.prometheus
def test_promtool_reads_the_configuration() -> None:
    done = subprocess.run(
        ["promtool", "check", "config", prometheus.CONFIG], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_lists_the_metrics() -> None:
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    row = r"^\| `(ray_ringray_\w+)` \| (\w+) \| (.+?) \| (.+?) \| (.+?) \|$"
    rows = re.findall(row, page, re.MULTILINE)
    assert rows == [
        (one.series, "gauge", one.unit, f"`{one.label}`" if one.label else "–", one.help)
        for one in EXPORTED
    ]
