"""Progress of a rank in its trial, readable from outside while it works.

The trial sets a few plain fields, which takes less than a microsecond each; a side thread of the
rank reads them. Imports neither torch nor ray.
"""

from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

_FRAMES = 40  # of one thread
_THREADS = 16


@dataclass
class Progress:
    """``phase``: for example "repeat 3"; ``hop``: the last that began, for example "forward, step
    1"; ``waiting``: for another rank, which is then to blame for a delay. ``told``: the
    last step of a training that has ended, from 1, and its values."""

    phase: str = ""
    hop: str = ""
    waiting: bool = False
    told: tuple[int, dict[str, float]] = (0, {})

    def enter(self, phase: str) -> None:
        """Begins a part of the trial; an empty ``phase`` ends the trial."""
        self.phase, self.hop, self.waiting = phase, "", False
        if not phase:
            self.tell(0)

    def tell(self, step: int, **values: float) -> None:
        """Reports a step that has ended."""
        self.told = step, values

    def now(self) -> Progress:
        """Returns a copy."""
        return replace(self)

    def __str__(self) -> str:
        return ", ".join(part for part in (self.phase, self.hop) if part)


HERE = Progress()  # this process: one rank


def stacks() -> str:
    """Returns the stacks of all other Python threads, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident())
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)[-_FRAMES:])}"
        for ident, frame in list(frames.items())[:_THREADS]
    )


def tail_of(path: str, most: int = 8192) -> str:
    """Returns the last ``most`` bytes of a file; empty if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - most))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
