"""Trees of merges: every rank ends with every part, in one order, whatever the number of ranks."""

from __future__ import annotations

import pytest

from ringray.traffic.tree import meetings, messages


@pytest.mark.parametrize("ranks", [*range(1, 18), 31, 64])
def test_all_parts_are_merged_once_in_one_order(ranks: int) -> None:
    """Ranks do one meeting at a time; both sides of each have it as their next."""
    parts = [f"{rank}" for rank in range(ranks)]
    left = [list(meetings(ranks, rank)) for rank in range(ranks)]
    opposite = {"swap": "swap", "give": "merge", "merge": "give"}
    sent = 0
    while any(left):
        before = sum(map(len, left))
        for rank, steps in enumerate(left):
            if not steps or not steps[0].sends:
                continue
            peer, deed = steps[0]
            theirs = left[peer][0]
            if theirs.peer != rank or (deed == "swap" and rank > peer):
                continue
            assert theirs.deed == opposite[deed] or (deed, theirs.deed) == ("give", "take")
            low, high = sorted((rank, peer))
            both = f"({parts[low]} {parts[high]})"
            parts[peer] = parts[rank] if theirs.deed == "take" else both
            parts[rank] = both if deed == "swap" else parts[rank]
            sent += 2 if deed == "swap" else 1
            steps.pop(0)
            left[peer].pop(0)
        assert sum(map(len, left)) < before, "ranks wait for each other"
    assert len(set(parts)) == 1
    assert sorted(map(int, parts[0].replace("(", "").replace(")", "").split())) == list(
        range(ranks)
    )
    assert sent == messages(ranks)


def test_steps_grow_with_the_logarithm() -> None:
    assert max(len(meetings(64, rank)) for rank in range(64)) == 6
    assert max(len(meetings(65, rank)) for rank in range(65)) == 8
    assert [messages(ranks) for ranks in (1, 2, 3, 4, 8)] == [0, 2, 4, 8, 24]
