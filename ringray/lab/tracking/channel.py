"""JSON lines over a pair of pipes, between a driver and its tracking process; and its log."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from contextlib import suppress
from typing import Any

from ringray.base.errors import RingrayError
from ringray.base.redaction import hidden, shown


class Channel:
    """One end. Reads with a deadline and without threads; pipes only, so POSIX only."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink
        self._buffer = b""
        self.closed = False

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message; None when none came within ``timeout`` seconds or the other end closed.

        :attr:`closed` tells which. Lines that are no JSON object are skipped.
        """
        deadline = time.monotonic() + timeout
        poll = select.poll()  # select() knows no descriptors above 1023
        poll.register(self._source, select.POLLIN)
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                if (message := _parsed(line)) is not None:
                    return message
                continue
            if self.closed:
                return None
            left = max(0.0, deadline - time.monotonic())
            if not poll.poll(left * 1000):
                return None
            data = os.read(self._source, 65536)
            self._buffer += data
            self.closed = not data

    def send(self, message: dict[str, Any]) -> bool:
        """False when the other end is gone."""
        data = json.dumps(message).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._sink, data) :]
        except OSError:
            return False
        return True


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def take_channel() -> Channel:
    """The channel to whoever started this process, on its stdin and stdout; what MLflow prints goes
    to the log."""
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return Channel(source, sink)


def brief(error: BaseException) -> str:
    """One line, without credentials, for a user's eyes."""
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0]
    kind = type(error).__name__
    if not isinstance(error, RingrayError) and kind not in ("MlflowException", first):
        first = f"{type(error).__name__}: {first}"
    return shown(first)[:500]


def log(text: str) -> None:
    """To the tracking log, which is this process's stderr."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    with suppress(OSError):  # a full disk: what is to be tracked goes on
        print(f"{stamp} {hidden(text)}", file=sys.stderr, flush=True)
