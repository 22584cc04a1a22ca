"""--json has a line for every trial that the store holds, and none twice."""

from __future__ import annotations

import errno
import json
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ringray.base.errors import PlaceError
from ringray.lab.driver.events import SweepStarted, TrialEnded
from ringray.lab.driver.json_lines import JsonLines
from ringray.lab.plan.plan import build
from ringray.lab.specs.model import parse
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import Outcome, SweepInfo, TrialRow
from tests.support.store_rows import DIGEST, OTHER, ok, sweep, trial

ENDED = TrialEnded(
    build(parse("version: 1\nname: x\nkind: latency\nproblem: {seq_len: 80}\n")).trials[0],
    Outcome("ok"),
)


@pytest.fixture
def rows(tmp_path: Path) -> list[TrialRow]:
    with Store(tmp_path / "store.db") as store:
        store.begin(sweep(), [*(trial(index) for index in range(4)), trial(4, "too large")])
        for index in (2, 0, 1):
            store.record(DIGEST, trial(index).key, ok(index))
        return [recording.trial for recording in store.changed_since(DIGEST, 0)[0]]


def _read(path: Path) -> list[int]:
    return [json.loads(line)["config"]["seq_len"] - 64 for line in path.read_text().splitlines()]


def _start(path: Path, rows: list[TrialRow], info: SweepInfo | None = None) -> JsonLines:
    lines, unused = JsonLines(str(path)), None
    lines.take(SweepStarted(unused, info or sweep(), {}, rows))  # type: ignore[arg-type]
    return lines


def test_lines_that_a_killed_driver_owes_are_written_once(
    tmp_path: Path, rows: list[TrialRow]
) -> None:
    path = tmp_path / "a.jsonl"
    _start(path, rows[:2]).close()
    assert _read(path) == [4, 2]
    with path.open("a") as file:  # as it died in the middle of a line
        file.write('{"point": "abc", "sw')
    for _ in range(2):
        _start(path, rows).close()
        assert _read(path) == [4, 2, 0, 1]
    # Measured again is another line; another sweep's lines are its own.
    again = [replace(rows[1], metrics={"median_ms": 7.0}), *rows]
    _start(path, again).close()
    assert _read(path) == [4, 2, 0, 1, 2]
    _start(path, rows[:1], sweep(OTHER, "other")).close()
    assert _read(path) == [4, 2, 0, 1, 2, 4]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(_start(Path("/dev/full"), [])) as lines:
        says = r"/dev/full: no space left .*ringray resume quick --json"
        with pytest.raises(PlaceError, match=says):
            lines.take(ENDED)
    path, write = tmp_path / "a.jsonl", os.write

    def full(file: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:-10])

    with closing(_start(path, [])) as lines:
        lines.take(ENDED)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(PlaceError, match="no space left"):
                lines.take(ENDED)
        assert _read(path) == [16]
        lines.take(ENDED)
    assert _read(path) == [16, 16]
