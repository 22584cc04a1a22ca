"""Ctrl-C, SIGTERM and SIGHUP: an exception where one is allowed, else the end of the process.

All three end a command with exit code 130. A SIGHUP that is ignored (``nohup``) stays ignored.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

INTERRUPTED = 130
_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def quit_at_once(*_: object) -> None:
    """Ends the process, without its cleaning up; as a handler of the three signals."""
    os._exit(INTERRUPTED)


def install(handler: Any) -> dict[signal.Signals, Any]:
    """Installs a handler of the three signals and returns the handlers before.

    Python handles signals in its main thread only; in another thread the call changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, handler)
    return before


def leave_to_main() -> None:
    """Keeps the three signals from the thread that calls this. A signal to the process goes to any
    thread that takes it, past the main thread that has it :func:`blocked`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)


@contextmanager
def blocked() -> Iterator[None]:
    """Blocks the three signals, for this process and those that it starts in the block, and then
    puts back handlers that a library replaced: those of Ray exit or abort. A scheduler that stops
    a job signals all of its processes at once, and a driver without its Ray cannot end in order."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:  # of no Python code
                    signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Signals:
    """A block in which the first signal raises KeyboardInterrupt; a second one ends the process.

    Raises:
        KeyboardInterrupt: the block around this one was interrupted and went on.
    """

    _inmost: ClassVar[Signals | None] = None

    def __enter__(self) -> Signals:
        if self.arrived():
            raise KeyboardInterrupt
        self._held = self._pending = False
        self._around, Signals._inmost = Signals._inmost, self
        self._before = install(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        Signals._inmost = self._around

    @classmethod
    def arrived(cls) -> bool:
        """Returns whether a signal has arrived in the inmost block."""
        return cls._inmost is not None and cls._inmost._pending

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delays signals to the end of the block, also if the block installs handlers.

        Raises:
            KeyboardInterrupt: a signal arrived in the block.
        """
        self._held = True
        try:
            yield
        finally:
            self._held = False
            if self._before and not self._pending:
                install(self._handle)
        if self._pending:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: Any) -> None:
        install(quit_at_once)
        self._pending = True
        if not self._held:
            raise KeyboardInterrupt
