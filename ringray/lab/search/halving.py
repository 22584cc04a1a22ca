"""``halving``: measures likely points once, the best quarter of them more often, a few in full.

Successive halving with repeats as the resource (Jamieson and Talwalkar, AISTATS 2016), by quarters.
What is believed of a point joins its prediction with its runs (``belief``). A point that is surely
worse than another gets no further run, not even its first, and what is left of the budget goes to
the best of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringray.lab.search.base import Candidate, Method, Request, Response, Search, SearchSettings
from ringray.lab.search.belief import hopeful

_PART = 4  # one of so many points gets as many times the runs
_FINALISTS = 2  # points measured in full, at least
_WIDTH = 3  # further ones of a round, which may be measured in parallel


def search(candidates: Sequence[Candidate], settings: SearchSettings) -> Search:
    """Asks for many points in a first round, then for fewer in each round."""
    warmup, runs = settings.warmup, settings.runs(len(candidates))
    had = {point.key: 0 for point in candidates}
    measured: dict[str, Response] = {}
    rounds: list[tuple[int, int]] = []
    while best := hopeful(candidates, measured):
        if not measured:
            rounds = _rounds(len(best), settings, runs)
        points, repeats = rounds.pop(0) if rounds else (_WIDTH, settings.repeats)
        asks, spent = [], 0
        for key in [key for key in best if had[key] < repeats][:points]:
            price = warmup + repeats - had[key]
            if spent + price <= runs:
                spent += price
                asks.append(Request(key, repeats, repeats == settings.repeats))
        if not asks:
            return
        runs -= spent
        had |= {ask.key: repeats for ask in asks}
        measured |= yield asks


def _rounds(points: int, settings: SearchSettings, runs: int) -> list[tuple[int, int]]:
    """Returns the points and repeats of each round, for as many points as the runs allow."""
    rounds = _quarters(1, settings.repeats)
    for count in range(2, points + 1):
        longer, price, before = _quarters(count, settings.repeats), 0, 0
        for some, repeats in longer:
            price += some * (settings.warmup + repeats - before)
            before = repeats
        if price <= runs:
            rounds = longer
    return rounds


def _quarters(points: int, repeats: int) -> list[tuple[int, int]]:
    quarters, runs = [], 1
    while points > _FINALISTS and runs < repeats:
        quarters.append((points, runs))
        points = max(_FINALISTS, -(-points // _PART))
        runs = runs * _PART if 2 * _PART * runs <= repeats else repeats
    return [*quarters, (points, repeats)]


METHOD = Method(search, "likely points once, the better quarter again, a few in full", ("budget",))
