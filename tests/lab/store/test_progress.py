"""Curves of running trainings, between the driver and the tracking process."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from ringray.lab.store import progress
from ringray.lab.store.progress import CurvePoint

if TYPE_CHECKING:
    from pathlib import Path

SWEEP = "0123456789ab" * 5


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "home"))
    return progress.path_of(SWEEP)


def test_points_are_read_once_in_their_order(path: Path) -> None:
    assert progress.told(path, 0) == ([], 0)
    progress.tell(path, 0, 1, {"loss": 5.0, "gradient_norm": 0.5})
    first, at = progress.told(path, 0)
    assert first == [CurvePoint(0, "loss", 1, 5.0), CurvePoint(0, "gradient_norm", 1, 0.5)]
    assert progress.told(path, at) == ([], at)
    progress.tell(path, 3, 2, {"loss": math.inf})
    assert progress.told(path, at)[0] == [CurvePoint(3, "loss", 2, math.inf)]
    assert not path.parent.stat().st_mode & 0o077
    progress.clear(SWEEP)
    assert progress.told(path, at) == ([], 0)
    progress.clear(SWEEP)


def test_a_line_that_was_cut_short_costs_itself_alone(path: Path) -> None:
    progress.tell(path, 0, 1, {"loss": 5.0})
    with path.open("a") as file:
        file.write('[0, "loss", 2')
    found, at = progress.told(path, 0)
    assert [one.step for one in found] == [1]
    with path.open("a") as file:  # a full disk took the rest
        file.write('[0, "loss", 3, 4.0]\n')
    progress.tell(path, 0, 4, {"loss": 3.0})
    assert [one.step for one in progress.told(path, at)[0]] == [4]


def test_a_home_that_cannot_be_written_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "file"))
    progress.clear(SWEEP)
    with pytest.raises(OSError):
        progress.tell(progress.path_of(SWEEP), 0, 1, {"loss": 5.0})
    assert progress.told(progress.path_of(SWEEP), 0) == ([], 0)
