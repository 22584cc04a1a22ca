"""Lost nodes, ranks that are given up, nodes set aside, and the memory limit of a CPU rank."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import ray

from ringray.base.errors import StoppedError
from ringray.instruments.progress import Progress
from ringray.lab.ring import calls, monitor
from ringray.lab.ring.calls import RankCalls
from ringray.lab.ring.monitor import RankMonitor, RingFault
from ringray.lab.ring.order import RankLocation
from ringray.lab.ring.quarantine import Quarantine
from ringray.lab.trial.faults import Fault

NODE = {"NodeID": "a", "Alive": True, "NodeManagerAddress": "10.0.0.2", "NodeManagerPort": 7000}


@pytest.mark.parametrize(
    ("said", "lost"),
    [
        (None, False),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), True),
        (TimeoutError("timed out"), True),
        (PermissionError(errno.EACCES, "a firewall here"), False),
        (OSError(errno.EMFILE, "too many open files"), False),
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
    assert calls.gone("a") is lost
    for nodes in ([], [NODE | {"Alive": False}]):  # Ray knows that it is lost
        monkeypatch.setattr(ray, "nodes", lambda nodes=nodes: nodes)
        assert calls.gone("a")


# Ranks that answer by the clock of a test


class Ranks:
    """Calls and questions by number: when each is answered; ``pauses``: moments from which this
    process does not run, and for how long."""

    def __init__(self, ends: list[float], pauses: dict[float, float]) -> None:
        self.now, self.ends, self.pauses = 0.0, ends, dict(pauses)
        self.asked: dict[Any, float] = {}

    def wait(
        self, references: list[Any], num_returns: int, timeout: float
    ) -> tuple[list[Any], list[Any]]:
        for moment, seconds in sorted(self.pauses.items()):
            if moment <= self.now + timeout:
                self.now = max(self.now, moment) + seconds
                del self.pauses[moment]
                break
        else:
            due = [self.due(one) for one in references]
            self.now = max(self.now, min(self.now + timeout, *due))
        ready = [one for one in references if self.due(one) <= self.now][:num_returns]
        return ready, [one for one in references if one not in ready]

    def due(self, reference: Any) -> float:
        return self.ends[reference] if isinstance(reference, int) else self.asked[reference]

    def actor(self, silent: bool) -> Any:
        ranks = self

        class Actor:
            def __getattr__(self, name: str) -> Any:
                return self

            def options(self, **given: object) -> Any:
                return self

            def remote(self) -> object:
                question = object()
                ranks.asked[question] = float("inf") if silent else ranks.now + 0.1
                return question

        return Actor()


def watched(
    monkeypatch: pytest.MonkeyPatch,
    ends: list[float],
    *,
    silent: int | str | None = None,
    started: bool = True,
    pauses: dict[float, float] | None = None,
    stop: threading.Event | None = None,
    nodes: str = "aaa",
    away: str = "",
) -> tuple[list[Any], float]:
    """Returns their answers and the time of each."""
    ranks = Ranks(ends, pauses or {})
    monkeypatch.setattr(monitor.time, "monotonic", lambda: ranks.now)
    monkeypatch.setattr(ray, "wait", ranks.wait)
    answer = {True: "answer", False: (Progress("repeat 1"), "its stack")}
    monkeypatch.setattr(ray, "get", lambda one, timeout=0: answer[isinstance(one, int)])
    monkeypatch.setattr(calls, "gone", lambda node_id: node_id in away)
    monkeypatch.setattr(monitor, "gone", lambda node_id: node_id in away)
    actors = [ranks.actor(silent in (rank, "all")) for rank in range(len(ends))]
    where = [RankLocation(nodes[rank], name=f"node {nodes[rank]}") for rank in range(len(ends))]
    called = RankCalls(actors, where, list(range(len(ends))), started)
    return RankMonitor(called, 120.0, stop or threading.Event()).answers(), ranks.now


def test_a_rank_that_does_not_answer_is_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(monkeypatch, [30.0, 40.0]) == (["answer", "answer"], 40.0)
    with pytest.raises(RingFault) as raised:
        watched(monkeypatch, [30.0, 40.0], silent=1)
    assert (raised.value.fault.kind, raised.value.fault.ranks) == ("stalled", (1,))


def test_a_lost_node_is_found_among_those_of_silent_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose process was stopped is no reason to blame its own node."""
    with pytest.raises(RingFault) as raised:
        watched(monkeypatch, [90.0, 90.0, 90.0], silent="all", nodes="abb", away="b")
    fault = raised.value.fault
    assert (fault.kind, fault.ranks, fault.node) == ("node-lost", (1, 2), "node b")


@pytest.mark.parametrize("seconds", [11.0, 3600.0])
@pytest.mark.parametrize("ends", [[30.0, 40.0], [6.0, 5000.0]])
def test_ranks_are_not_to_blame_for_a_driver_that_did_not_run(
    monkeypatch: pytest.MonkeyPatch, seconds: float, ends: list[float]
) -> None:
    """It was stopped in a terminal, or its container frozen; they answer when it goes on."""
    ends = [min(end, seconds + 50.0) for end in ends]
    answers, _ = watched(monkeypatch, ends, pauses={5.0: seconds})
    assert answers == ["answer", "answer"]


def test_one_that_starts_much_later_than_another_on_its_node_is_stalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert watched(monkeypatch, [3.0, 30.0], started=False)[1] == 30.0
    with pytest.raises(RingFault) as raised:
        watched(monkeypatch, [3.0, 60.0], started=False)
    fault = raised.value.fault
    assert (fault.kind, fault.ranks, fault.hop) == ("stalled", (1,), "its start")
    # All are slow: who imports from a network drive, say.
    assert watched(monkeypatch, [90.0, 100.0], started=False)[1] == 100.0


def test_what_nobody_waits_for_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        watched(monkeypatch, [50.0, 60.0], stop=stop)


def of(kind: str, node_id: str = "") -> Fault:
    return Fault(kind, ranks=(0,), node_id=node_id)  # type: ignore[arg-type]


def test_nodes_on_which_rings_fail() -> None:
    nodes = Quarantine()
    died = of("rank-died", node_id="a")
    assert not nodes.failed(died)
    assert not nodes.failed(of("rank-died", node_id="b"))
    assert not nodes.failed(of("compile-error", node_id="a"))
    nodes.succeeded(["a", "b"])
    assert nodes.failed(died), "one good trial clears nothing"
    assert nodes.failed(replace(died, kind="stalled")), "while it could not be set aside"
    nodes.add("a")
    assert nodes.nodes == ("a",)
    assert not nodes.failed(died), "it is said once"
    for _ in range(Quarantine.CLEARS):
        nodes.succeeded(["b"])
    assert not nodes.failed(of("stalled", node_id="b"))
    assert nodes.failed(of("node-lost", node_id="c")), "at once"
    assert not nodes.failed(of("rank-died")), "nobody knows where"


# The memory limit of a CPU rank counts what trials take

LIMITED = """
from ringray.lab.ring.actor import MemoryLimit

limit = MemoryLimit(64 << 20)
limit.impose()
kept = bytearray(40 << 20)
try:
    bytearray(40 << 20)
except MemoryError:
    assert limit.left() < 24 << 20
    limit.lift()
    bytearray(40 << 20)
    print("refused")
"""


def test_what_goes_beyond_the_limit_is_refused_until_it_is_lifted() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert done.stdout == "refused\n", done.stderr
