"""Ctrl-C and SIGTERM while a sweep runs: an exception in the driver, at times that allow one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """A block in which SIGINT and SIGTERM raise KeyboardInterrupt; a second one ends the process.

    Python handles signals in its main thread only; in another thread the block changes nothing.
    """

    def __enter__(self) -> Signals:
        here = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.getsignal(number) for number in _NUMBERS if here}
        self._held = self._pending = False
        self._set(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delays signals to the end of the block, also if the block installs handlers.

        Raises:
            KeyboardInterrupt: SIGINT or SIGTERM arrived in the block.
        """
        self._held = True
        try:
            yield
        finally:
            self._held = False
            if not self._pending:
                self._set(self._handle)
        if self._pending:
            raise KeyboardInterrupt

    def _set(self, handler: Any) -> None:
        for number in self._before:
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        self._set(signal.SIG_DFL)  # a second signal of either kind ends the process
        self._pending = True
        if not self._held:
            raise KeyboardInterrupt
