"""A proxy before a real tracking server that can be told to misbehave."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_HTML = b"<html><body><h1>Corporate proxy</h1>please sign in</body></html>"
# What each does to a request; "empty" is an answer as if it was done; "lost" and "late" have the
# server do it, and keep the answer.
FAULTS = ("500", "429", "html", "empty", "reset", "lost", "late")
# What it says for ever, until it is told otherwise or the client leaves.
ENDLESS = {
    "interim": b"HTTP/1.1 100 Continue\r\n\r\n",
    "dribbling": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Y: ",
}
_PAUSE_S = 0.05


class Proxy:
    """Listens at ``uri`` and forwards to ``target``; a server that is gone is a 502. ``fault``: one
    of FAULTS or ENDLESS, or None to behave; ``only``: how many requests it meets, after which it is
    None again (None: all)."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target).netloc
        self._lock = threading.Lock()
        self._fault: str | None = None
        self._only: int | None = None
        self._told = 0  # calls of fail()
        self.met = 0  # requests that met a fault
        self.delay = threading.Event()  # set: late answers need not be waited for any more
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def _any(self) -> None:
                proxy._serve(self)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _any

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass  # a client that has gone away

        self._server = Server(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def fail(self, fault: str | None, only: int | None = None) -> None:
        """From now on."""
        with self._lock:
            self._fault, self._only, self.met = fault, only, 0
            self._told += 1

    def close(self) -> None:
        self.delay.set()
        self._server.shutdown()
        self._server.server_close()

    def _take(self) -> str | None:
        with self._lock:
            fault = self._fault
            if fault is not None:
                self.met += 1
                if self._only is not None and self.met >= self._only:
                    self._fault = None
            return fault

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        fault = self._take()
        if fault == "reset":
            self._reset(request)
        elif fault in ENDLESS:
            self._repeat(request, fault)
        elif fault == "html":
            self._answer(request, 200, _HTML, "text/html")
        elif fault == "empty":
            self._answer(request, 200, b"{}", "application/json")
        elif fault in ("500", "429"):
            self._answer(request, int(fault), b'{"error_code": "BUSY"}', "application/json")
        else:
            try:
                status, kind, answer = self._forward(request, body)
            except (OSError, http.client.HTTPException):
                self._answer(request, 502, b"bad gateway", "text/plain")
                return
            if fault == "late":
                self.delay.wait(30)
            if fault == "lost":
                self._reset(request)
            else:
                self._answer(request, status, answer, kind)

    def _forward(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, str, bytes]:
        connection = http.client.HTTPConnection(self._target, timeout=60)
        try:
            headers = {
                name: value
                for name, value in request.headers.items()
                if name.lower() not in ("host", "connection", "accept-encoding")
            }
            connection.request(request.command, request.path, body, headers)
            answer = connection.getresponse()
            kind = answer.getheader("Content-Type") or "application/json"
            return answer.status, kind, answer.read()
        finally:
            connection.close()

    def _answer(self, request: BaseHTTPRequestHandler, status: int, body: bytes, kind: str) -> None:
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _repeat(self, request: BaseHTTPRequestHandler, fault: str) -> None:
        request.close_connection = True
        said, told = ENDLESS[fault], self._told
        while self._told == told and not self.delay.is_set():
            request.wfile.write(said)
            said = said if fault == "interim" else b"a"
            time.sleep(_PAUSE_S)

    def _reset(self, request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True
        option = struct.pack("ii", 1, 0)  # close with RST
        request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
        request.connection.close()
