"""One rank's part of a walk: what it begins to send and receive at each step, and computes with.

Made from the tables of ``walk``, and executed by ``attention.loops``. Imports numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ringray.traffic.routes import KEPT
from ringray.traffic.walk import NO_ROWS, Rows, Traffic

if TYPE_CHECKING:
    from ringray.traffic.walk import Hulls, Pass


class Message(NamedTuple):
    """One transfer of some rows, begun at the step in which it stands and ended by the end of step
    ``due``. ``chunk``: what is computed with, else a sum of gradients. ``peer``: the other rank.
    """

    due: int
    chunk: bool
    visit: int  # with due and chunk an order that both ends share
    owner: int
    rows: Rows
    peer: int
    send: bool


class Visit(NamedTuple):
    """A chunk at one rank: it computes with the rows ``need`` of ``owner``'s chunk, of which it
    holds ``held``, and in a backward pass leaves a sum of the rows ``sums``."""

    owner: int
    held: Rows
    need: Rows
    sums: Rows


class Step(NamedTuple):
    """What one rank does at one step: begin the transfers, compute, end the transfers due."""

    messages: tuple[Message, ...]
    visits: tuple[Visit, ...]


@dataclass(frozen=True)
class Script:
    """All steps of one pass for one rank. ``kept``: the chunks, by owner, that it has from the
    start beside its own, because it received them last in the pass before."""

    steps: tuple[Step, ...]
    kept: tuple[tuple[int, Rows], ...]

    @property
    def visits(self) -> tuple[Visit, ...]:
        """All visits in the order in which they are computed."""
        return tuple(visit for step in self.steps for visit in step.visits)


def _rows(hulls: Hulls, owner: int, visit: int) -> Rows:
    start, stop = int(hulls[0][owner, visit]), int(hulls[1][owner, visit])
    return Rows(start, stop) if stop > start else NO_ROWS


@lru_cache(maxsize=256)
def write(moved: Traffic, which: Pass, shard: int, rank: int) -> Script:
    """What ``rank`` does in one pass of a walk. ``shard``: rows of an own chunk."""
    route, backward = moved.route, which == "backward"
    owner_at = [int(owner) for owner in route.owner[rank]]
    messages: dict[int, list[Message]] = {}
    visits: dict[int, list[Visit]] = {}
    kept: list[tuple[int, Rows]] = []

    def message(
        posted: int,
        due: int,
        chunk: bool,
        visit: int,
        owner: int,
        rows: Rows,
        peer: int,
        send: bool,
    ) -> None:
        if rows:
            assert peer != rank, "nobody sends to itself"
            messages.setdefault(posted, []).append(
                Message(due, chunk, visit, owner, rows, peer, send)
            )

    own_sums = NO_ROWS
    visits[route.step[0]] = [Visit(rank, Rows(0, shard), _rows(moved.need, rank, 0), own_sums)]
    for lane in route.lanes:
        for visit in range(lane.first, lane.stop):
            source = lane.source if visit == lane.first else visit - 1
            step, posted = route.step[visit], route.posted[visit]
            onward = visit + 1 < lane.stop
            # This rank is at this visit of one owner's chunk, and sends to it as the source of
            # another's.
            owner = owner_at[visit]
            held = _rows(moved.held, owner, visit)
            if held:
                sums = _rows(moved.sums, owner, visit) if backward else NO_ROWS
                if not _rows(moved.later, owner, visit):
                    sums = NO_ROWS
                visits.setdefault(step, []).append(
                    Visit(owner, held, _rows(moved.need, owner, visit), sums)
                )
                if source == KEPT:
                    kept.append((owner, held))
                else:
                    peer = int(route.rank[owner, source])
                    message(posted, step - 1, True, visit, owner, held, peer, send=False)
                last = not (onward and _rows(moved.later, owner, visit + 1))
                to = owner if last else int(route.rank[owner, visit + 1])
                message(step + 1, step + 1, False, visit, owner, sums, to, send=True)
            if source != KEPT:
                owner = owner_at[source]
                rows, peer = _rows(moved.held, owner, visit), int(route.rank[owner, visit])
                message(posted, step - 1, True, visit, owner, rows, peer, send=True)
            if not backward:
                continue
            if visit > lane.first:  # the sum of the rank before
                owner = owner_at[visit]
                if _rows(moved.later, owner, visit):
                    rows, peer = (
                        _rows(moved.sums, owner, visit - 1),
                        int(route.rank[owner, visit - 1]),
                    )
                    message(step, step, False, visit - 1, owner, rows, peer, send=False)
            ends_here = not (onward and _rows(moved.later, rank, visit + 1))
            if _rows(moved.later, rank, visit) and ends_here:
                rows, peer = _rows(moved.sums, rank, visit), int(route.rank[rank, visit])
                message(step + 1, step + 1, False, visit, rank, rows, peer, send=False)
    length = 1 + max(*messages, *visits, 0)
    return Script(
        tuple(
            Step(tuple(sorted(messages.get(t, ()))), tuple(visits.get(t, ())))
            for t in range(length)
        ),
        tuple(kept),
    )
