"""Servers that accept a connection and then behave badly, each in one way."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

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

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                asked = self.request.recv(1 << 16).decode(errors="replace")
                for path, body in (but or {}).items():
                    if f" {path} " in asked:
                        length = b"Content-Length: %d\r\n\r\n" % len(body)
                        self.request.sendall(_HEAD + length + body)
                        return
                self.request.sendall(SAID[kind])
                if kind == "silent":
                    stop.wait()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            stop.set()
            server.shutdown()
