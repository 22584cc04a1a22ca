"""``ringray doctor``: what is there, what is missing, and how to get it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ringray.lab import cli
from ringray.lab.cli import doctor

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "home"))


TORCH = {"gpus": [], "gloo": None, "backends": {"triton": None, "aten": None}}
VERSIONS = {**doctor.TRIED, "torch": "2.13.0+cpu"}


@pytest.fixture
def doctors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command where torch tells such things, and such versions are installed."""

    def call(torch: Any = None, versions: Any = None) -> tuple[int, str]:
        monkeypatch.setattr(doctor, "probe", lambda: {**TORCH, **(torch or {})})
        installed = {**VERSIONS, **(versions or {})}
        monkeypatch.setattr(doctor.provenance, "versions", lambda: installed)
        return cli.main(["doctor"]), capsys.readouterr().out

    return call


@pytest.mark.parametrize(
    ("torch", "versions", "line"),
    [
        ({"error": "ImportError: gone"}, {}, "missing torch     ImportError: gone; pip install"),
        ({}, {"torch": "2.4.0"}, "missing torch     2.4.0 is too old, expected 2.11 or newer"),
        ({}, {"ray": None}, "missing ray       not installed; pip install"),
        ({"gloo": "no route"}, {}, "missing gloo      no route; "),
    ],
)
def test_doctor_names_what_is_missing_and_the_way_out(
    torch: Any, versions: Any, line: str, doctors: Any
) -> None:
    code, out = doctors(torch, versions)
    assert code == 1
    assert line in out


def test_a_cluster_that_does_not_answer_is_missing(
    doctors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    code, out = doctors()
    assert code == 1
    assert "missing cluster   no Ray answers at 127.0.0.1:1" in out


def test_torch_is_probed_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    report = doctor.probe()
    assert report["gloo"] is None
    assert report["backends"]["reference"] is None
    assert report["backends"]["triton"] is None
    assert report.get("interpreted", False) == (not report["gpus"])
    assert report["auto"] == ("triton" if report["gpus"] else "aten")
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    assert doctor.probe() == {"error": "exit code 1"}


def test_a_home_is_private_and_can_be_written(
    tmp_path: Path, doctors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "file"))
    code, out = doctors()
    assert code == 1
    assert re.search(r"missing home .*set RINGRAY_HOME", out)
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o777)
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "home"))
    code, out = doctors()
    assert code == 0
    assert f"chmod go-w {tmp_path / 'home'}" in out
    assert list((tmp_path / "home").iterdir()) == []


def test_doctor_knows_the_versions_that_are_installed_together() -> None:
    pinned = dict(
        re.findall(
            r"^(ray|mlflow|torch|triton)[=<]=([\w.]+)", (ROOT / "constraints.txt").read_text(), re.M
        )
    )
    assert pinned == doctor.TRIED
    project = (ROOT / "pyproject.toml").read_text()
    for name, least in doctor.LEAST.items():
        assert f'"{name}>={".".join(map(str, least))}' in project
