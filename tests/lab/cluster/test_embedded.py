"""An embedded Ray that does not start: its tries, its words, its logs and the environment."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ringray.base import locks
from ringray.base.errors import ClusterError
from ringray.lab.cluster import connect, embedded
from ringray.lab.cluster.embedded import TRIES, Servers

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Servers:
    """The servers of a Ray whose folder is made, and nothing started."""
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    return Servers(locks.Folder(tmp_path, tmp_path / "note.json"))


def test_the_logs_of_the_last_failures_are_kept(servers: Servers, tmp_path: Path) -> None:
    assert servers.reason("no answer in 3 s") == "no answer in 3 s"
    folder = servers.root / "session_latest" / "logs"
    folder.mkdir(parents=True)
    (folder / "raylet.err").write_text("late")
    home = tmp_path / "home" / "logs"
    for day in range(8):
        (home / f"ray-2025010{day}-000000-1").mkdir(parents=True)
    reason, _, logs = servers.reason("no answer in 3 s").partition("; Ray's logs are in ")
    assert reason == "no answer in 3 s"
    assert Path(logs, "raylet.err").read_text() == "late"
    assert len(list(home.iterdir())) == embedded.LOGS


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
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(seconds) - 1 == min(failures, TRIES - 1)
    assert all(line.endswith("so it is; starting it again") for line in told)
