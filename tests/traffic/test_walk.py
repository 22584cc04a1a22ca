"""Walks: all ranks' scripts are executed with sets of rows. A rank sends only rows that it holds
and others need, meets all rows that it needs, and gets its sums once; the planner counts the same.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringray import transport
from ringray.partition import PARTITIONS, Partitioning, padded_length
from ringray.traffic import geometry, hulls, script, walk
from ringray.traffic.geometry import Layout
from ringray.traffic.hulls import Traffic
from ringray.traffic.mask import Mask
from ringray.traffic.script import Key, Message, Script
from ringray.traffic.walk import Backward, Rows, Walks
from tests.support.brute_force import masks, problems, seen
from tests.support.exhaustive import exhaustive

COSTS = walk.costs(2, 1, 2, 2, 8)
RING = "ring"


def chosen(
    name: Partitioning,
    padded: int,
    ranks: int,
    mask: Mask,
    *,
    by: str = RING,
    back: Backward = "planned",
) -> Walks:
    """The walks of a transport. Heads are as many as fit any of them."""
    exchange = transport.plan(by, ranks, 2 * ranks, 2 * ranks)
    layout = Layout(name, padded, ranks // exchange.fold, exchange.fold)
    return walk.choose(layout, mask, exchange.routes, back, COSTS)


@pytest.mark.parametrize(
    ("name", "window", "sent", "direction"),
    [
        ("contiguous", None, 96, "toward higher ranks"),
        ("zigzag", None, 144, "toward lower ranks"),
        ("contiguous", 7, 21, "toward higher ranks"),
    ],
)
def test_rows_sent_at_64_tokens_on_4_ranks(
    name: str, window: int | None, sent: int, direction: str
) -> None:
    found = chosen(name, 64, 4, Mask(64, True, window)).forward
    assert (found.sent("forward").chunk_rows, found.route.name) == (sent, direction)


@pytest.mark.parametrize("by", ["ring", "bidirectional", "direct", "double-ring:2", "allgather"])
def test_without_a_mask_everything_goes_everywhere(by: str) -> None:
    for name in PARTITIONS:
        found = chosen(name, 64, 4, Mask(64, causal=False), by=by).forward
        assert found.sent("forward")[:3] == (192, 0, 12)


def test_a_window_ends_the_walk() -> None:
    """w keys back on contiguous shards of 16: ceil(w / 16) steps beyond the own chunk."""
    for window, steps in ((0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3), (63, 3)):
        found = chosen("contiguous", 64, 4, Mask(64, True, window)).forward
        scripts = [script.write(found, "forward", 16, rank) for rank in range(4)]
        assert max(len(one.steps) for one in scripts) == 1 + steps


@pytest.mark.parametrize(
    ("name", "by", "windows", "both"),
    [
        ("contiguous", "ring", 7 * 7, 7 * (7 + 4)),
        ("contiguous", "allgather", 7 * 7, 7 * (7 + 4)),
        ("zigzag", "allgather", 14 * 7, 14 * 7 + 7 * 4),
        ("zigzag", "ring", 542, 420),
    ],
)
def test_global_tokens_travel_apart_from_windows(
    name: str, by: str, windows: int, both: int
) -> None:
    """Seven ranks receive 4 global rows and no row between them and the windows; in zigzag the two
    windows that begin in a shard, in other directions, are apart as well."""
    for tokens, rows in ((None, windows), (4, both)):
        mask = Mask(512, True, 7, global_tokens=tokens)
        assert chosen(name, 512, 8, mask, by=by).forward.sent("forward").chunk_rows == rows


# Executing scripts


def span(rows: Rows) -> set[int]:
    return {row for part in rows.parts for row in range(part.start, part.stop)}


def hull(rows: set[int]) -> set[int]:
    return set(range(min(rows), max(rows) + 1)) if rows else set()


def needs(
    layout: Layout, mask: Mask, travelling: geometry.Travelling, moved: Traffic
) -> dict[tuple[int, int], set[int]]:
    """(visiting rank, owner) -> hulls of the parts of the owner's rows that it computes with; the
    rows themselves where these are sent."""
    table, cuts = seen(mask, layout.padded), geometry.cuts(layout, mask, travelling)
    dealt = [
        np.sort(np.concatenate([list(r) for r in layout.ranges(i)])) for i in range(layout.ranks)
    ]
    found = {}
    for visitor in range(layout.ranks):
        for owner in range(layout.ranks):
            if travelling == "keys":
                rows = table[np.ix_(dealt[visitor], dealt[owner])].any(0)
            else:
                rows = table[np.ix_(dealt[owner], dealt[visitor])].any(1)
            ends, whole = np.searchsorted(dealt[owner], cuts[:, owner]), visitor == owner
            parts = [(0, layout.rows)] if whole else itertools.pairwise(ends)
            if moved.runs is not None and not whole:
                found[visitor, owner] = set(np.flatnonzero(rows).tolist())
                continue
            hulls = [
                hull(set((first + np.flatnonzero(rows[first:stop])).tolist()))
                for first, stop in parts
            ]
            found[visitor, owner] = set().union(*hulls)
    return found


class Execution:
    """All ranks' scripts of one pass, step by step. ``counts[rank][owner]``: how often each row of
    an owner's sum was added to by a rank, as it came home."""

    def __init__(
        self, moved: Traffic, which: hulls.Pass, layout: Layout, kept: list[dict[Key, set[int]]]
    ) -> None:
        ranks, shard = layout.ranks, layout.rows
        self.scripts = [script.write(moved, which, shard, rank) for rank in range(ranks)]
        self.met: dict[tuple[int, int], set[int]] = {}
        self.keys: set[tuple[int, Key]] = set()
        self.sent: Counter[str] = Counter()
        self.per_chunk: Counter[tuple[int, int, bool]] = Counter()
        self.home = [np.zeros((ranks, shard), int) for _ in range(ranks)]
        self.held: list[dict[Key, set[int]]] = [{(r, 0): set(range(shard))} for r in range(ranks)]
        self.sums: list[dict[Key, np.ndarray]] = [{} for _ in range(ranks)]
        self._under_way: dict[int, list[tuple[int, Message, Any]]] = {}
        self.shard, self.backward = shard, which == "backward"
        for rank, one in enumerate(self.scripts):
            for key, rows in one.kept:
                assert span(rows) <= kept[rank][key], "keeps what the forward pass left there"
                self.held[rank][key] = span(rows)
        for step in range(max(len(one.steps) for one in self.scripts)):
            self._step(step)
        assert not any(self._under_way.values()), "all messages arrive"
        assert not any(self.sums), "no sum is left behind"

    def _messages(self, rank: int, step: int) -> list[Message]:
        steps = self.scripts[rank].steps
        return list(steps[step].messages) if step < len(steps) else []

    def _step(self, step: int) -> None:
        posted = {rank: self._messages(rank, step) for rank in range(len(self.scripts))}
        for rank, messages in posted.items():
            for m in messages:
                pair = [x for x in posted[m.peer] if x.peer == rank and x.send != m.send]
                mine = [x for x in messages if x.peer == m.peer and x.send == m.send]
                # The same messages in the same order at both ends, or they would be mixed up.
                ends = [[(*x[:2], *x[3:6]) for x in side] for side in (mine, pair)]
                assert ends[0] == ends[1]
                if m.send:
                    self._send(rank, m)
        for rank, one in enumerate(self.scripts):
            for visit in one.steps[step].visits if step < len(one.steps) else ():
                assert span(visit.held) <= self.held[rank][visit.key]
                assert span(visit.need) <= span(visit.held), "computes with rows that it has"
                assert (rank, visit.key) not in self.keys, "meets each chunk once"
                self.keys.add((rank, visit.key))
                met = self.met.setdefault((rank, visit.owner), set())
                assert not met & span(visit.need), "parts have no row in common"
                met |= span(visit.need)
                self._sum(rank, visit)
        for _, m, what in self._under_way.pop(step, []):
            self._arrive(m, what)
        for rank, one in enumerate(self.scripts):
            for visit in one.steps[step].visits if step < len(one.steps) else ():
                if visit.owner != rank and not self._needed_later(rank, visit.key, step):
                    del self.held[rank][visit.key]

    def _needed_later(self, rank: int, key: Key, step: int) -> bool:
        return any(
            m.chunk and m.send and (m.owner, m.part) == key
            for later in self.scripts[rank].steps[step + 1 :]
            for m in later.messages
        )

    def _send(self, rank: int, m: Message) -> None:
        self.sent["chunk" if m.chunk else "sum"] += m.rows.size
        self.sent["messages"] += 1
        self.per_chunk[m.owner, m.part, m.chunk] += 1
        what: Any = None
        key = (m.owner, 0 if m.owner == rank else m.part)
        if m.chunk:
            assert span(m.rows) <= self.held[rank][key], "sends rows that it has"
        else:
            what = self.sums[rank].pop(key)
            outside = np.ones(self.shard, bool)
            outside[sorted(span(m.rows))] = False
            assert not what[:, outside].any(), "the message holds all that was summed"
        self._under_way.setdefault(m.due, []).append((rank, m, what))

    def _sum(self, rank: int, visit: script.Visit) -> None:
        mine = np.zeros((len(self.scripts), self.shard), int)
        mine[rank, sorted(span(visit.need))] = 1
        if visit.owner == rank:
            self.home[rank] += mine
        elif visit.sums:
            assert span(visit.need) <= span(visit.sums)
            self.sums[rank][visit.key] = mine
        else:
            assert not self.backward or not visit.need

    def _arrive(self, m: Message, what: Any) -> None:
        if m.chunk:
            assert (m.owner, m.part) not in self.held[m.peer]
            self.held[m.peer][m.owner, m.part] = span(m.rows)
        elif m.peer == m.owner:
            self.home[m.owner] += what
        else:
            self.sums[m.peer][m.owner, m.part] += what


def execute(
    moved: Traffic, which: hulls.Pass, layout: Layout, mask: Mask,
    travelling: geometry.Travelling, kept: list[dict[Key, set[int]]] | None = None,
) -> Execution:  # fmt: skip
    """Executes a pass; checks that every rank met the rows that it needs, and counts messages."""
    done = Execution(moved, which, layout, kept or [{} for _ in range(layout.ranks)])
    for (visitor, owner), rows in needs(layout, mask, travelling, moved).items():
        assert done.met.get((visitor, owner), set()) == rows, (visitor, owner)
    counted = moved.sent(which)
    assert {type(number) for number in counted} == {int}, "the store takes plain integers"
    assert done.sent["chunk"] == counted.chunk_rows
    assert done.sent["sum"] == counted.sum_rows
    assert done.sent["messages"] == counted.messages
    assert all(count <= layout.ranks - 1 for count in done.per_chunk.values())
    return done


def held_last(one: Script) -> dict[Key, set[int]]:
    """Returns the rows that a rank held of each chunk that it met."""
    return {visit.key: span(visit.held) for visit in one.visits}


def check(
    name: Partitioning, padded: int, ranks: int, mask: Mask, by: str, back: Backward = "planned"
) -> None:
    walks = chosen(name, padded, ranks, mask, by=by, back=back)
    exchange = transport.plan(by, ranks, 2 * ranks, 2 * ranks)
    layout = Layout(name, padded, ranks // exchange.fold, exchange.fold)
    there = execute(walks.forward, "forward", layout, mask, "keys")
    kept = [held_last(one) for one in there.scripts]
    done = execute(walks.backward, "backward", layout, mask, walks.travelling, kept)
    required = needs(layout, mask, walks.travelling, walks.backward)
    for owner in range(layout.ranks):
        for rank in range(layout.ranks):
            expected = np.zeros(layout.rows, int)
            expected[sorted(required[rank, owner])] = 1
            assert np.array_equal(done.home[owner][rank], expected), (rank, owner)


EVERY = (
    "ring", "bidirectional", "direct", "allgather", "ulysses", "hybrid", "double-ring", "staged",
)  # fmt: skip
SIZED = {4: ("hybrid:2", "hybrid:4", "double-ring:1", "double-ring:4"), 6: ("double-ring:2",)}


@pytest.mark.parametrize(
    "case",
    [
        ("striped", 2), ("zigzag-token", 3),
        *exhaustive(*itertools.product(PARTITIONS, (1, 2, 3, 4, 6))),
    ],
    ids=str,
)  # fmt: skip
def test_small_walks_exhaustively(case: tuple[str, int]) -> None:
    name, ranks = case
    for seq_len in (1, 5, 23):
        padded = padded_length(name, seq_len, ranks)
        for mask in masks(seq_len):
            for by in (*EVERY, *SIZED.get(ranks, ())):
                check(name, padded, ranks, mask, by)
                if by != "allgather":
                    check(name, padded, ranks, mask, by, "query-side")


def test_all_transports_are_walked() -> None:
    assert set(EVERY) == set(transport.TRANSPORTS)


@settings(deadline=None, max_examples=75)
@given(problems(most=8), st.sampled_from(EVERY), st.sampled_from(walk.BACKWARDS))
def test_any_walk(problem: tuple[Partitioning, int, int, Mask], by: str, back: Backward) -> None:
    if by == "allgather":
        back = "planned"
    try:
        check(*problem, by, back)
    except walk.Unwalkable:
        assert back == "reverse"


@settings(deadline=None, max_examples=75)
@given(problems(most=8), st.sampled_from(walk.BACKWARDS))
def test_direct_sends_only_needed_rows_to_two_ranks_at_a_time(
    problem: tuple[Partitioning, int, int, Mask], back: Backward
) -> None:
    walks, layout = chosen(*problem, by="direct", back=back), Layout(*problem[:3])
    ways: tuple[tuple[hulls.Pass, Traffic, geometry.Travelling], ...] = (
        ("forward", walks.forward, "keys"), ("backward", walks.backward, walks.travelling),
    )  # fmt: skip
    for which, moved, travelling in ways:
        rows = needs(layout, problem[3], travelling, moved)
        others = sum(len(rows[pair]) for pair in rows if pair[0] != pair[1])
        sent = moved.sent(which)
        from_before = which == "backward" and back == "reverse"
        assert sent.chunk_rows == (0 if from_before else others), (
            "nothing is handed on, or sent again"
        )
        assert sent.sum_rows == (others if which == "backward" else 0)
        assert max(moved.route.step) == layout.ranks // 2, "both ways at once"
        for rank in range(layout.ranks):
            for step in script.write(moved, which, layout.rows, rank).steps:
                hops = {(m.chunk, m.send, (m.peer - rank) % layout.ranks) for m in step.messages}
                apart = {(*way, min(hop, layout.ranks - hop)) for *way, hop in hops}
                assert len(apart) == len({way[:2] for way in apart}), "equally far up and down"
                assert all(
                    rows[m.peer if m.owner == rank else rank, m.owner] for m in step.messages
                )


def test_reverse_sends_less_where_it_is_allowed() -> None:
    """Without a mask: one K/V hop fewer, because the last rank has kept its chunk."""
    full, causal = Mask(64, causal=False), Mask(64)
    for name in PARTITIONS:
        planned = chosen(name, 64, 4, full).backward.sent("backward")
        back = chosen(name, 64, 4, full, back="reverse").backward.sent("backward")
        assert (planned.chunks, planned.sums) == (12, 12)
        assert (back.chunks, back.sums) == (8, 12)
    # Causal zigzag toward lower ranks drops the back half; toward higher ranks it does not.
    assert chosen("zigzag", 64, 4, causal, back="reverse").forward.route.name.endswith(
        "higher ranks"
    )
    # Documents that only neighbours share: no direction ends where everything is still held.
    packed = Mask(64, False, None, (0, 20, 64))
    with pytest.raises(walk.Unwalkable, match="'contiguous', this mask and 4 ranks"):
        chosen("contiguous", 64, 4, packed, back="reverse")


def test_the_query_side_sends_less_for_many_kv_heads() -> None:
    """bf16: Q, dO, lse and delta against K and V in bf16, dQ against dK and dV in fp32."""
    mask = Mask(64, causal=False)
    exchange = transport.plan("ring", 4, 8, 8)
    for kv_heads, fewer in ((8, True), (2, False)):
        costs = walk.costs(2, 1, 8, kv_heads, 64)
        sent = []
        for back in ("planned", "query-side"):
            walks = walk.choose(Layout("striped", 64, 4), mask, exchange.routes, back, costs)
            sent.append(walks.backward.sent("backward").bytes(walks.backward_weights))
        assert (sent[1] < sent[0]) == fewer


@settings(deadline=None, max_examples=50)
@given(problems())
def test_the_cheapest_route_is_taken(problem: tuple[Partitioning, int, int, Mask]) -> None:
    name, padded, ranks, mask = problem
    routes = transport.plan("ring", ranks, 1, 1).routes
    both = [
        walk.choose(Layout(name, padded, ranks), mask, (one,), "planned", COSTS) for one in routes
    ]
    taken = walk.choose(Layout(name, padded, ranks), mask, routes, "planned", COSTS)
    forward = [walks.forward.sent("forward").bytes(COSTS.forward) for walks in both]
    backward = [walks.backward.sent("backward").bytes(COSTS.planned) for walks in both]
    assert taken.forward.sent("forward").bytes(COSTS.forward) == min(forward)
    assert taken.backward.sent("backward").bytes(COSTS.planned) == min(backward)
    if forward[0] == forward[1]:
        assert taken.forward.route is routes[0]
