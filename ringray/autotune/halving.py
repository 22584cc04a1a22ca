"""``halving``: many points a few times, the better ones more often, the best in full.

Successive halving (Jamieson and Talwalkar, AISTATS 2016) with repeats as the resource. A rung keeps
at most a third of its points, and of those only the ones whose intervals reach the best: where the
difference is beyond doubt no further run is spent on it. Where the budget does not allow one run of
every point, the cost model says which ones to begin with. Survivors are visited again in turns, in
alternating order, so that a machine whose speed drifts does not choose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringray.autotune.base import Ask, by_prediction, nondominated, spread, surely_worse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringray.autotune.base import Candidate, Search, Settings, Told

OPTIONS = ("budget",)
_KEEP = 3  # one in so many goes on to the next rung


def search(candidates: Sequence[Candidate], settings: Settings) -> Search:
    """A round per rung."""
    levels = _levels(settings.repeats)
    alive = [c.key for c in by_prediction(candidates)[: _first(len(candidates), levels, settings)]]
    known: dict[str, Told] = {}
    for rung, repeats in enumerate(levels):
        finalists = len(alive) <= _KEEP
        turn = alive if rung % 2 == 0 else reversed(alive)
        told = yield [Ask(key, repeats, finalists) for key in turn]
        known |= told
        alive = [key for key in alive if known[key].scores is not None]
        if not alive:
            return
        if rung + 1 < len(levels):
            alive = _survivors(alive, known, _next(len(told)))


def _levels(repeats: int) -> list[int]:
    """Runs that a point has had after each rung: 1, 3, 9, ..., ``repeats``."""
    levels = [repeats]
    while levels[0] > 1:
        levels.insert(0, max(1, levels[0] // _KEEP))
    return levels


def _next(points: int) -> int:
    return max(1, -(-points // _KEEP))


def _cost(points: int, levels: list[int], warmup: int) -> int:
    """Runs of all rungs, where nothing is dropped before it has to be."""
    total = before = 0
    for repeats in levels:
        total += points * (warmup + repeats - before)
        points, before = _next(points), repeats
    return total


def _first(points: int, levels: list[int], settings: Settings) -> int:
    """With how many points the budget allows to begin."""
    count, most = points, settings.runs(points)
    while count > 1 and _cost(count, levels, settings.warmup) > most:
        count -= 1
    return count


def _survivors(alive: list[str], known: dict[str, Told], most: int) -> list[str]:
    """At most ``most`` that may still be best, in the order of ``alive``."""
    noise = spread([known[key] for key in alive])
    able = [
        key
        for key in alive
        if not any(surely_worse(known[key], known[other], noise) for other in alive)
    ]
    kept: list[str] = []
    while able and len(kept) < most:
        scores = [known[key].scores or () for key in able]
        front = [able[i] for i in nondominated(scores)]
        front.sort(key=lambda key: known[key].scores or ())
        kept += front[: most - len(kept)]
        able = [key for key in able if key not in front]
    return [key for key in alive if key in kept]
