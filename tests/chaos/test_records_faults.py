"""Real sweeps whose disk fills, whose driver dies between two writes, whose store is lost."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ringray.lab.store.store import Store
from tests.chaos.struck import faults
from tests.support import place as drive
from tests.support.exhaustive import exhaustive
from tests.support.place import Place, tiny

pytestmark = pytest.mark.chaos

REPLICAS = 30


def check_measured(rows: list[Any], count: int) -> None:
    """Each trial ended well, and was tried again only after a fault that it recorded."""
    assert [row.status for row in rows] == ["ok"] * count
    assert [row.attempts for row in rows] == [1 + len(faults(row)) for row in rows]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _configs(lines: list[dict[str, Any]]) -> list[int]:
    return sorted(line["config"]["replica"] for line in lines)


@pytest.mark.parametrize("full", ["store", *exhaustive("json")])
def test_a_disk_that_fills_in_the_middle(place: Place, small_disk: Path, full: str) -> None:
    store = small_disk / "store.db" if full == "store" else place.home / "store.db"
    json = small_disk / "a.jsonl" if full == "json" else place.home / "a.jsonl"
    spec = place.spec(tiny("filling", replicas=REPLICAS, repeats=100))
    options = ("--store", store, "--json", json)
    driver = place.start("run", spec, *options)
    drive.wait_until(
        "some trials", lambda: len(place.lines(json)) >= 3 or driver.poll() is not None
    )
    with suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
    done = place.end(driver)
    assert done.code == 2, done.out + done.err
    assert "Traceback" not in done.err
    assert "free some space" in done.err
    assert "resume" in done.err
    # Still full: said at once, and nothing is harmed.
    again = place.run("resume", "filling", *options)
    assert again.code == 2, again.out + again.err
    assert "Traceback" not in again.err
    (small_disk / "filler").unlink()
    with Store(store, create=False) as opened:
        opened.check()
        before = [row for row in opened.trials(opened.find("filling").digest) if row.status]
    assert 3 <= len(before) < REPLICAS
    resumed = place.run("resume", "filling", *options)
    assert resumed.code == 0, resumed.err
    with Store(store, create=False) as opened:
        rows = opened.trials(opened.find("filling").digest)
    check_measured(rows, REPLICAS)
    known = {row.key: row for row in rows}
    assert all(known[row.key] == row for row in before)
    assert _configs(place.lines(json)) == list(range(REPLICAS))
    assert len(json.read_text().splitlines()) == REPLICAS
    (parent,), children = place.mlflow("filling")
    assert parent.info.status == "FINISHED"
    assert len(children) == REPLICAS


_DIES_BETWEEN = """if True:
    import os, signal, sys
    from ringray.lab import cli
    from ringray.lab.driver.json_lines import JsonLines
    write = JsonLines._write
    written = []
    def dies(self, lines):
        written.extend(lines)
        if len(written) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, lines)
    JsonLines._write = dies
    sys.exit(cli.main(sys.argv[1:]))
    """


def test_a_line_that_a_kill_kept_away_is_written(place: Place) -> None:
    spec, json = place.spec(tiny("between", replicas=12)), place.home / "a.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", _DIES_BETWEEN, "run", str(spec), "--json", str(json)],
        env=place.environment, cwd=place.home, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(place.lines(json)) == 4
    before = [row for row in place.trials("between") if row.status == "ok"]
    assert len(before) == 5
    resumed = place.run("resume", "between", "--json", json)
    assert resumed.code == 0, resumed.err
    assert "5 trials measured before" in resumed.out
    assert _configs(place.lines(json)) == list(range(12))
    rows = place.trials("between")
    check_measured(rows, 12)
    known = {row.key: row for row in rows}
    assert all(known[row.key] == row for row in before), "measured again"


def test_a_store_that_is_lost_is_taken_back_from_mlflow(place: Place) -> None:
    """Once its driver was killed, which leaves nothing behind."""
    spec, json = place.spec(tiny("lost", replicas=REPLICAS, repeats=50)), place.home / "a.jsonl"
    driver = place.start("run", spec, "--json", json)
    drive.wait_until("trials", lambda: len(place.lines(json)) >= 5 or driver.poll() is not None)
    driver.send_signal(signal.SIGKILL)
    place.end(driver)
    # Ray's agents take 60 s to believe that their GCS is dead; ranks and tracker must not.
    place.check_nothing_is_left(but=("ray::DashboardAgent", "ray::RuntimeEnvAgent"))
    before = {row.key: row for row in place.trials("lost") if row.status}
    (parent,), children = place.mlflow("lost")
    assert (parent.info.status, len(children)) == ("KILLED", len(before))
    assert 5 <= len(before) < REPLICAS
    for path in place.home.glob("store.db*"):
        path.unlink()
    nothing = place.run("resume", "quack", "--from-mlflow")
    assert nothing.code == 2
    assert "there is no sweep 'quack' in MLflow" in nothing.err
    done = place.run("resume", "lost", "--from-mlflow", "--json", json)
    assert done.code == 0, done.err
    assert f"{len(before)} trials taken from MLflow" in done.out
    assert f"{len(before)} trials measured before" in done.out
    rows = place.trials("lost")
    check_measured(rows, REPLICAS)
    assert {row.key: row for row in rows if row.key in before} == before
    assert _configs(place.lines(json)) == list(range(REPLICAS))
    (parent,), children = place.mlflow("lost")
    assert (parent.info.status, len(children)) == ("FINISHED", REPLICAS)
