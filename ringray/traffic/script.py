"""The part of one rank in a walk: its transfers and its computations, step by step.

Four generators list the transfers from the tables of ``walk``, one rule each.
``attention.loops.ring`` executes the script. Imports numpy only.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringray.traffic.hulls import Hulls, Pass, Traffic
from ringray.traffic.routes import KEPT
from ringray.traffic.walk import NO_ROWS, Rows

Ints = NDArray[np.signedinteger]
Key = tuple[int, int]  # a chunk: owner and part


class Message(NamedTuple):
    """One transfer of rows, from the step that lists it to the end of step ``due``.

    ``chunk``: of operands, else of a sum of gradients. ``part``: of the owner's rows. ``peer``: the
    other rank. ``due``, ``chunk``, ``visit`` and ``part`` give an order that both ends share.
    """

    due: int
    chunk: bool
    visit: int
    owner: int
    part: int
    rows: Rows
    peer: int
    send: bool

    def __str__(self) -> str:
        """Returns ``chunk 2 to 3``, ``sum 0 from 1``: ranks of the ring in which chunks walk."""
        what, way = "chunk" if self.chunk else "sum", "to" if self.send else "from"
        return f"{what} {self.owner} {way} {self.peer}"


class Visit(NamedTuple):
    """One computation: a rank holds the rows ``held`` of ``owner``'s chunk, computes with the rows
    ``need``, and in a backward pass leaves a sum of gradients of the rows ``sums``. ``part``: of
    the chunk; the rank's own is computed with at once, as part 0."""

    owner: int
    part: int
    held: Rows
    need: Rows
    sums: Rows

    @property
    def key(self) -> Key:
        """Returns the chunk's owner and part."""
        return self.owner, self.part


@dataclass(frozen=True)
class Step:
    """One step of one rank: begin the transfers, compute, end the transfers that are due."""

    messages: tuple[Message, ...]
    visits: tuple[Visit, ...]

    @cached_property
    def batches(self) -> tuple[tuple[int, str, tuple[Message, ...]], ...]:
        """Returns the transfers, grouped by the step at which they end: that step, what moves in
        words, and the messages."""
        by_due = itertools.groupby(self.messages, lambda message: message.due)
        groups = [(due, tuple(together)) for due, together in by_due]
        return tuple((due, ", ".join(map(str, group)), group) for due, group in groups)


@dataclass(frozen=True)
class Script:
    """All steps of one pass for one rank. ``kept``: rows of chunks that the rank holds from the
    start beside its own, because they arrived last in the forward pass."""

    steps: tuple[Step, ...]
    kept: tuple[tuple[Key, Rows], ...]

    @cached_property
    def visits(self) -> tuple[Visit, ...]:
        """Returns all visits in the order of computation."""
        return tuple(visit for step in self.steps for visit in step.visits)


@lru_cache(maxsize=256)
def write(moved: Traffic, which: Pass, shard: int, rank: int) -> Script:
    """Returns the part of ``rank`` in one pass of a walk. ``shard``: rows of an own chunk."""
    messages: defaultdict[int, list[Message]] = defaultdict(list)
    for travels in (_chunks, _sums) if which == "backward" else (_chunks,):
        for send in (False, True):
            for posted, message in travels(moved, rank, send=send):
                messages[posted].append(message)
    visits: defaultdict[int, list[Visit]] = defaultdict(list)
    for step, visit in _visits(moved, which, shard, rank):
        visits[step].append(visit)
    length = 1 + max(*messages, *visits, 0)
    return Script(
        tuple(Step(tuple(sorted(messages[t])), tuple(visits[t])) for t in range(length)),
        tuple(_kept(moved, rank)),
    )


def _chunks(moved: Traffic, rank: int, *, send: bool) -> Iterator[tuple[int, Message]]:
    """A chunk comes from the rank of its visit before and is there when its step begins; it goes to
    the rank of its next visit with the rows that are needed from there on."""
    route = moved.route
    ranks, peers = (route.handed_by, route.rank) if send else (route.rank, route.handed_by)
    for part, owner, visit in _where(moved.chunk_rows, ranks, rank):
        due, peer = route.step[visit] - 1, int(peers[owner, visit])
        rows = _rows(moved, moved.held, part, owner, visit)
        message = Message(due, True, visit, owner, part, rows, peer, send=send)
        yield route.posted[visit], message


def _sums(moved: Traffic, rank: int, *, send: bool) -> Iterator[tuple[int, Message]]:
    """A sum goes in the step after the visit that made it, from the rank of that visit: to the next
    rank that adds to it, or home."""
    step, made_by = moved.route.step, np.broadcast_to(moved.route.rank, moved.sum_rows.shape)
    ranks, peers = (made_by, moved.sums_to) if send else (moved.sums_to, made_by)
    for part, owner, visit in _where(moved.sum_rows, ranks, rank):
        due, peer = step[visit] + 1, int(peers[part, owner, visit])
        rows = _rows(moved, moved.sums, part, owner, visit)
        yield due, Message(due, False, visit, owner, part, rows, peer, send=send)


def _visits(moved: Traffic, which: Pass, shard: int, rank: int) -> Iterator[tuple[int, Visit]]:
    """A rank computes with its own chunk, and with each other that it holds rows of."""
    own = _rows(moved, moved.need, slice(None), rank, 0)
    yield moved.route.step[0], Visit(rank, 0, Rows(0, shard), own, NO_ROWS)
    for visit, owner in enumerate(moved.route.owner[rank, 1:].tolist(), 1):
        for part in range(len(moved.sum_rows)):
            if held := _rows(moved, moved.held, part, owner, visit):
                leaves = which == "backward" and moved.sum_rows[part, owner, visit]
                sums = _rows(moved, moved.sums, part, owner, visit) if leaves else NO_ROWS
                need = _rows(moved, moved.need, part, owner, visit)
                yield moved.route.step[visit], Visit(owner, part, held, need, sums)


def _kept(moved: Traffic, rank: int) -> Iterator[tuple[Key, Rows]]:
    """A rank has kept the chunks of the lanes that start at it."""
    for lane in moved.route.lanes:
        owner = int(moved.route.owner[rank, lane.first])
        for part in range(len(moved.chunk_rows) if lane.source == KEPT else 0):
            if rows := _rows(moved, moved.held, part, owner, lane.first):
                yield (owner, part), rows


def _where(rows: Ints, ranks: Ints, rank: int) -> list[list[int]]:
    """Part, owner and visit of all entries of ``ranks`` that are ``rank`` and have rows."""
    entries: list[list[int]] = np.argwhere((ranks == rank) & (rows > 0)).tolist()
    return entries


def _rows(moved: Traffic, hulls: Hulls, part: int | slice, owner: int, visit: int) -> Rows:
    """Returns the hull of one part or of several, or the runs within it."""
    start, stop = int(hulls[0][part, owner, visit].min()), int(hulls[1][part, owner, visit].max())
    if stop <= start:
        return NO_ROWS
    if moved.runs is None or visit == 0:
        return Rows(start, stop)
    runs = moved.runs.of(int(moved.route.rank[owner, visit]), owner)
    return Rows(start, stop, runs if len(runs) > 1 else ())
