"""A call to every rank of a ring: answers, and heartbeats of the ranks that still work.

Ranks answer questions from a thread beside the one that works.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from ringray.instruments.progress import Progress, tail_of
from ringray.lab.ring.order import RankLocation
from ringray.lab.trial import faults

BESIDE = "beside"  # the concurrency group of a rank's side thread
SIGN_S = 1.0  # wait for the other ranks when one has failed
_PROBE_S = 1.0  # wait for a node to accept a connection
_PROBES = 32  # nodes that are probed at the same time
# Errors of a connection to an address where nothing listens; None is a time-out.
_UNREACHED = (None, errno.ECONNREFUSED, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN)


class RankCalls:
    """One call to all ``actors`` by rank, which are at the places ``where``.

    ``answering``: whether ranks answer questions meanwhile, which they do once they have started.
    Times are seconds on the monotonic clock.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        where: Sequence[RankLocation],
        references: Sequence[Any],
        answering: bool,
    ) -> None:
        self._actors, self.where, self.answering = actors, where, answering
        self.began = time.monotonic()
        self.heard = [self.began] * len(actors)  # the last heartbeat
        self.signs: dict[int, Progress] = {}
        self._pending = {reference: rank for rank, reference in enumerate(references)}
        self._questions: dict[Any, int] = {}

    @property
    def pending(self) -> list[int]:
        """Returns the ranks that have not answered the call."""
        return sorted(self._pending.values())

    def arrived(self, timeout: float) -> Iterator[tuple[int, Any]]:
        """Waits for the next answers; yields each rank with its answer, or the error in its place.

        Notes answers to questions too, so that it may yield nothing before ``timeout``.
        """
        waited = [*self._pending, *self._questions]
        for reference in ray.wait(waited, num_returns=1, timeout=max(0.0, timeout))[0]:
            if (rank := self._questions.pop(reference, None)) is not None:
                with suppress(RayError):  # a rank that died fails in its own call too
                    self.signs[rank] = ray.get(reference, timeout=0)
                    self.heard[rank] = time.monotonic()
                continue
            rank = self._pending.pop(reference)
            try:
                yield rank, ray.get(reference, timeout=0)
            except RayError as error:
                yield rank, error

    def question(self) -> None:
        """Asks for the progress of every pending rank that has answered the last question."""
        for rank in set(self.pending) - set(self._questions.values()):
            self._questions[self._ask(rank, "progress")] = rank

    def silent(self, seconds: float) -> list[int]:
        """Returns the pending ranks without a heartbeat for ``seconds``."""
        now = time.monotonic()
        return [r for r in self.pending if self.answering and now - self.heard[r] >= seconds]

    def stacks(self, patience: float) -> dict[int, str]:
        """Returns the stacks of the pending ranks that answer in time; notes their progress too."""
        stacks = {}
        for rank, (sign, stack) in self._asked(self.pending, "stacks", patience):
            self.signs[rank], stacks[rank] = sign, stack
        return dict(sorted(stacks.items()))

    def last_hop(self, rank: int) -> str:
        """Returns the last known hop of a rank, else the present one of most other ranks."""
        if hop := str(self.signs.get(rank, "")):
            return hop
        others = [other for other in self.pending if other != rank]
        hops = [str(sign) for _, sign in self._asked(others, "progress", SIGN_S)]
        return max(hops, key=hops.count, default="")

    def log(self, rank: int) -> tuple[str, ...]:
        """Returns the last lines of a dead rank, read by this process or by a rank beside it."""
        place = self.where[rank]
        if not place.log:
            return ()
        if place.node == ray.get_runtime_context().get_node_id():
            return faults.tail(tail_of(place.log))
        beside = [other for other in self.pending if self.where[other].node == place.node]
        for _, text in self._asked(beside, "log", 1.0, place.log):
            return faults.tail(text)
        return ()

    def _ask(self, rank: int, method: str, *arguments: Any) -> Any:
        bound = getattr(self._actors[rank], method)
        return bound.options(concurrency_group=BESIDE).remote(*arguments)

    def _asked(
        self, ranks: Iterable[int], method: str, patience: float, *arguments: Any
    ) -> Iterator[tuple[int, Any]]:
        """Asks ``ranks`` and yields those that answer in time with their answers."""
        asked = {self._ask(rank, method, *arguments): rank for rank in ranks if self.answering}
        if asked:
            for reference in ray.wait(list(asked), num_returns=len(asked), timeout=patience)[0]:
                with suppress(RayError):
                    yield asked[reference], ray.get(reference)


def gone(node_id: str) -> bool:
    """Tells whether a node is lost: by Ray, or because it refuses connections.

    Ray itself takes up to half a minute to notice.
    """
    node = next((node for node in ray.nodes() if node["NodeID"] == node_id), None)
    if node is None or not node["Alive"]:
        return True
    try:
        address = node["NodeManagerAddress"], int(node["NodeManagerPort"])
        socket.create_connection(address, timeout=_PROBE_S).close()
    except OSError as error:
        # A client may have no route to the nodes at all.
        return error.errno in _UNREACHED and not ray.util.client.ray.is_connected()
    return False


def lost(node_ids: Iterable[str]) -> set[str]:
    """Returns the nodes that are gone, probed side by side: a lost one takes a second."""
    nodes = list(node_ids)
    with ThreadPoolExecutor(_PROBES) as pool:
        return {node for node, away in zip(nodes, pool.map(gone, nodes), strict=True) if away}
