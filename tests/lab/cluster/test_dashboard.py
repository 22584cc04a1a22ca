"""The dashboard of Grafana follows from the table of exported metrics, and Prometheus reads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

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
