"""The end of a benchmark whose kernel never returns, while the host waits for the device."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

EXIT_USAGE, EXIT_HUNG = 2, 3
PATIENCE_S = 120.0


class Watchdog:
    """A context that ends the process with ``EXIT_HUNG`` after ``patience_s`` seconds without
    ``mark``; before that it calls ``hung`` with the last mark to save results.

    It runs in a thread: a wait for the device releases the interpreter's lock, but runs no signal
    handlers.
    """

    def __init__(self, patience_s: float, hung: Callable[[str], None]) -> None:
        self.patience_s, self._hung = patience_s, hung
        self._last = ("starting", time.monotonic())
        self._over = threading.Event()

    def mark(self, doing: str) -> None:
        """Records progress: ``doing`` begins."""
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
            seconds = since + self.patience_s - time.monotonic()
            if seconds <= 0:
                break
            if self._over.wait(seconds):
                return
        try:
            self._hung(doing)
        finally:
            os._exit(EXIT_HUNG)
