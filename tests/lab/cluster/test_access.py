"""Messages when a Ray cluster refuses a connection; tests/chaos/test_jobs.py has real clusters."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringray.base.errors import PlaceError
from ringray.lab.cluster import access

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
