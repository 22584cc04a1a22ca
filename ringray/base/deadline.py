"""Deadlines for calls that have none of their own.

Such a call runs in a thread, which is left behind when its time is up. A process with such threads
ends by ``end``: Python would wait at exit for what they hold. Imports nothing heavy.
"""

from __future__ import annotations

import errno
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

SAY_S = 25.0  # seconds between two lines about a wait
READER_S = 20.0  # seconds for a pipe to have a reader
WRITE_S = 600.0  # seconds for a reader to make place in a pipe: a pager may wait for its user
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


def opened(path: Path, flags: int) -> int:
    """Opens a file to write it, and returns its number; waits ``READER_S`` for a pipe's reader.
    No link is followed but those of the system, such as /dev/stdout.

    Raises:
        OSError: it cannot be written, or nobody reads it.
    """
    until = time.monotonic() + READER_S
    flags |= 0 if is_stream(path) else os.O_NOFOLLOW
    while True:
        try:
            return os.open(path, flags | os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if error.errno != errno.ENXIO or not path.is_fifo():
                raise
            if time.monotonic() > until:
                raise TimeoutError(f"nobody reads this pipe for {READER_S:g} s") from None
        time.sleep(0.05)


def is_stream(path: Path) -> bool:
    """Tells whether a path names a stream or a device by the system's own names."""
    return re.fullmatch(r"/dev(/fd)?|/proc/[^/]+/fd", str(path.parent)) is not None


def write(file: int, data: bytes, what: str) -> None:
    """Writes all of ``data`` to what ``opened`` returned; ``what``: for messages.

    Raises:
        OSError: it cannot be written, or nobody reads it for ``WRITE_S``.
    """
    until, reminder = time.monotonic() + WRITE_S, WaitNotice()
    while data:
        try:
            data = data[os.write(file, data) :]
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(f"nobody reads this pipe for {WRITE_S:g} s") from None
            reminder(f"a reader of {what}")
            select.select([], [file], [], 1.0)


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
