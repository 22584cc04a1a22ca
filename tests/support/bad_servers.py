"""Servers that accept a connection and then behave badly, each in one way."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
# What each says before it closes the connection; a silent one does so when the client has left.
SAID = {
    "silent": b"",
    "garbage": b"SSH-2.0-OpenSSH_9.6\r\n\x00\xff\xfe\r\n\r\n",
    "other-json": _HEAD + b'Content-Length: 13\r\n\r\n[1, "\\u0000"]',
}


@contextmanager
def bad_server(kind: str, but: Mapping[str, bytes] | None = None) -> Iterator[int]:
    """Yields the port of a server of that kind, on the loopback; ``but``: JSON by path that it
    answers as it should."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.1)
        arguments = (listening, kind, but or {}, stop)
        threading.Thread(target=_accept, args=arguments, daemon=True).start()
        try:
            yield listening.getsockname()[1]
        finally:
            stop.set()


def _accept(
    listening: socket.socket, kind: str, but: Mapping[str, bytes], stop: threading.Event
) -> None:
    while not stop.is_set():
        with suppress(OSError):
            arguments = listening.accept()[0], kind, but, stop
            threading.Thread(target=_serve, args=arguments, daemon=True).start()


def _serve(
    connection: socket.socket, kind: str, but: Mapping[str, bytes], stop: threading.Event
) -> None:
    with connection, suppress(OSError):
        asked = connection.recv(1 << 16).decode(errors="replace")
        for path, body in but.items():
            if f" {path} " in asked:
                connection.sendall(_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                return
        connection.sendall(SAID[kind])
        if kind == "silent":
            stop.wait()
