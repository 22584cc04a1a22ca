"""How far a rank is in its trial, for whoever asks from outside while it works.

A few plain fields that the code of the trial sets as it goes, for less than a microsecond each; a
side thread of the rank reads them. Imports neither torch nor ray.
"""

from __future__ import annotations

import sys
import threading
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_FRAMES = 40  # of one thread
_THREADS = 16


@dataclass
class Progress:
    """``phase``: such as "repeat 3 of 30"; ``hop``: the last that began, such as "forward, step 1";
    ``waiting``: for another rank, so that it is not to blame for the time that passes."""

    phase: str = ""
    hop: str = ""
    waiting: bool = False

    def begin(self) -> None:
        """A trial begins."""
        self.phase, self.hop, self.waiting = "inputs", "", False

    def enter(self, phase: str) -> None:
        """A part of the trial begins."""
        self.phase, self.hop = phase, ""

    def end(self) -> None:
        """The trial has ended."""
        self.phase, self.hop, self.waiting = "", "", False

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Around waiting for other ranks; not reset by what fails, so that it still shows."""
        self.waiting = True
        yield
        self.waiting = False

    def now(self) -> Progress:
        """A copy."""
        return replace(self)

    def __str__(self) -> str:
        return ", ".join(part for part in (self.phase, self.hop) if part)


HERE = Progress()  # this process: one rank


def stacks() -> str:
    """What every thread of this process that runs Python is at, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    mine = threading.get_ident()
    parts = []
    for ident, frame in list(sys._current_frames().items())[:_THREADS]:
        if ident == mine:
            continue
        lines = traceback.format_stack(frame)[-_FRAMES:]
        parts.append(f"thread {names.get(ident, ident)}:\n{''.join(lines)}")
    return "\n".join(parts)


def tail_of(path: str, most: int = 8192) -> str:
    """The end of a file, nothing where it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - most))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
