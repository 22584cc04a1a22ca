"""The dashboard of Grafana, the files around it and the page about them follow from the table of
exported metrics."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from ringray.lab.trial.exported import EXPORTED
from tests.support import prometheus
from tests.support.place import REPOSITORY
from tests.support.prometheus import BOARD, expressions

GRAFANA = REPOSITORY / "cluster" / "grafana"


def board() -> dict[str, Any]:
    return json.loads(BOARD.read_text())


def test_it_is_the_generated_one() -> None:
    code = "import dashboard; print(dashboard.text(), end='')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY / "cluster", capture_output=True, text=True
    )
    assert done.stdout == BOARD.read_text(), f"python cluster/dashboard.py {done.stderr}"


def test_every_metric_has_a_chart() -> None:
    panels = board()["panels"]
    assert len({one["id"] for one in panels}) == len({one["title"] for one in panels})
    assert len(panels) == len(EXPORTED)
    shown = set(re.findall(r"ray_ringray_\w+", " ".join(expressions().values())))
    assert shown == {one.series for one in EXPORTED}
    places = [(at["x"], at["y"]) for at in (one["gridPos"] for one in panels)]
    assert len(set(places)) == len(places)
    named = {one["name"] for one in board()["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) == named


@prometheus.needed
def test_promtool_reads_every_expression(tmp_path: Path) -> None:
    def check(texts: list[str]) -> int:
        rules = [{"record": f"chart:{at}", "expr": text} for at, text in enumerate(texts)]
        file = tmp_path / "rules.yaml"
        file.write_text(yaml.safe_dump({"groups": [{"name": "charts", "rules": rules}]}))
        return subprocess.run(["promtool", "check", "rules", file], capture_output=True).returncode

    assert check(list(expressions().values())) == 0
    assert check(["max by (sweep (ray_ringray_trials)"]) != 0


@prometheus.needed
def test_promtool_reads_the_configuration() -> None:
    done = subprocess.run(
        ["promtool", "check", "config", prometheus.CONFIG], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_finds_the_dashboard_and_prometheus() -> None:
    (source,) = yaml.safe_load((GRAFANA / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    (variable,) = [one for one in board()["templating"]["list"] if one["type"] == "datasource"]
    assert source["type"] == variable["query"]
    assert source["url"].startswith("http://127.0.0.1:")
    (provider,) = yaml.safe_load((GRAFANA / "dashboards" / "ringray.yaml").read_text())["providers"]
    place = provider["options"]["path"].replace("$GF_PATHS_PROVISIONING", str(GRAFANA))
    assert Path(place) == BOARD.parent


def test_the_page_lists_the_metrics() -> None:
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    row = r"^\| `(ray_ringray_\w+)` \| (\w+) \| (.+?) \| (.+?) \| (.+?) \|$"
    rows = re.findall(row, page, re.MULTILINE)
    assert rows == [
        (one.series, one.type, one.unit, f"`{one.label}`" if one.label else "–", one.help)
        for one in EXPORTED
    ]
