"""``ringray doctor``: what is there, what is missing, and how to get it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ringray.lab import cli
from ringray.lab.cli import doctor, probe

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "home"))


def _found(**changes: Any) -> Callable[..., dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        "torch": {"version": "2.13.0+cpu", "gpus": [], "gloo": None, "backends": {"aten": None}},
        "ray": {"version": "2.60.0"},
        "mlflow": {"version": "3.17.2"},
        "cluster": {"nodes": 4, "cpus": 32.0, "gpus": 4.0},
        **changes,
    }
    return lambda *what: found[what[0]]


def test_doctor_is_content_where_the_quickstart_can_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "probe", _found())
    assert cli.main(["doctor", "--address", "head:6379"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[:-2]} <= {"ok", "note"}
    assert "ok      torch     2.13.0+cpu" in lines
    assert any(
        re.match(r"ok +cluster +head:6379: 4 nodes, 32 CPUs, 4 GPUs", line) for line in lines
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"torch": {"error": "ImportError: gone"}},
            "missing torch     ImportError: gone; pip install",
        ),
        (
            {"torch": {"version": "2.4.0", "gpus": [], "gloo": None, "backends": {}}},
            "missing torch     2.4.0 is too old, expected 2.11 or newer",
        ),
        (
            {"torch": {"version": "2.13.0", "gpus": [], "gloo": "no route", "backends": {}}},
            "missing gloo      no route; ",
        ),
    ],
)
def test_doctor_names_what_is_missing_and_the_way_out(
    changes: dict[str, Any],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "probe", _found(**changes))
    assert cli.main(["doctor"]) == 1
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {"interpreted": True, "auto": "aten"},
            [
                "ok      backends  aten; auto is aten",
                "note    backends  triton: only in its interpreter, for small sizes (its kernels",
            ],
        ),
        ({"gpus": ["NVIDIA H100"], "auto": "triton"}, ["backends  triton, aten; auto is triton"]),
        (
            {"gpus": ["NVIDIA H100"], "interpreted": True, "auto": "triton"},
            ["triton: only in its interpreter, for small sizes (TRITON_INTERPRET is set)"],
        ),
    ],
)
def test_doctor_tells_compiled_kernels_from_interpreted_ones(
    changes: dict[str, Any],
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    backends = {"triton": None, "aten": None}
    torch = {"version": "2.13.0", "gpus": [], "gloo": None, "backends": backends, **changes}
    monkeypatch.setattr(doctor, "probe", _found(torch=torch))
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for line in lines:
        assert line in out


def test_packages_are_probed_in_a_process_of_their_own() -> None:
    assert "No module named 'no_such_package'" in doctor.probe("no_such_package")["error"]
    report = probe.torch_()
    assert report["gloo"] is None
    assert report["backends"]["reference"] is None
    assert report["backends"]["triton"] is None
    assert report.get("interpreted", False) == (not report["gpus"])
    assert report["auto"] == ("triton" if report["gpus"] else "aten")


def test_a_home_is_private_and_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(doctor, "probe", _found())
    assert cli.main(["doctor"]) == 1
    assert re.search(r"missing home .*set RINGRAY_HOME", capsys.readouterr().out)
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o777)
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "home"))
    assert cli.main(["doctor"]) == 0
    assert f"chmod go-w {tmp_path / 'home'}" in capsys.readouterr().out
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


def test_doctor_tells_no_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "ConnectionError: http://me:hush-hush@h refused feedfacefeedface"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "feedfacefeedface")
    monkeypatch.setattr(doctor, "_findings", lambda _: [doctor.Finding("note", "cluster", said)])
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "ConnectionError" in out
    assert "hush" not in out
    assert "feedface" not in out
