"""``limits.gpu_hours``: a sweep stops before the trial that would exceed it, and can go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ringray.lab import cli
from ringray.lab.store.store import Store, default_path
from tests.support.sweep_world import THREE, Rings, machine, stand_in

if TYPE_CHECKING:
    from pathlib import Path

LIMITED = f"{THREE}limits: {{gpu_hours: 0.001}}\n"  # 3.6 rank seconds


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A sweep of three trials, each of which takes a ring of two for a second."""
    stand_in(monkeypatch, machine())
    monkeypatch.setattr(Rings, "took_s", 1.0)
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "home"))
    path = tmp_path / "s.yaml"
    path.write_text(LIMITED)
    return str(path)


def test_it_stops_before_the_trial_and_goes_on_with_more(
    spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # a second time what the store has counts
        assert cli.main(["run", spec]) == 4
        out = capsys.readouterr().out
        assert "2 ok · 1 pending" in out
        assert "stopped: limits.gpu_hours is 0.001, 0.00111 are used and the next trial" in out
        assert "continue with: ringray resume s" in out
    assert cli.main(["status", "s"]) == 0
    assert "interrupted" in capsys.readouterr().out
    assert cli.main(["resume", "s", "--set", "limits.gpu_hours=0.002"]) == 0
    assert "3 ok" in capsys.readouterr().out
    assert cli.main(["resume", "s"]) == 0, "nothing is left to do"


def test_earlier_measurements_count(spec: str) -> None:
    limit = ["--set", "limits.gpu_hours=0.0025"]  # 9 rank seconds
    assert cli.main(["run", spec, *limit]) == 0
    assert cli.main(["run", spec, *limit, "--again"]) == 4
    with Store(default_path()) as store:
        assert len(store.history(store.find("s").digest)) == 2
