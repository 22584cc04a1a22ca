"""Ends the benchmark when a kernel never returns: nothing else can, once the host waits for it."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_HUNG = 3
PATIENCE_S = 120.0


class Watchdog:
    """While entered, ends the process with ``EXIT_HUNG`` when ``mark`` was not called for
    ``patience_s`` seconds; ``hung`` is told before what was last marked, and saves what there is.

    A thread: waiting for a device releases the interpreter's lock, but no signal handler runs.
    """

    def __init__(self, patience_s: float, hung: Callable[[str], None]) -> None:
        self.patience_s, self._hung = patience_s, hung
        self._last = ("starting", time.monotonic())
        self._over = threading.Event()

    def mark(self, doing: str) -> None:
        """Something has ended, and ``doing`` begins."""
        self._last = (doing, time.monotonic())

    def __enter__(self) -> Watchdog:
        self.mark("starting")
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        while True:
            doing, since = self._last
            left = since + self.patience_s - time.monotonic()
            if left <= 0:
                break
            if self._over.wait(left):
                return
        try:
            self._hung(doing)
        finally:
            os._exit(EXIT_HUNG)
