"""The walks of K/V and of dK/dV: what is sent is needed, what is needed is there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from ringray import geometry, walk
from ringray.geometry import Mask
from ringray.partition import PARTITIONS, padded_length
from tests.ringray.brute import blocks, masks, problems


@pytest.mark.parametrize(
    ("name", "window", "sent", "direction"),
    [("contiguous", None, 96, +1), ("zigzag", None, 144, -1), ("contiguous", 7, 21, +1)],
)
def test_rows_sent_at_64_tokens_on_4_ranks(
    name: str, window: int | None, sent: int, direction: int
) -> None:
    found = walk.plan(name, 64, 4, Mask(64, True, window), "forward")
    assert (found.sent.kv_rows, found.direction) == (sent, direction)


def test_without_a_mask_everything_goes_around() -> None:
    for name in PARTITIONS:
        found = walk.plan(name, 64, 4, Mask(64, causal=False), "forward")
        assert (found.sent.kv_rows, found.sent.messages) == (192, 12)


def test_a_window_ends_the_walk() -> None:
    """w keys back on contiguous shards of 16: ceil(w / 16) hops beyond the own chunk."""
    for window, hops in ((0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3), (63, 3)):
        found = walk.plan("contiguous", 64, 4, Mask(64, True, window), "forward")
        assert len(found.hops[0]) == 1 + hops


def needs(name: str, padded: int, ranks: int, mask: Mask) -> dict[tuple[int, int], set[int]]:
    """(query rank, key rank) -> local key rows that some query row sees."""
    return {
        (query, key): set(np.flatnonzero(block.any(0)).tolist())
        for query, key, block in blocks(name, padded, ranks, mask)
    }


def span(rows: walk.Rows) -> set[int]:
    return set(range(rows.start, rows.stop))


def check_forward(
    found: walk.Walk, required: dict[tuple[int, int], set[int]], padded: int, ranks: int
) -> None:
    """Carries the rows hop by hop, and lets every rank take what it needs."""
    length = len(found.hops[0])
    held = [set(range(padded // ranks)) for _ in range(ranks)]  # of the chunk at hand, by rank
    met = {pair: set[int]() for pair in required}
    kv_rows = messages = 0
    for at in range(length):
        for rank in range(ranks):
            hop = found.hops[rank][at]
            assert hop.owner == (rank - at * found.direction) % ranks
            assert span(hop.held) == held[rank]
            assert span(hop.need) <= held[rank], "computes with rows that it has"
            assert span(hop.forward) <= held[rank], "sends rows that it has"
            met[rank, hop.owner] |= span(hop.need)
            kv_rows += hop.forward.size
            messages += bool(hop.forward)
        held = [
            span(found.hops[(rank - found.direction) % ranks][at].forward) for rank in range(ranks)
        ]
    assert not any(held), "the last hop sends nothing"
    for pair, rows in required.items():
        assert rows <= met[pair], f"{pair} never met {rows - met[pair]}"
        assert met[pair] == hull(rows), "hulls are tight"
    assert found.sent.kv_rows == kv_rows
    # No message holds more than the hull of what ranks further on need.
    for owner in range(ranks):
        for at in range(1, length):
            there = [(owner + hop * found.direction) % ranks for hop in range(at, length)]
            later = set[int]().union(*(required[rank, owner] for rank in there))
            assert held_at(found, owner, at) == hull(later)


def held_at(found: walk.Walk, owner: int, at: int) -> set[int]:
    rank = (owner + at * found.direction) % len(found.hops)
    return span(found.hops[rank][at].held)


def hull(rows: set[int]) -> set[int]:
    return set(range(min(rows), max(rows) + 1)) if rows else set()


def check_backward(
    found: walk.Walk, required: dict[tuple[int, int], set[int]], padded: int, ranks: int
) -> None:
    """Each rank adds 1 to every row that it needs of each chunk: all must come home, once."""
    length = len(found.hops[0])
    shard = padded // ranks
    home = [np.zeros((ranks, shard), int) for _ in range(ranks)]  # by contributing rank
    travelling: dict[int, np.ndarray] = {}  # owner -> the sum on its way
    kv_messages = np.zeros(ranks, int)
    sum_messages = np.zeros(ranks, int)
    sum_rows = 0
    for at in range(length):
        for rank in range(ranks):
            hop = found.hops[rank][at]
            owner = hop.owner
            kv_messages[owner] += bool(hop.forward)
            mine = np.zeros((ranks, shard), int)
            mine[rank, hop.need.start : hop.need.stop] = 1
            if at == 0:
                assert not hop.sum_in
                home[owner] += mine
                continue
            assert span(hop.need) <= span(hop.sum_out)
            arrived = travelling.pop(owner, None)
            assert (arrived is None) == (not hop.sum_in)
            if arrived is not None:
                assert span(hop.sum_in) <= span(hop.sum_out)
                outside = np.ones(shard, bool)
                outside[hop.sum_in.start : hop.sum_in.stop] = False
                assert not arrived[:, outside].any(), "the message holds all that was summed"
                mine += arrived
            if not hop.sum_out:
                assert not mine.any()
                continue
            visited = [(owner + one * found.direction) % ranks for one in range(1, at + 1)]
            summed = set[int]().union(*(required[one, owner] for one in visited))
            assert span(hop.sum_out) == hull(summed), "no message holds rows that nobody summed"
            sum_rows += hop.sum_out.size
            sum_messages[owner] += 1
            if hop.sum_to == owner:
                coming = found.home[owner]
                assert coming == (hop.sum_out, rank, at), "the owner knows who sends it home"
                home[owner] += mine
            else:
                assert hop.sum_to == (rank + found.direction) % ranks
                assert hop.forward, "the sum follows the rows that it belongs to"
                travelling[owner] = mine
    assert not travelling, "no sum is left on the way"
    assert found.sent.sum_rows == sum_rows
    assert (kv_messages <= ranks - 1).all()
    assert (sum_messages <= max(0, ranks - 1)).all()
    assert found.sent.messages == kv_messages.sum() + sum_messages.sum()
    for owner in range(ranks):
        assert (found.home[owner] is None) == (sum_messages[owner] == 0)
        for rank in range(ranks):
            rows = required[rank, owner]
            expected = np.zeros(shard, int)
            expected[list(hull(rows))] = 1
            assert np.array_equal(home[owner][rank], expected), (rank, owner)


def check(name: str, padded: int, ranks: int, mask: Mask) -> None:
    required = needs(name, padded, ranks, mask)
    for weights in ((1, 1), (2, 4)):
        forward = walk.plan(name, padded, ranks, mask, "forward", *weights)
        check_forward(forward, required, padded, ranks)
        backward = walk.plan(name, padded, ranks, mask, "backward", *weights)
        check_forward(backward, required, padded, ranks)
        check_backward(backward, required, padded, ranks)


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_small_walks_exhaustively(name: str, ranks: int) -> None:
    for seq_len in (1, 5, 16, 23):
        for mask in masks(seq_len):
            check(name, padded_length(name, seq_len, ranks), ranks, mask)


@settings(deadline=None, max_examples=250)
@given(problems(most=8))
def test_any_walk(problem: tuple[str, int, int, Mask]) -> None:
    check(*problem)


@settings(deadline=None, max_examples=100)
@given(problems())
def test_the_cheaper_direction_is_taken(problem: tuple[str, int, int, Mask]) -> None:
    name, padded, ranks, mask = problem
    pairs = geometry.pairs(name, padded, ranks, mask)
    up, down = walk.traffic(pairs, +1), walk.traffic(pairs, -1)
    for which in ("forward", "backward"):
        costs = []
        for moved in (up, down):
            counted = walk.sent(moved, which)
            costs.append(counted.kv_rows * 2 + counted.sum_rows * 4)
        taken, _ = walk.cheaper(up, down, which, 2, 4)
        assert costs[0 if taken is up else 1] == min(costs)
        if costs[0] == costs[1]:
            assert taken is up
        found = walk.plan(name, padded, ranks, mask, which, 2, 4)
        assert found.direction == taken.direction
        assert found.sent == walk.sent(taken, which)
