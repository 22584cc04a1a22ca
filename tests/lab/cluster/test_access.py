"""Messages when a Ray cluster refuses a connection; tests/chaos/test_jobs.py has real clusters."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from ringray.base.errors import PlaceError
from ringray.lab.cluster import access, connect

ROOT = Path(__file__).resolve().parents[3]


def test_versions_that_differ_are_one_line() -> None:
    from ray._private.utils import check_version_info

    with pytest.raises(RuntimeError) as caught:
        check_version_info({"ray_version": "2.9.0", "python_version": "3.10.1"}, "node 10.0.0.1")
    said = access.reason(caught.value)
    assert said.startswith("it runs Ray 2.9.0 on Python 3.10.1, this is Ray ")
    assert "`ringray submit`" in said
    assert "\n" not in said
    assert access.reason(RuntimeError("no such node")) == "no such node"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"RAY_AUTH_TOKEN": "x"}, "that of RAY_AUTH_TOKEN;"),
        ({"RAY_AUTH_TOKEN_PATH": "/x"}, "that of RAY_AUTH_TOKEN_PATH;"),
        ({}, "that of ~/.ray/auth_token;"),
    ],
)
def test_a_refused_token_is_named(
    given: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in access.TOKENS:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RAY_AUTH_MODE": "token", **given}.items():
        monkeypatch.setenv(name, value)
    assert named in access.refused_token("head:6379")
    monkeypatch.delenv("RAY_AUTH_MODE")
    assert "RAY_AUTH_MODE is not set" in access.refused_token("head:6379")


def test_a_token_that_is_given_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

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


def test_what_answers_may_be_no_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            one, _ = server.accept()
            with one:
                one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        port = server.getsockname()[1]
        with pytest.raises(PlaceError, match=f"the server at 127.0.0.1:{port} is not Ray"):
            access.check(f"127.0.0.1:{port}")


def test_a_dashboard_is_for_jobs() -> None:
    with (
        pytest.raises(PlaceError, match="is a dashboard, which `ringray submit` takes"),
        connect.connect("http://head:8265"),
    ):
        pass


def test_what_the_plain_command_sends(tmp_path: Path) -> None:
    """`ray job submit --working-dir .` takes the folder as it lies there."""
    import zipfile

    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import create_package

    folder = tmp_path / "checkout"
    wanted = {
        "ringray/lab/ring/group.py",
        "kernels/ringray_kernels/api.py", "experiments/quickstart.yaml",
        "cluster/runtime_env.yaml", "pyproject.toml", "ringray/partition/zigzag_token.py",
    }  # fmt: skip
    others = {
        ".git/objects/ab/cd", ".venv/lib/torch.so", "venv/lib/torch.so", ".mypy_cache/3.11/a.json",
        ".env", "tests/ringray/test_ring.py", "docs/images/a.png", "experiments/results/a.jsonl",
        "ringray/__pycache__/ring.pyc", "mlruns/0/meta.yaml", "mlflow.db", "store.db", "build/a.py",
        ".env.local", "deploy.pem", "cluster/tls.key", "id_ed25519", "auth_token", "ray.token",
        "credentials.json", "secrets.yaml", ".netrc", "other.db-wal",
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


def test_a_token_file_that_others_may_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in access.TOKENS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    token = tmp_path / "cluster.token"
    token.write_text("secret-token\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    token.chmod(0o640)
    monkeypatch.setattr(access, "others_may_read", lambda path: path.stat().st_mode & 0o077)
    with pytest.raises(PlaceError, match=f"others may read it: chmod 600 {token}"):
        access.use_given_token()
    token.chmod(0o600)
    access.use_given_token()
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    (tmp_path / ".ray").mkdir()
    default = tmp_path / ".ray" / "auth_token"
    default.write_text("secret-token")
    default.chmod(0o604)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    access.use_given_token()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(PlaceError, match="chmod 600"):
        access.use_given_token()


def test_a_file_in_a_closed_folder_is_closed(tmp_path: Path) -> None:
    token = tmp_path / "a" / "b" / "token"
    token.parent.mkdir(parents=True)
    token.write_text("x")
    token.chmod(0o644)
    open_ones = [folder for folder in tmp_path.parents if folder.stat().st_mode & 0o011]
    reached = len(open_ones) == len(tmp_path.parents)
    tmp_path.chmod(0o755)
    assert access.others_may_read(token) == reached
    tmp_path.chmod(0o700)
    assert not access.others_may_read(token)
    assert not access.others_may_read(tmp_path / "none")
