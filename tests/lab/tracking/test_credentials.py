"""Credentials that HTTP clients find by themselves, and the server that a spec names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ringray.base.errors import PlaceError
from ringray.lab.tracking.tracker import Tracker
from tests.support.small_spec import fill


class _Recorder(BaseHTTPRequestHandler):
    """Refuses everything and keeps the headers."""

    seen: list[dict[str, str]]

    def _refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen.append(dict(self.headers))
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = _refuse

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, str]]]]:
    seen: list[dict[str, str]] = []
    handler = type("Recorder", (_Recorder,), {"seen": seen})
    listening = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}", seen
    listening.shutdown()
    listening.server_close()


@pytest.mark.parametrize("own", [False, True], ids=["of a spec", "of the user"])
def test_netrc_is_for_the_server_that_the_environment_names(
    own: bool,
    server: tuple[str, list[dict[str, str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri, seen = server
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret-of-mine\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri if own else "http://127.0.0.1:9")
    path = tmp_path / "store.db"
    tracker = Tracker(path, fill(path).digest, uri, "named").start()
    with pytest.raises(PlaceError):
        tracker.wait_ready()
    tracker.close()
    requests = [one for one in seen if "mlflow" in one.get("User-Agent", "").lower()]
    assert len(seen) > len(requests) > 0  # the check before it, and MLflow's client
    assert any("Authorization" in one for one in requests) == own
    assert not any("Authorization" in one for one in seen if one not in requests)
