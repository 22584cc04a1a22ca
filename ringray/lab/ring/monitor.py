"""Waiting for the ranks of a ring: for their answers, and meanwhile for signs of their life.

Ranks answer questions from a thread beside the one that works. A rank that fails says so itself, at
once, and its peers, which may wait for it inside a hop, are not waited for. One that gives no sign
of life is stalled; a ring that lives and does not come to an end in time has a deadline.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError, RayTaskError

from ringray.base.errors import RingrayError, StoppedError
from ringray.instruments.progress import tail_of
from ringray.lab.trial import faults
from ringray.lab.trial.faults import Fault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringray.instruments.progress import Progress

BESIDE = "beside"  # the concurrency group of the rank's side thread
PULSE_S = 2.0  # between two questions to a rank; shorter trials are asked nothing
STALL_S = 10.0  # without an answer
STACKS_S = 4.0  # for what every rank is at, when the deadline has passed
# A rank is late that takes so much longer to start than another on its node did.
_LATE, _LATE_S = 5.0, 20.0
_SIGN_S = 1.0  # for where the living are, when one has died
_PROBE_S = 1.0  # for a node to accept a connection
_PROBES = 32  # nodes that are asked at the same time
# What connecting says where nobody is; None is a time-out.
_NOBODY = (None, errno.ECONNREFUSED, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN)
# How long to wait for what other ranks have to say: a broken connection has a cause elsewhere; when
# all have answered, a ring outlives a lack of memory; of a lost node all ranks are.
_GRACE_S = {"connection-lost": 3.0, "out-of-memory": 1.0}
_DEATH_GRACE_S = 0.5


@dataclass(frozen=True)
class Where:
    """Where one rank runs: ``node`` for people, ``node_id`` as Ray names it, its log's path."""

    node: str = ""
    node_id: str = ""
    log: str = ""


class RingFault(RingrayError):
    """A ring came to no result. ``sound``: all of its ranks have answered, so that they may go on
    as soon as they have formed a new group."""

    def __init__(self, fault: Fault, sound: bool = False) -> None:
        super().__init__(str(fault))
        self.fault, self.sound = fault, sound


class RankMonitor:
    """Over one call of all ``actors``, which are at the places ``where``.

    ``timeout``: seconds until its deadline; ``watched``: whether the ranks can be asked meanwhile,
    which they cannot while they start; ``stop``: set when nobody needs their answers any more.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        where: Sequence[Where],
        timeout: float,
        watched: bool,
        stop: threading.Event,
    ) -> None:
        self._actors, self._where, self._timeout = actors, where, timeout
        self._watched, self._stop = watched, stop
        self._began = time.monotonic()
        self._heard = [self._began] * len(actors)
        self._signs: dict[int, Progress] = {}
        self._pulses: dict[Any, int] = {}
        self._pending: dict[Any, int] = {}
        self._answers: dict[int, Any] = {}
        self._first: dict[str, float] = {}  # by node, seconds until one of its ranks had answered
        self._faults: dict[int, Fault] = {}
        self._dead = False
        self._away: set[str] = set()  # nodes that did not answer when last asked

    def answers(self, references: Sequence[Any]) -> list[Any]:
        """By rank.

        Raises:
            RingFault: a rank failed, stalled, or was not done in time.
            StoppedError: nobody waits for them any more.
        """
        self._pending = {reference: rank for rank, reference in enumerate(references)}
        deadline, pulse = self._began + self._timeout, self._began + PULSE_S
        while self._pending:
            now = time.monotonic()
            if self._stop.is_set():
                raise StoppedError
            if now >= deadline:
                raise RingFault(self._overdue())
            if now >= pulse:
                if self._watched:
                    self._ask()
                elif failed := self._lost() or self._late():
                    raise RingFault(failed)
                pulse = now + PULSE_S
            for reference in self._next(min(deadline, pulse) - now):
                self._take(reference)
            if self._faults:
                raise self._failed()
            if (away := time.monotonic() - now - PULSE_S) > PULSE_S:
                # This process did not run: what the ranks have said meanwhile is not read yet.
                self._heard = [when + away for when in self._heard]
                deadline += away
            if silent := self._silent(STALL_S):
                raise RingFault(self._stalled(silent, self._stacks(_SIGN_S)))
        return [self._answers[rank] for rank in range(len(references))]

    def _next(self, timeout: float) -> list[Any]:
        waited = [*self._pending, *self._pulses]
        done, _ = ray.wait(waited, num_returns=1, timeout=max(0.0, timeout))
        return list(done)

    def _take(self, reference: Any) -> None:
        rank = self._pulses.pop(reference, None)
        if rank is not None:
            with suppress(RayError):  # one that died fails in its own call too
                self._signs[rank] = ray.get(reference, timeout=0)
                self._heard[rank] = time.monotonic()
            return
        rank = self._pending.pop(reference)
        try:
            answer = ray.get(reference, timeout=0)
        except RayError as error:
            self._dead = self._dead or not isinstance(error, RayTaskError)
            answer = self._fault(rank, error)
        if isinstance(answer, Fault):
            self._faults[rank] = answer
        else:
            self._answers[rank] = answer
            self._first.setdefault(self._at(rank).node_id, time.monotonic() - self._began)

    def _ask(self) -> None:
        """Every rank that is waited for and has answered what it was asked before."""
        asked = set(self._pulses.values())
        for rank in self._pending.values():
            if rank not in asked:
                self._pulses[self._side(rank).progress.remote()] = rank

    def _lost(self) -> Fault | None:
        """While ranks start they cannot be asked, but their nodes can: one is lost that was away
        twice in a row."""
        by_node: dict[str, list[int]] = {}
        for rank in sorted(self._pending.values()):
            by_node.setdefault(self._at(rank).node_id, []).append(rank)
        nodes = [node_id for node_id in by_node if node_id]
        with ThreadPoolExecutor(_PROBES) as pool:  # each takes a second where nobody answers
            away = {n for n, lost in zip(nodes, pool.map(gone, nodes), strict=True) if lost}
        lost, self._away = away & self._away, away
        for node_id in sorted(lost):
            return self._located(Fault("node-lost", "", tuple(by_node[node_id]), hop="its start"))
        return None

    def _late(self) -> Fault | None:
        """Nor can it be seen whether they are frozen; but others on their nodes have started."""
        waited = time.monotonic() - self._began
        late = []
        for rank in sorted(self._pending.values()):
            first = self._first.get(self._at(rank).node_id)
            if first is not None and waited > _LATE * first + _LATE_S:
                late.append(rank)
        return replace(self._stalled(late, {}), hop="its start") if late else None

    def _side(self, rank: int) -> _Side:
        return _Side(self._actors[rank])

    def _silent(self, seconds: float) -> list[int]:
        if not self._watched:
            return []
        now = time.monotonic()
        return sorted(r for r in self._pending.values() if now - self._heard[r] >= seconds)

    # A rank has failed

    def _failed(self) -> RingFault:
        """What the first failure followed from, after a little patience with the other ranks."""
        began = time.monotonic()
        while self._pending:
            first = faults.cause(self._faults)
            grace = _GRACE_S.get(first.kind, _DEATH_GRACE_S if first.infrastructure else 0.0)
            if first.secondhand:
                grace = max(grace, _GRACE_S["connection-lost"])
            left = began + grace - time.monotonic()
            done = ray.wait(list(self._pending), num_returns=1, timeout=left)[0] if left > 0 else ()
            if not done:
                break
            for reference in done:
                self._take(reference)
        found = faults.cause(self._faults)
        kinds = {fault.kind for fault in self._faults.values()}
        sound = not self._pending and not self._dead and kinds == {"out-of-memory"}
        if found.secondhand and self._pending and (hung := self._unanswering()):
            return RingFault(self._stalled(hung, {}))
        if found.infrastructure:
            found = self._described(found)
        return RingFault(self._located(found), sound)

    def _unanswering(self) -> list[int]:
        """The ranks that are waited for and do not answer, when asked now."""
        answered = self._stacks(_SIGN_S) if self._watched else {}
        return sorted(rank for rank in self._pending.values() if rank not in answered)

    def _fault(self, rank: int, error: RayError) -> Fault:
        """What Ray says of a call that came to nothing."""
        if isinstance(error, RayTaskError):
            return faults.of_exception(error.cause or error, rank)
        if isinstance(error, OutOfMemoryError):
            return Fault("out-of-memory", faults.brief(str(error)), (rank,))
        if isinstance(error, ActorDiedError) and error.actor_init_failed:
            last = [line for line in str(error).splitlines() if line.strip()][-1]
            return Fault("error", f"could not start: {faults.brief(last)}", (rank,))
        text = faults.brief(str(error).rpartition("Worker exit detail:")[2].partition(" There ")[0])
        return Fault("rank-died", text, (rank,), node_id=self._at(rank).node_id)

    def _described(self, fault: Fault) -> Fault:
        """With the dead rank's last words, where it was, and whether its node is lost."""
        rank = fault.ranks[0]
        if fault.kind == "rank-died":
            at = self._at(rank)
            if at.node_id and gone(at.node_id):
                return replace(fault, kind="node-lost", message="", hop=self._last_hop(rank))
            log = self._log(rank)
            if self._dead_for_want_of_memory(log):
                return replace(fault, kind="out-of-memory", message=log[-1], log=log)
            fault = replace(fault, log=log, message=log[-1] if log else fault.message)
        return replace(fault, hop=self._last_hop(rank))

    @staticmethod
    def _dead_for_want_of_memory(log: Sequence[str]) -> bool:
        return faults.log_says_out_of_memory(log)

    def _last_hop(self, rank: int) -> str:
        """Where the rank was when it was last heard of, else where most of the others are now."""
        if (sign := self._signs.get(rank)) is not None and str(sign):
            return str(sign)
        living = [r for r in self._pending.values() if r != rank] if self._watched else []
        asked = [self._side(r).progress.remote() for r in living]
        said = []
        if asked:
            for reference in ray.wait(asked, num_returns=len(asked), timeout=_SIGN_S)[0]:
                with suppress(RayError):
                    said.append(str(ray.get(reference)))
        return max(said, key=said.count) if said else ""

    def _log(self, rank: int) -> tuple[str, ...]:
        """The last lines that a dead rank wrote, read by this process or by a rank beside it."""
        at = self._at(rank)
        if not at.log:
            return ()
        if at.node_id == ray.get_runtime_context().get_node_id():
            return faults.tail(tail_of(at.log))
        for other in self._pending.values():
            if self._at(other).node_id == at.node_id and self._watched:
                with suppress(RayError):
                    return faults.tail(ray.get(self._side(other).log.remote(at.log), timeout=1))
        return ()

    # Nothing happens

    def _overdue(self) -> Fault:
        """The deadline has passed: who is stuck, and at what."""
        waited_for = sorted(self._pending.values())
        if not self._watched:
            return self._stalled(waited_for, {})
        stacks = self._stacks(STACKS_S)
        silent = [rank for rank in waited_for if rank not in stacks]
        if silent:
            return self._stalled(silent, stacks)
        stuck = [r for r in waited_for if not (r in self._signs and self._signs[r].waiting)]
        late = stuck or waited_for
        hop = str(self._signs.get(late[0], ""))
        message = f"not done after {self._timeout:.4g} s"
        if not stuck and len(waited_for) > 1:
            message += ", all waiting for each other"
        text = "\n".join(f"rank {rank}\n{stacks[rank]}" for rank in sorted(stacks))
        return self._located(Fault("timeout", message, tuple(late), hop=hop, stacks=text))

    def _stalled(self, ranks: Sequence[int], stacks: dict[int, str]) -> Fault:
        now = time.monotonic()
        seconds = max(now - self._heard[rank] for rank in ranks)
        first = self._at(ranks[0])
        text = "\n".join(f"rank {rank}\n{stacks[rank]}" for rank in sorted(stacks))
        hop = str(self._signs.get(ranks[0], ""))
        fault = Fault(
            "stalled", f"no answer after {seconds:.3g} s", tuple(ranks), hop=hop, stacks=text,
            node_id=first.node_id,
        )  # fmt: skip
        if first.node_id and gone(first.node_id):
            lost = tuple(r for r in ranks if self._at(r).node_id == first.node_id)
            fault = replace(fault, kind="node-lost", ranks=lost, message="")
        return self._located(fault)

    def _stacks(self, patience: float) -> dict[int, str]:
        """What the ranks that answer are at, by rank; their progress is noted too."""
        if not self._watched:
            return {}
        asked = {self._side(rank).stacks.remote(): rank for rank in sorted(self._pending.values())}
        found = {}
        for reference in ray.wait(list(asked), num_returns=len(asked), timeout=patience)[0]:
            with suppress(RayError):
                self._signs[asked[reference]], found[asked[reference]] = ray.get(reference)
        return found

    # Where

    def _at(self, rank: int) -> Where:
        return self._where[rank] if rank < len(self._where) else Where()

    def _located(self, fault: Fault) -> Fault:
        at = self._at(fault.ranks[0]) if fault.ranks else Where()
        return replace(fault, node=at.node, node_id=at.node_id)


class _Side:
    """The methods of an actor, called in its thread beside the one that works."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name).options(concurrency_group=BESIDE)


def gone(node_id: str) -> bool:
    """Whether a node is lost: Ray says so, or nothing accepts a connection where it should.

    Ray itself takes up to half a minute to believe it.
    """
    node = next((one for one in ray.nodes() if one["NodeID"] == node_id), None)
    if node is None or not node["Alive"]:
        return True
    try:
        address = node["NodeManagerAddress"], int(node["NodeManagerPort"])
        socket.create_connection(address, timeout=_PROBE_S).close()
    except OSError as error:
        # A client may have no way to nodes at all.
        return error.errno in _NOBODY and not ray.util.client.ray.is_connected()
    return False
