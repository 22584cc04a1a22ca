"""Deadlines for calls that have none of their own.

Such a call runs in a thread, which is left behind when its time is up. A process with such threads
ends by ``end``: Python would wait at exit for what they hold. Imports nothing heavy.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

SAY_S = 25.0  # seconds between two lines about a wait
LOOK_S = 1.0  # seconds between two looks at what is waited for
_left: list[threading.Thread] = []  # with a call that did not end in time

_T = TypeVar("_T")


def within(
    seconds: float,
    what: str,
    call: Callable[..., _T],
    *arguments: Any,
    lives: Callable[[], bool] | None = None,
    until: threading.Event | None = None,
) -> _T:
    """Returns ``call(*arguments)``, made in a thread of its own; says every ``SAY_S`` seconds on
    stderr that it waits.

    Args:
        what: the thing waited for, in messages.
        lives: is asked every ``LOOK_S`` seconds whether there is anything left to wait for.
        until: the thread lives on until this is set: the kernel ends a child process with the
            thread that started it, if the child asked for that.

    Raises:
        TimeoutError: no result within ``seconds``, or nothing to wait for; the call goes on.
    """
    result: Future[_T] = Future()

    def run() -> None:
        try:
            result.set_result(call(*arguments))
        except BaseException as error:  # the caller's to handle
            result.set_exception(error)
        if until is not None:
            until.wait()

    thread = threading.Thread(target=run, name=f"within: {what}", daemon=True)
    began, reminder = time.monotonic(), WaitNotice()
    pause = SAY_S if lives is None else LOOK_S
    thread.start()
    while not wait([result], max(0.0, min(pause, began + seconds - time.monotonic()))).done:
        over = time.monotonic() - began >= seconds
        if over or (lives is not None and not lives()):
            _left.append(thread)
            raise TimeoutError(f"no answer in {seconds:.3g} s" if over else "it has ended")
        reminder(what)
    return result.result()


class WaitNotice:
    """Says at least every ``SAY_S`` seconds what a loop waits for, if that calls it often."""

    def __init__(self) -> None:
        self._began = self._said = time.monotonic()

    def __call__(self, what: str) -> None:
        now = time.monotonic()
        if now - self._said >= SAY_S:
            self._said = now
            say(f"waiting for {what}, {now - self._began:.0f} s so far")

    def heard(self) -> None:
        """Notes that something was said or seen just now."""
        self._began = self._said = time.monotonic()


def end(code: int) -> NoReturn:
    """Ends the process; at once, without Python's own end, if a call was left behind."""
    if not any(thread.is_alive() for thread in _left):
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def say(text: str) -> None:
    """Prints one line to stderr; a closed one is ignored."""
    with suppress(OSError, ValueError):
        print(f"ringray: {text}", file=sys.stderr, flush=True)
