"""The monitor of a ring: waits for all ranks, and decides which fault ended the wait.

A rank that fails reports it at once; its peers, which may wait for it inside a hop, are not waited
for. A rank without heartbeats is stalled. A ring that lives and does not end in time meets its
deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from ringray.base.errors import RingrayError, StoppedError
from ringray.instruments.progress import Progress
from ringray.lab.ring.calls import SIGN_S, RankCalls, gone, lost
from ringray.lab.trial import faults
from ringray.lab.trial.faults import Fault

PULSE_S = 2.0  # between two questions to a rank; shorter trials are not asked
STALL_S = 10.0  # without an answer
STACKS_S = 4.0  # wait for the stacks of all ranks after the deadline
# A rank is late if it takes _LATE times as long to start as another rank on its node, plus _LATE_S.
_LATE, _LATE_S = 5.0, 20.0
# Wait for other ranks after a first fault: a broken connection has its cause elsewhere; a ring
# survives a lack of memory if all its ranks answer; all ranks of a lost node fail.
_GRACE_S = {"connection-lost": 3.0, "out-of-memory": 1.0}
_DEATH_GRACE_S = 0.5


Watch = Callable[[Progress], None]
Stacks = Mapping[int, str]  # by rank


class RingFault(RingrayError):
    """The end of a ring without a result. ``sound``: all ranks have answered, so that they can go
    on when they have formed a new group."""

    def __init__(self, fault: Fault, sound: bool = False) -> None:
        super().__init__(str(fault))
        self.fault, self.sound = fault, sound


class RankMonitor:
    """Waits for one call. ``timeout``: seconds until its deadline; ``stop``: set when the answers
    are not needed any more; ``watch``: called with the progress of rank 0 when it is known."""

    def __init__(
        self, calls: RankCalls, timeout: float, stop: threading.Event, watch: Watch | None = None
    ) -> None:
        self._calls, self._timeout, self._stop, self._watch = calls, timeout, stop, watch
        self._answers: dict[int, Any] = {}
        self._faults: dict[int, Fault] = {}
        self._dead = False  # whether a process ended
        self._first: dict[str, float] = {}  # seconds until the first answer from a node
        self._away: set[str] = set()  # nodes that the last probe did not reach

    def answers(self) -> list[Any]:
        """Returns the answers by rank.

        Raises:
            RingFault: a rank failed, stalled, or did not end in time.
            StoppedError: the answers are not needed any more.
        """
        calls = self._calls
        deadline, pulse = calls.began + self._timeout, calls.began + PULSE_S
        while calls.pending:
            now = time.monotonic()
            if self._stop.is_set():
                raise StoppedError
            if now >= deadline:
                raise RingFault(self._overdue())
            if now >= pulse:
                if self._watch is not None and 0 in calls.signs:
                    self._watch(calls.signs[0])
                if calls.answering:
                    calls.question()
                elif fault := self._lost_at_start() or self._late_at_start():
                    raise RingFault(fault)
                pulse = now + PULSE_S
            self._take(min(deadline, pulse) - now)
            if self._faults:
                raise self._failure()
            if (away := time.monotonic() - now - PULSE_S) > PULSE_S:
                # This process was suspended: what ranks said meanwhile is not read yet.
                calls.heard = [when + away for when in calls.heard]
                deadline += away
            if silent := calls.silent(STALL_S):
                raise RingFault(self._stalled(silent, calls.stacks(SIGN_S)))
        return [answer for _, answer in sorted(self._answers.items())]

    def _take(self, timeout: float) -> None:
        for rank, answer in self._calls.arrived(timeout):
            if isinstance(answer, RayError):
                self._dead = self._dead or not isinstance(answer, RayTaskError)
                answer = of_error(answer, rank, self._node_of(rank))
            if isinstance(answer, Fault):
                self._faults[rank] = answer
            else:
                self._answers[rank] = answer
                took = time.monotonic() - self._calls.began
                self._first.setdefault(self._node_of(rank), took)

    # A rank has failed

    def _failure(self) -> RingFault:
        """Returns the cause of the first fault, after a short wait for the other ranks."""
        calls, began = self._calls, time.monotonic()
        while calls.pending and (seconds := began + self._grace() - time.monotonic()) > 0:
            self._take(seconds)
        fault = faults.cause(self._faults)
        kinds = {met.kind for met in self._faults.values()}
        sound = not calls.pending and not self._dead and kinds == {"out-of-memory"}
        if fault.secondhand and calls.pending:
            answered = calls.stacks(SIGN_S)
            if hung := [rank for rank in calls.pending if rank not in answered]:
                return RingFault(self._stalled(hung))
        if fault.infrastructure:
            fault = self._described(fault)
        return RingFault(self._located(fault), sound)

    def _grace(self) -> float:
        first = faults.cause(self._faults)
        grace = _GRACE_S.get(first.kind, _DEATH_GRACE_S if first.infrastructure else 0.0)
        return max(grace, _GRACE_S["connection-lost"]) if first.secondhand else grace

    def _described(self, fault: Fault) -> Fault:
        """Adds a dead rank's last log lines and its hop; tells a lost node from a dead rank."""
        rank = fault.ranks[0]
        if fault.kind == "rank-died":
            if gone(self._node_of(rank)):
                fault = replace(fault, kind="node-lost", message="")
            elif log := self._calls.log(rank):
                fault = replace(fault, message=log[-1], log=log)
                if faults.log_says_out_of_memory(log):
                    return replace(fault, kind="out-of-memory")
        return replace(fault, hop=self._calls.last_hop(rank))

    # No rank has failed

    def _lost_at_start(self) -> Fault | None:
        """Returns the loss of a node that two probes in a row did not reach.

        Ranks that start answer no questions, but their nodes accept connections.
        """
        by_node = self._by_node(self._calls.pending)
        before, self._away = self._away, lost(by_node)
        for node in sorted(before & self._away):
            return self._located(Fault("node-lost", "", tuple(by_node[node]), hop="its start"))
        return None

    def _late_at_start(self) -> Fault | None:
        """Returns the stall of ranks that start much later than another on their node."""
        waited = time.monotonic() - self._calls.began
        late = []
        for rank in self._calls.pending:
            first = self._first.get(self._node_of(rank))
            if first is not None and waited > _LATE * first + _LATE_S:
                late.append(rank)
        return replace(self._stalled(late), hop="its start") if late else None

    def _overdue(self) -> Fault:
        """Returns what kept the ring beyond its deadline."""
        calls, pending = self._calls, self._calls.pending
        if not calls.answering:
            return self._stalled(pending)
        stacks = calls.stacks(STACKS_S)
        if silent := [rank for rank in pending if rank not in stacks]:
            return self._stalled(silent, stacks)
        stuck = [r for r in pending if not (r in calls.signs and calls.signs[r].waiting)]
        message = f"not done after {self._timeout:.4g} s"
        if not stuck and len(pending) > 1:
            message += ", all waiting for each other"
        return self._found("timeout", message, stuck or pending, stacks)

    def _stalled(self, ranks: Sequence[int], stacks: Stacks | None = None) -> Fault:
        by_node = self._by_node(ranks)
        for node in sorted(lost(by_node)):
            return self._found("node-lost", "", by_node[node], stacks)
        seconds = max(time.monotonic() - self._calls.heard[rank] for rank in ranks)
        return self._found("stalled", f"no answer after {seconds:.3g} s", ranks, stacks)

    def _found(
        self, kind: faults.Kind, message: str, ranks: Sequence[int], stacks: Stacks | None
    ) -> Fault:
        text = "\n".join(f"rank {rank}\n{stack}" for rank, stack in (stacks or {}).items())
        hop = str(self._calls.signs.get(ranks[0], ""))
        return self._located(Fault(kind, message, tuple(ranks), hop=hop, stacks=text))

    def _node_of(self, rank: int) -> str:
        return self._calls.where[rank].node

    def _by_node(self, ranks: Iterable[int]) -> dict[str, list[int]]:
        by_node: dict[str, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self._node_of(rank), []).append(rank)
        return by_node

    def _located(self, fault: Fault) -> Fault:
        """Adds the node, if all ranks of the fault lie on one."""
        where = self._calls.where[fault.ranks[0]]
        alone = len(self._by_node(fault.ranks)) == 1
        return replace(fault, node=where.name, node_id=where.node) if alone else fault


def of_error(error: RayError, rank: int, node_id: str) -> Fault:
    """Returns the fault behind Ray's report of a failed call."""
    if isinstance(error, RayTaskError):
        return faults.of_exception(error.cause or error, rank)
    if isinstance(error, OutOfMemoryError):
        return Fault("out-of-memory", faults.brief(str(error)), (rank,))
    if isinstance(error, ActorDiedError) and error.actor_init_failed:
        last = [line for line in str(error).splitlines() if line.strip()][-1]
        return Fault("error", f"could not start: {faults.brief(last)}", (rank,))
    if isinstance(error, RayActorError) and error.preempted:
        return Fault("node-preempted", "", (rank,), node_id=node_id)
    text = faults.brief(str(error).rpartition("Worker exit detail:")[2].partition(" There ")[0])
    return Fault("rank-died", text, (rank,), node_id=node_id)
