"""Surroundings that few users have: streams, encodings, homes and paths that do not work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringray.lab import cli
from ringray.lab.store.store import Store
from tests.support.place import tiny
from tests.support.tracking_store import begin, trials

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = str(ROOT / "experiments" / "quickstart.yaml")
NOBODY = 54321  # a user without an entry in passwd


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a store that has one sweep."""
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path))
    with Store(tmp_path / "store.db") as store:
        begin(store, trials(2))
    return tmp_path


def shell(line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``ringray LINE`` in a shell, which reads redirections."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    given = {name: value for name, value in environment.items() if value != "unset"}
    return subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m ringray {line}"],
        capture_output=True, text=True, errors="surrogateescape", env=given,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def check_one_line(done: subprocess.CompletedProcess[str], says: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("ringray: error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert says in done.stderr


@pytest.mark.parametrize("line", [f"plan {QUICKSTART}", "status quick"])
def test_a_terminal_without_our_characters(home: Path, line: str) -> None:
    done = shell(line, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert done.stderr == ""


def test_an_error_that_a_terminal_cannot_show(home: Path) -> None:
    check_one_line(shell("status pröbe", PYTHONIOENCODING="ascii"), "quick")


def test_a_full_stdout(home: Path) -> None:
    check_one_line(
        shell("list >/dev/full"), "stdout, or a file cannot be used: no space left on device"
    )
    assert shell("status nothing 2>/dev/full").returncode == 2
    assert shell("list >/dev/full 2>&1").returncode == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_without_a_home(home: Path) -> None:
    # As root, which may read the interpreter, until all is imported.
    code = (
        "import os; from ringray.lab.cli import entry, store; import sys; "
        f"os.setuid({NOBODY}); sys.argv = ['ringray', 'list']; entry()"
    )
    done = subprocess.run(
        ["env", "-u", "HOME", "-u", "RINGRAY_HOME", sys.executable, "-c", code],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    check_one_line(done, f"the home folder of user {NOBODY} is not known; set RINGRAY_HOME")
    check_one_line(shell("list", RINGRAY_HOME="~none-such/x"), "set RINGRAY_HOME")


@pytest.mark.parametrize("command", ["run", "submit"])
def test_a_token_that_no_header_can_hold(
    home: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, token = home / "tiny.yaml", "x\r\nX-Header: y"
    spec.write_text(tiny("tiny"))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    place = "127.0.0.1:9" if command == "run" else "http://127.0.0.1:9"
    assert cli.main([command, str(spec), "--address", place]) == 2
    text = capsys.readouterr().err
    assert "RAY_AUTH_TOKEN: " in text
    assert token not in text
