"""Whether a node is lost, by what connecting to it says."""

from __future__ import annotations

import errno
import socket

import pytest
import ray

from ringray import vigil

NODE = {"NodeID": "a", "Alive": True, "NodeManagerAddress": "10.0.0.2", "NodeManagerPort": 7000}


@pytest.mark.parametrize(
    ("said", "lost"),
    [
        (None, False),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), True),
        (TimeoutError("timed out"), True),
        (OSError(errno.EHOSTUNREACH, "no route to host"), True),
        (PermissionError(errno.EACCES, "a firewall here"), False),
        (OSError(errno.EMFILE, "too many open files"), False),
        (socket.gaierror(socket.EAI_NONAME, "unknown"), False),
    ],
)
def test_a_node_that_nobody_answers_for_is_lost(
    monkeypatch: pytest.MonkeyPatch, said: OSError | None, lost: bool
) -> None:
    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        assert address == ("10.0.0.2", 7000)
        if said is not None:
            raise said
        return socket.socket()

    monkeypatch.setattr(ray, "nodes", lambda: [NODE])
    monkeypatch.setattr(socket, "create_connection", connect)
    assert vigil.gone("a") is lost


@pytest.mark.parametrize("nodes", [[], [NODE | {"Alive": False}]])
def test_what_ray_knows_to_be_lost_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, nodes: list[dict[str, object]]
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert vigil.gone("a")
