"""``ringray doctor``: what is there, what is missing, how to get it; and links of a cluster."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ringray.lab import cli
from ringray.lab.cli import doctor, links
from ringray.lab.predict.links import ClusterLinks
from ringray.lab.ring import links as survey
from tests.lab.predict.test_calibration import cluster

ROOT = Path(__file__).resolve().parents[3]


AT = ("--address", "10.0.0.2:6379")
TORCH = {"gpus": [], "gloo": None, "backends": {"triton": None, "aten": None}}
VERSIONS = {**doctor.TRIED, "torch": "2.13.0+cpu"}


@pytest.fixture(autouse=True)
def empty(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


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
    home: Path, tmp_path: Path, doctors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "file"))
    code, out = doctors()
    assert code == 1
    assert re.search(r"missing home .*set RINGRAY_HOME", out)
    home.mkdir()
    home.chmod(0o777)
    monkeypatch.setenv("RINGRAY_HOME", str(home))
    code, out = doctors()
    assert code == 0
    assert f"chmod go-w {home}" in out
    assert list(home.iterdir()) == []


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


# The links of a cluster


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the cluster one that has such links."""

    def find(found: ClusterLinks) -> None:
        monkeypatch.setattr(links, "connect", lambda address: nullcontext())
        monkeypatch.setattr(survey, "measure", lambda say: found)

    return find


def test_the_matrix_has_bandwidth_above_and_latency_below(
    finds: Any, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finds(cluster(3, {(0, 1): {"bandwidth": 95e6}, (1, 2): {"latency": 2e-4}}))
    assert cli.main(["doctor", "--cluster", *AT]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["1", "10.0.0.2", "–", "0.0950", "1.20"] in rows
    assert ["2", "10.0.0.3", "0.100", "–", "1.20"] in rows
    assert ["3", "10.0.0.4", "0.100", "0.200", "–"] in rows
    assert out.startswith("GB/s each way above the diagonal, latency in ms below it\n")
    assert "10.0.0.2 ↔ 10.0.0.3: 95.0 MB/s, the median is 1.20 GB/s" in out
    (file,) = (home / "hardware").iterdir()
    assert f"kept in {file}" in out
    finds(cluster(3, {(0, 1): {"error": "no messages pass: timed out"}}))
    assert cli.main(["doctor", "--cluster", *AT]) == 1
    assert "10.0.0.2 ↔ 10.0.0.3: no messages pass: timed out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--cluster"], "--cluster: expected a running Ray beside it: --address HOST:PORT"),
        (["--cluster", "--address", "local"], "--cluster: expected a running Ray"),
        (["--cluster", "--address", "127.0.0.1:1"], "no Ray answers at 127.0.0.1:1"),
        (["--json", "x"], "--json: got 'x', expected beside --cluster only"),
    ],
)
def test_what_cannot_be_is_refused(
    options: list[str], says: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *options]) == 2
    assert says in capsys.readouterr().err
    assert not (home / "hardware").exists()
