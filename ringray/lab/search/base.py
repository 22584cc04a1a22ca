"""What every method of search is given, what it asks and what it is told.

All scores are to be small: ``score`` turns the sign of a metric that is to be large.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ringray.lab.trial.metrics import METRICS

T = TypeVar("T")
Scores = tuple[float, ...]
NOISE = 0.1  # relative spread of one run, as long as nothing was measured twice
_SURE = 2.0  # standard errors on each side of a score


@dataclass(frozen=True)
class Candidate:
    """One point that can be measured. ``choices``: its values of the searched fields;
    ``predicted``: its scores by the cost model, infinite for an objective that it does not know."""

    key: str
    choices: tuple[tuple[str, Any], ...]
    predicted: tuple[float, ...]


@dataclass(frozen=True)
class SearchSettings:
    """``repeats`` is what a point gets that is measured in full, ``warmup`` what each visit costs
    before; ``budget`` is the share that may be spent of the runs that measuring every point in full
    takes; ``objectives``: how many."""

    repeats: int
    warmup: int
    budget: float
    seed: int
    objectives: int = 1

    def runs(self, points: int) -> int:
        """How many runs may be spent on a search among ``points`` of them."""
        return math.floor(self.budget * points * (self.warmup + self.repeats) + 1e-9)


class Ask(NamedTuple):
    """Measure this point until it has ``repeats`` runs that count, earlier visits included.
    ``together``: on the same device as all others of this round."""

    key: str
    repeats: int
    together: bool = False


@dataclass(frozen=True)
class Told:
    """What was measured: the scores, and the runs behind the first of them (empty where it is no
    time). ``scores`` is None where the point failed."""

    scores: tuple[float, ...] | None
    samples: tuple[float, ...] = ()


# Yields points to measure, which may be measured side by side; is sent what came of each by key;
# ends when it wants no more. The same candidates, settings and answers give the same questions, so
# that a search which was cut off is taken up by asking it again.
Search = Generator[list[Ask], dict[str, Told], None]


class Method(NamedTuple):
    """A method of search. ``summary``: a phrase for the spec's schema; ``options``: the fields of a
    spec's ``search`` that it takes beside method and objectives; ``exhaustive``: it measures every
    point."""

    search: Callable[[Sequence[Candidate], SearchSettings], Search]
    summary: str
    options: tuple[str, ...] = ()
    exhaustive: bool = False


def score(metric: str, value: float) -> float:
    """``value`` so that less is better."""
    return value if METRICS[metric].less_is_better else -value


def layers(items: Iterable[T], scores: Callable[[T], Scores]) -> Iterator[list[T]]:
    """Yields the Pareto front of ``items``, then the front of the rest, and so on.

    An item is in the front if no other is at least as good in all scores and better in one. Each
    layer is sorted by its scores; items of equal scores keep their order.
    """
    left = [(scores(item), item) for item in items]
    while left:
        least = min(score for score, _ in left)
        if len(least) == 1:
            front: set[Scores] = {least}
        else:
            known = {score for score, _ in left}
            front = {
                one
                for one in known
                if not any(
                    other != one and all(a <= b for a, b in zip(other, one, strict=True))
                    for other in known
                )
            }
        layer = [pair for pair in left if pair[0] in front]
        yield [item for _, item in sorted(layer, key=lambda pair: pair[0])]
        left = [pair for pair in left if pair[0] not in front]


def ranked(items: Iterable[T], scores: Callable[[T], Scores]) -> list[T]:
    """Returns ``items`` layer by layer, the best first."""
    return [item for layer in layers(items, scores) for item in layer]


def spread(told: Sequence[Told]) -> float:
    """Relative standard deviation of one run, the median over all points that have several."""
    found = [
        statistics.stdev(one.samples) / statistics.fmean(one.samples)
        for one in told
        if len(one.samples) > 1
    ]
    return statistics.median(found) if found else NOISE


def interval(told: Told, noise: float) -> tuple[float, float]:
    """Between which values the first score lies, almost surely."""
    assert told.scores is not None
    value = told.scores[0]
    width = _SURE * noise / math.sqrt(len(told.samples)) * abs(value) if told.samples else 0.0
    return value - width, value + width


def contenders(keys: Sequence[str], known: Mapping[str, Told]) -> list[str]:
    """Those of which none other is at least as good in every objective and better in the first
    beyond doubt (where that is no time: better in some)."""
    noise = spread([known[key] for key in keys])
    bounds = [(interval(known[key], noise), known[key].scores or ()) for key in keys]

    def surely_worse(low: float, scores: tuple[float, ...]) -> bool:
        return any(
            (high < low or (high == low and other != scores))
            and all(b <= a for a, b in zip(scores[1:], other[1:], strict=True))
            for (_, high), other in bounds
            if high <= low
        )

    return [
        key
        for key, ((low, _), scores) in zip(keys, bounds, strict=True)
        if not surely_worse(low, scores)
    ]
