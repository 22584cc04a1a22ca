"""JSON lines over a pair of pipes, between a driver and its tracking process."""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any


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
