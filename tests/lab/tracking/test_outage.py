"""A sink that refuses something, lies or is away: no other trial waits, and none is forgotten."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from multiprocessing import Pipe
from pathlib import Path

import pytest

from ringray.lab.store.feed import CurvePoint
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import Kept, SyncState, Tracked
from tests.support.place import PATIENCE
from tests.support.tracking_store import DIGEST, begin, outcome, trials


class FakeMLflow:
    """A sink that refuses a key, or everything, or every file."""

    place = Tracked("sqlite://", "1", "r")
    waits = False  # whether it says itself when the sweep ends

    def __init__(self, refused: str = "", files: bool = True, up: bool = True) -> None:
        self.refused, self.files, self.up = refused, files, up
        self.written: list[str] = []
        self.closed = 0
        self.end_sweep: Callable[[], None] = lambda: None

    def refresh(self) -> None:
        if not self.up:
            raise ConnectionError("down at http://me:hush@host")

    def write(self, recording: Kept) -> bool:
        self.refresh()
        if recording.trial.key == self.refused:
            raise ValueError("refused")
        self.written.append(recording.trial.key)
        return True

    def lacks(self, recording: Kept) -> bool:
        return recording.trial.key not in self.written

    def close(self) -> None:
        self.refresh()
        self.closed += 1

    def log_live(self, points: Sequence[CurvePoint]) -> None:
        self.refresh()

    def summarise(self) -> None:
        self.refresh()

    def log_files(self) -> None:
        self.refresh()
        if not self.files:
            raise OSError("no bucket")

    def log_figures(self) -> None:
        self.refresh()


def _followed(
    tmp_path: Path, fake: FakeMLflow, patience: float, damaged: bool = False
) -> SyncState:
    """The end of a sweep of four trials that ``fake`` has not seen."""
    from ringray.lab.tracking.process import Follower

    ours, theirs = Pipe()
    with ours, theirs, Store(tmp_path / "s.db") as store:
        begin(store, trials(4))
        for index, trial in enumerate(trials(4)):
            store.record(DIGEST, trial.key, outcome(index))
        if damaged:
            with closing(sqlite3.connect(store.path)) as db, db:
                db.execute("UPDATE trials SET metrics = '{' WHERE key = ?", (trials(4)[0].key,))
        fake.end_sweep = partial(ours.send, (PATIENCE, patience))
        if not fake.waits:
            fake.end_sweep()
        Follower(fake, store, DIGEST, theirs).run()
        assert ours.poll(1)
        place, state = ours.recv()
    assert place == fake.place
    assert isinstance(state, SyncState)
    return state


@pytest.mark.parametrize(
    ("fake", "patience", "state"),
    [
        (FakeMLflow(f"{1:016x}"), 3.0, SyncState(3, 1, "ValueError: refused")),
        (FakeMLflow(files=False), 0.6, SyncState(4, 0, "OSError: no bucket")),
        (FakeMLflow(up=False), 0.3, SyncState(0, 4, "ConnectionError: down at http://***@host")),
    ],
)
def test_what_is_refused_holds_up_nothing_else_and_an_outage_is_given_up(
    tmp_path: Path, fake: FakeMLflow, patience: float, state: SyncState
) -> None:
    assert _followed(tmp_path, fake, patience) == state
    assert fake.closed == fake.up


def test_a_damaged_store_is_not_held_until_the_last_second(tmp_path: Path) -> None:
    """Its user can save it once no process uses it."""
    state = _followed(tmp_path, FakeMLflow(), patience=0.3, damaged=True)
    assert state.written == 0
    assert "damaged" in (state.error or "")


class Liar(FakeMLflow):
    """Says that it has written the first ``lies`` trials, and has not."""

    def __init__(self, lies: int) -> None:
        super().__init__()
        self.lies = lies

    def write(self, recording: Kept) -> bool:
        self.lies -= 1
        return True if self.lies >= 0 else super().write(recording)


@pytest.mark.parametrize(("lies", "missing"), [(3, 0), (100, 4)])
def test_what_was_not_done_is_done_again_or_counted(
    tmp_path: Path, lies: int, missing: int
) -> None:
    fake = Liar(lies)
    state = _followed(tmp_path, fake, patience=5.0)
    assert state == SyncState(4 - missing, missing, None)
    assert fake.closed == 1
    assert len(fake.written) == 4 - missing


class Mended(FakeMLflow):
    """Refuses files while the sweep runs."""

    waits = True

    def log_files(self) -> None:
        if self.waits:
            self.waits = False
            self.end_sweep()
            raise OSError("no bucket")


def test_what_failed_for_a_while_is_no_error_at_the_end(tmp_path: Path) -> None:
    assert _followed(tmp_path, Mended(), patience=5.0) == SyncState(4, 0, None)
