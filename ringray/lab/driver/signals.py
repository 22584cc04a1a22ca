"""Ctrl-C and SIGTERM while a sweep runs: an exception in the driver, at times that bear one."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived."""


class Signals:
    """While entered, SIGINT and SIGTERM raise ``Interrupted``; a second one ends the process.

    Python handles signals in its main thread only; in another one this does nothing.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._held = self._pending = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in _NUMBERS}
            self._install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """What arrives in the block is raised at its end, whoever installed handlers in it.

        Raises:
            Interrupted: SIGINT or SIGTERM arrived meanwhile.
        """
        self._held = True
        try:
            yield
        finally:
            self._held = False
            if not self._pending:
                self._install()
        if self._pending:
            raise Interrupted

    def _install(self) -> None:
        for number in self._before:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        for one in self._before:  # a second one of either kind ends the process
            signal.signal(one, signal.SIG_DFL)
        self._pending = True
        if not self._held:
            raise Interrupted
