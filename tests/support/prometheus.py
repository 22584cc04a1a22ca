"""A real Prometheus, if this machine has one, and what the dashboard asks it."""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import place as drive
from tests.support.place import REPOSITORY
from tests.support.ray_heads import free_ports

CONFIG = REPOSITORY / "cluster" / "prometheus.yaml"
BOARD = REPOSITORY / "cluster" / "grafana" / "dashboards" / "ringray.json"
needed = pytest.mark.prometheus


def expressions() -> dict[str, str]:
    """The PromQL of the dashboard's charts by their titles."""
    panels = json.loads(BOARD.read_text())["panels"]
    return {one["title"]: target["expr"] for one in panels for target in one["targets"]}


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str

    def ask(self, path: str, **arguments: object) -> Any:
        """Returns what the HTTP API answers."""
        query = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as answer:
            return json.load(answer)["data"]

    def now(self, expression: str) -> list[dict[str, Any]]:
        """Returns the series that an expression has at present, with their values."""
        return self.ask("query", query=expression)["result"]

    def history(self, expression: str, seconds: int = 900) -> list[dict[str, Any]]:
        """Returns the series that an expression had in the last ``seconds``, as a chart does."""
        end = float(self.ask("query", query="time()")["result"][1])
        span = {"start": end - seconds, "end": end, "step": 1}
        return self.ask("query_range", query=expression, **span)["result"]


@contextmanager
def running(folder: Path, discovery: Path) -> Iterator[Prometheus]:
    """The Prometheus of cluster/prometheus.yaml on a private port, which looks every second, for
    what Ray says in the file ``discovery``."""
    (port,) = free_ports(1)
    config = yaml.safe_load(CONFIG.read_text())
    config["global"]["scrape_interval"] = "1s"
    (job,) = config["scrape_configs"]
    (files,) = job["file_sd_configs"]
    files["files"] = [str(discovery)]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with (folder / "prometheus.log").open("wb") as log:
        server = subprocess.Popen(
            [
                "prometheus", f"--config.file={folder}/prometheus.yaml",
                f"--storage.tsdb.path={folder}/tsdb", f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder,
        )  # fmt: skip
    found = Prometheus(f"http://127.0.0.1:{port}")

    def ready() -> bool:
        with suppress(OSError):
            return bool(found.ask("status/runtimeinfo"))
        return False

    try:
        drive.wait_until("Prometheus answers", ready)
        yield found
    finally:
        server.terminate()
        server.wait()
