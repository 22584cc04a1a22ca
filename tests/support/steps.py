"""Time that passes in steps: what waits does the next thing instead."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Steps:
    """A stand-in for the module ``time``. ``todo``: one for each wait; ``waits``: their seconds."""

    todo: list[Callable[[], object]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        assert self.todo, "nothing is left to wait for"
        self.todo.pop(0)()

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()
