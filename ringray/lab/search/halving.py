"""``halving``: measures many points once, the best quarter of them more often, a few in full.

Successive halving with repeats as the resource (Jamieson and Talwalkar, AISTATS 2016), by quarters.
Points whose interval lies above another's get no further run, and what is left of the budget goes
to the best of the others. Where the budget does not allow one run of every point, the cost model
selects the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringray.lab.search.base import (
    Ask,
    Candidate,
    Method,
    Search,
    SearchSettings,
    Told,
    contenders,
    ranked,
)

_PART = 4  # one of so many points gets as many times the runs
_FINALISTS = 2  # points measured in full, at least
_WIDTH = 3  # further ones of a round, which may be measured in parallel


def search(candidates: Sequence[Candidate], settings: SearchSettings) -> Search:
    """Asks for many points in a first round, then for fewer in each round."""
    warmup, left = settings.warmup, settings.runs(len(candidates))
    best = [one.key for one in ranked(candidates, lambda one: one.predicted)]
    had = dict.fromkeys(best, 0)
    known: dict[str, Told] = {}
    rounds = _rounds(len(candidates), settings, left)
    while best:
        points, repeats = rounds.pop(0) if rounds else (_WIDTH, settings.repeats)
        asks, spent = [], 0
        for key in [key for key in best if had[key] < repeats][:points]:
            spent += warmup + repeats - had[key]
            if spent <= left or not any(had.values()):
                asks.append(Ask(key, repeats, repeats == settings.repeats))
        if not asks:
            return
        left -= sum(warmup + repeats - had[ask.key] for ask in asks)
        had |= {ask.key: repeats for ask in asks}
        known |= yield asks
        best = _best(had, known)


def _best(had: dict[str, int], known: dict[str, Told]) -> list[str]:
    """Returns the points that may be the best, those with the most runs first."""
    able = [key for key, told in known.items() if told.scores is not None]
    by_score = ranked(contenders(able, known), lambda key: known[key].scores or ())
    return sorted(by_score, key=lambda key: -had[key])


def _rounds(points: int, settings: SearchSettings, left: int) -> list[tuple[int, int]]:
    """Returns the points and repeats of each round, for as many points as the runs allow."""
    found = _quarters(1, settings.repeats)
    for count in range(2, points + 1):
        more, price, before = _quarters(count, settings.repeats), 0, 0
        for some, repeats in more:
            price += some * (settings.warmup + repeats - before)
            before = repeats
        if price <= left:
            found = more
    return found


def _quarters(points: int, repeats: int) -> list[tuple[int, int]]:
    found, runs = [], 1
    while points > _FINALISTS and runs < repeats:
        found.append((points, runs))
        points = max(_FINALISTS, -(-points // _PART))
        runs = runs * _PART if 2 * _PART * runs <= repeats else repeats
    return [*found, (points, repeats)]


METHOD = Method(search, "all points once, the better quarter again, a few in full", ("budget",))
