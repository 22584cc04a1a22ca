"""``halving``: measures many points a few times, the better ones more often, the best in full.

Successive halving with repeats as the resource (Jamieson and Talwalkar, AISTATS 2016), in its
asynchronous form (Li et al., MLSys 2020): rungs stay open. After a first run of each point, the
best few that are not measured in full yet get twice as many runs, whatever their rung, so that an
unlucky point returns once the points ahead of it prove slower. Points whose interval lies above
another's get no further run. Where the budget does not allow one run of every point, the cost model
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

_WIDTH = 3  # points of one round, which may be measured in parallel


def search(candidates: Sequence[Candidate], settings: SearchSettings) -> Search:
    """Asks for all points in a first round, then for a few in each round."""
    rungs = _rungs(settings.repeats)
    left = settings.runs(len(candidates))
    # Runs that stay available to measure the best point in full.
    reserve = settings.warmup + settings.repeats - rungs[0] if len(rungs) > 1 else 0
    price = settings.warmup + rungs[0]
    first = min(len(candidates), max(1, (left - reserve) // price))
    asks = [Ask(one.key, rungs[0]) for one in ranked(candidates, lambda one: one.predicted)[:first]]
    had: dict[str, int] = {}
    known: dict[str, Told] = {}

    def scores(key: str) -> tuple[float, ...]:
        return known[key].scores or ()

    while asks:
        left -= sum(settings.warmup + ask.repeats - had.get(ask.key, 0) for ask in asks)
        had |= {ask.key: ask.repeats for ask in asks}
        known |= yield asks
        able = [key for key in had if known[key].scores is not None]
        best = ranked(contenders(able, known), scores)
        full = any(had[key] == settings.repeats for key in best)
        asks, spent = [], 0 if full else reserve
        for key in [key for key in best if had[key] < settings.repeats][:_WIDTH]:
            repeats = rungs[rungs.index(had[key]) + 1]
            spent += settings.warmup + repeats - had[key]
            if spent <= left:
                asks.append(Ask(key, repeats, repeats == settings.repeats))
        if not asks and not full and best:
            asks = [Ask(best[0], settings.repeats, True)]


def _rungs(repeats: int) -> list[int]:
    """Returns the possible numbers of runs of a point: 1, 2, 4, ..., ``repeats``."""
    rungs = [repeats]
    while rungs[0] > 1:
        rungs.insert(0, (rungs[0] + 1) // 2)
    return rungs


METHOD = Method(search, "all points a few times, the better ones more often", ("budget",))
