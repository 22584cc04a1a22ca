"""--json has a line for every trial that the store holds, and none twice."""

from __future__ import annotations

import errno
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ringray.base.errors import PlaceError
from ringray.lab.store.jsonl import Lines
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import TrialRow
from tests.support.store_rows import DIGEST, OTHER, ok, sweep, trial


@pytest.fixture
def rows(tmp_path: Path) -> list[TrialRow]:
    with Store(tmp_path / "store.db") as store:
        store.begin(sweep(), [*(trial(index) for index in range(4)), trial(4, "too large")])
        for index in (2, 0, 1):
            store.record(DIGEST, trial(index).key, ok(index))
        return [kept.trial for kept in store.changed_since(DIGEST, 0)[0]]


def _read(path: Path) -> list[int]:
    return [json.loads(line)["config"]["seq_len"] - 64 for line in path.read_text().splitlines()]


def test_lines_that_a_killed_driver_owes_are_written_once(
    tmp_path: Path, rows: list[TrialRow]
) -> None:
    path = tmp_path / "a.jsonl"
    lines = Lines(path, sweep())
    lines.catch_up(rows[:2])
    assert _read(path) == [4, 2]
    with path.open("a") as file:  # as it died in the middle of a line
        file.write('{"point": "abc", "sw')
    for _ in range(2):
        Lines(path, sweep()).catch_up(rows)
        assert _read(path) == [4, 2, 0, 1]
    # Measured again is another line; another sweep's lines are its own.
    again = [replace(rows[1], metrics={"median_ms": 7.0}), *rows]
    Lines(path, sweep()).catch_up(again)
    assert _read(path) == [4, 2, 0, 1, 2]
    Lines(path, sweep(OTHER, "other")).catch_up(rows[:1])
    assert _read(path) == [4, 2, 0, 1, 2, 4]


def test_what_others_wrote_is_left_as_it_is(tmp_path: Path, rows: list[TrialRow]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("# notes\n[1, 2]\nno newline at the end")
    Lines(path, sweep()).catch_up(rows[:1])
    assert path.read_text().startswith('# notes\n[1, 2]\nno newline at the end\n{"point": ')
    assert len(path.read_text().splitlines()) == 4


def test_a_full_disk_leaves_no_half_line(rows: list[TrialRow]) -> None:
    with pytest.raises(PlaceError, match=r"/dev/full: no space left .*ringray resume quick --json"):
        Lines(Path("/dev/full"), sweep())._write([{"point": 1}])


def test_a_line_that_a_full_disk_cuts_off_is_taken_back(
    tmp_path: Path, rows: list[TrialRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    lines, write = Lines(path, sweep()), os.write
    lines.append(rows[0])

    def full(file: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:-10])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(PlaceError, match="no space left"):
        lines.append(rows[1])
    monkeypatch.undo()
    assert _read(path) == [4]
    lines.append(rows[1])
    assert _read(path) == [4, 2]


def test_a_pipe_has_one_writer_from_the_start_to_the_end(
    tmp_path: Path, rows: list[TrialRow]
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(path.read_text()))
    reader.start()
    lines = Lines(path, sweep())
    for row in rows[:2]:
        lines.append(row)
    os.close(lines._pipe or 0)
    reader.join()
    assert len(found[0].splitlines()) == 2


def test_a_pipe_whose_reader_leaves_ends_the_sweep_in_order(
    tmp_path: Path, rows: list[TrialRow]
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    lines = Lines(path, sweep())
    os.close(reader)
    with pytest.raises(PlaceError, match="the trial is in the store"):
        lines.append(rows[0])
    os.close(lines._pipe or 0)
