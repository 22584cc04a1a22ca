"""``halving``: many points a few times, the better ones more often, the best in full.

Successive halving (Jamieson and Talwalkar, AISTATS 2016) with repeats as the resource. A rung keeps
at most a third of its points (fewer, if the budget is small), and of those only the ones whose
intervals reach the best: where the difference is beyond doubt no further run is spent on it. Where
the budget does not allow one run of every point, the cost model says which ones to begin with.
Survivors are visited again in turns, in alternating order, so that a machine whose speed drifts
does not choose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringray.autotune.base import Ask, by_prediction, nondominated, spread, surely_worse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringray.autotune.base import Candidate, Search, Settings, Told

OPTIONS = ("budget",)
_STEP = 3  # how much more often the points of the next rung are measured
_KEEP = (3, 4, 5, 6, 8, 12)  # one in so many goes on; more may, where the budget allows it
_FINALISTS = 3


def search(candidates: Sequence[Candidate], settings: Settings) -> Search:
    """A round per rung."""
    levels = _levels(settings.repeats)
    first, keep = _sizes(len(candidates), levels, settings)
    alive = [candidate.key for candidate in by_prediction(candidates)[:first]]
    known: dict[str, Told] = {}
    for rung, repeats in enumerate(levels):
        finalists = len(alive) <= _FINALISTS
        turn = alive if rung % 2 == 0 else reversed(alive)
        told = yield [Ask(key, repeats, finalists) for key in turn]
        known |= told
        alive = [key for key in alive if known[key].scores is not None]
        if not alive:
            return
        if rung + 1 < len(levels):
            alive = _survivors(alive, known, _next(len(told), keep))


def _levels(repeats: int) -> list[int]:
    """Runs that a point has had after each rung: 1, 3, 9, ..., ``repeats``."""
    levels = [repeats]
    while levels[0] > 1:
        levels.insert(0, max(1, levels[0] // _STEP))
    return levels


def _next(points: int, keep: int) -> int:
    return max(1, -(-points // keep))


def _cost(points: int, keep: int, levels: list[int], warmup: int) -> int:
    """Runs of all rungs, where nothing is dropped before it has to be."""
    total = before = 0
    for repeats in levels:
        total += points * (warmup + repeats - before)
        points, before = _next(points, keep), repeats
    return total


def _sizes(points: int, levels: list[int], settings: Settings) -> tuple[int, int]:
    """With how many points to begin, and one in how many to keep. All of them, if that can be: a
    run of each tells more than the cost model, which is a guess where ranks share cores."""
    most = settings.runs(points)
    for keep in _KEEP:
        if _cost(points, keep, levels, settings.warmup) <= most:
            return points, keep
    keep, first = _KEEP[-1], points
    while first > 1 and _cost(first, keep, levels, settings.warmup) > most:
        first -= 1
    return first, keep


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
