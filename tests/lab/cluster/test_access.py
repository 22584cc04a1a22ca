"""A Ray that refuses a connection, and an own one that does not start: tries, words and logs."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringray.base import locks
from ringray.base.errors import ClusterError, PlaceError
from ringray.lab.cluster import access, connect, embedded
from ringray.lab.cluster.embedded import TRIES, Servers
from tests.test_architecture import imports, modules

ROOT = Path(__file__).resolve().parents[3]


def test_a_token_that_is_given_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", *access.TOKENS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    access.use_given_token()
    assert "RAY_AUTH_MODE" not in os.environ
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    access.use_given_token()
    assert os.environ["RAY_AUTH_MODE"] == "token"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    access.use_given_token()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_what_the_plain_command_sends(tmp_path: Path) -> None:
    """`ray job submit --working-dir .` takes the folder as it lies there."""
    import zipfile

    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import create_package

    folder = tmp_path / "checkout"
    wanted = {
        "ringray/lab/ring/group.py", "kernels/ringray_kernels/api.py", "cluster/runtime_env.yaml",
        "experiments/quickstart.yaml", "ringray/partition/zigzag_token.py",
    }  # fmt: skip
    others = {
        ".git/objects/ab/cd", ".venv/lib/torch.so", ".env", "experiments/results/a.jsonl",
        "ringray/__pycache__/ring.pyc", "mlflow.db", "deploy.pem", "id_ed25519", "auth_token",
        "credentials.json", "secrets.yaml", "other.db-wal",
    }  # fmt: skip
    for name in wanted | others:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    for name in (".gitignore", ".rayignore"):
        (folder / name).write_text((ROOT / name).read_text())
    package = tmp_path / "package.zip"
    create_package(
        str(folder), package, include_gitignore=True, excludes=get_runtime_env_default_excludes()
    )
    with zipfile.ZipFile(package) as made:
        sent = {name for name in made.namelist() if not name.endswith("/")}
    assert sent - {".gitignore", ".rayignore"} == wanted


@pytest.mark.parametrize("token", [None, "two words", "ümlaut"])
def test_a_token_that_ray_would_end_the_process_for_is_refused(
    token: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    if token is not None:
        path.write_text(token)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    with pytest.raises(PlaceError, match=r"RAY_AUTH_TOKEN_PATH: .*(cannot be read|no character)"):
        access.check_token()
    path.write_text("0123abc\n")
    access.check_token()


def test_the_logs_of_the_last_failures_are_kept(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    servers = Servers(locks.Folder(tmp_path, tmp_path / "note.json"))
    assert servers.reason("no answer in 3 s") == "no answer in 3 s"
    folder = servers.root / "session_latest" / "logs"
    folder.mkdir(parents=True)
    (folder / "raylet.err").write_text("late")
    for day in range(8):
        (home / "logs" / f"ray-2025010{day}-000000-1").mkdir(parents=True)
    reason, _, logs = servers.reason("no answer in 3 s").partition("; Ray's logs are in ")
    assert reason == "no answer in 3 s"
    assert Path(logs, "raylet.err").read_text() == "late"
    assert len(list((home / "logs").iterdir())) == embedded.LOGS


@pytest.mark.parametrize("failures", [1, TRIES])
def test_a_start_that_fails_is_tried_again(
    failures: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While there is time; each try has what is left of it."""
    seconds: list[float] = []

    @contextlib.contextmanager
    def once(left: float) -> Iterator[str]:
        seconds.append(left)
        if len(seconds) <= failures:
            raise ClusterError("a local Ray cannot start: so it is")
        yield "servers"

    monkeypatch.setattr(embedded, "_once", once)
    with contextlib.ExitStack() as stack:
        stack.enter_context(connect._variables())
        if failures == TRIES:
            with pytest.raises(ClusterError, match="so it is"):
                stack.enter_context(embedded.started())
        else:
            assert str(stack.enter_context(embedded.started())) == "servers"
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] <= embedded.START_S
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == len(seconds) - 1 == min(failures, TRIES - 1)
    assert all(line.endswith("so it is; starting it again") for line in notes)


# Ray's private API is used in one file

PRIVATE = re.compile(r"ray\.(.+\.)?_\w+(\..*)?|ray\.core\.generated(\..*)?")
# Its only class is a subclass of a private one, which Ray's autoscaler loads by its path.
SUBCLASS = "local_nodes.py"


def test_other_modules_import_no_private_module_of_ray() -> None:
    private = {name for name in modules() if any(map(PRIVATE.fullmatch, imports(name)))}
    assert private == {"ringray.lab.cluster.ray_private"}


def test_scripts_for_clusters_import_no_private_module_of_ray() -> None:
    for path in ROOT.glob("cluster/*.py"):
        lines = re.findall(r"^\s*(?:import|from) (\S+)", path.read_text(), re.M)
        private = [name for name in lines if PRIVATE.fullmatch(name)]
        assert not private or path.name == SUBCLASS, path


def test_a_start_that_holds_the_interpreter_ends_the_process(tmp_path: Path) -> None:
    """As Ray's, whose raylet gives no answer: no deadline in Python can end that."""
    code = """
import ctypes, ray
from ringray.lab.cluster import embedded
embedded.START_S = embedded.LOCKED_S = 0.5
ray.init = lambda **_: ctypes.PyDLL(None).sleep(300)
with embedded.started():
    pass
"""
    environment = {**os.environ, "RINGRAY_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith("Timeout (0:00:0")
    assert "embedded.py" in done.stderr
