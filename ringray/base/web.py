"""One request to a server that may be silent, slow or no server at all: a deadline for the whole.

A server that sends a byte now and then, or one interim answer after another, defeats the time-out
of a socket, which counts from the last byte. Imports ssl, which takes a while.
"""

from __future__ import annotations

import http.client
import socket
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any, NamedTuple

from ringray.base.deadline import within

MOST = 1 << 16  # bytes of an answer that are read


BINARY = "its answer is binary, not HTTP, as that of another port of a head (its GCS, 6379) is"


class Answer(NamedTuple):
    """``status`` and ``reason`` of the final answer, and the first ``MOST`` bytes of it."""

    status: int
    reason: str
    body: bytes


def get(url: str, seconds: float) -> Answer:
    """Returns the answer to a GET request, whatever its status, after redirections.

    Raises:
        OSError: no complete answer in ``seconds``, no connection, or no HTTP. The ``reason`` of a
            ``URLError`` may be the error beneath.
    """
    sockets: list[socket.socket] = []
    try:
        return within(seconds, url, _get, url, seconds, sockets)
    except TimeoutError:
        for one in sockets:  # ends the thread
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        raise
    except (http.client.HTTPException, ValueError) as error:
        said = str(error).strip() or type(error).__name__
        readable = said.isascii() and said.isprintable()
        raise OSError(f"its answer is {said[:80]!r}, not HTTP" if readable else BINARY) from None


def _get(url: str, seconds: float, sockets: list[socket.socket]) -> Answer:
    def recorded(kind: type[http.client.HTTPConnection]) -> Any:
        class Connection(kind):  # type: ignore[misc, valid-type]
            def connect(self) -> None:
                super().connect()
                sockets.append(self.sock)

        return Connection

    class Recording(urllib.request.AbstractHTTPHandler):
        def do_open(self, http_class: Any, req: Any, **options: Any) -> Any:
            return super().do_open(recorded(http_class), req, **options)

    class Http(Recording, urllib.request.HTTPHandler): ...

    class Https(Recording, urllib.request.HTTPSHandler): ...

    try:
        answer: Any = urllib.request.build_opener(Http, Https).open(url, timeout=seconds)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return Answer(answer.status, answer.reason, answer.read(MOST))
