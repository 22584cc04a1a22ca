"""Interface of a search method: candidates, settings, its requests and their results.

Less is better for every score: ``score`` changes the sign of metrics to maximise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ringray.lab.trial.metrics import METRICS

T = TypeVar("T")
Scores = tuple[float, ...]
LEAST = 3  # points that the runs of any search suffice to measure in full


@dataclass(frozen=True)
class Candidate:
    """A point that can be measured. ``choices``: its values of the searched fields; ``predicted``:
    its scores by the cost model, infinite for objectives that it does not predict; ``doubt``: the
    relative standard deviation of the first of them."""

    key: str
    choices: tuple[tuple[str, str | int | None], ...]
    predicted: tuple[float, ...]
    doubt: float = 0.3


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search. ``repeats``: runs of a point measured in full; ``warmup``: further
    runs of each visit; ``budget``: the share that it may spend of the runs that measure every
    point in full; ``objectives``: their number; ``beaten_points``: points that the prediction
    rules out, whose share the others get; ``besides``: runs that follow the search."""

    repeats: int
    warmup: int
    budget: float
    seed: int
    objectives: int = 1
    beaten_points: int = 0
    besides: int = 0

    def runs(self, points: int) -> int:
        """Returns the number of runs that a search among ``points`` points may spend: its share,
        and at least those of ``LEAST`` points in full."""
        each = self.warmup + self.repeats
        share = math.ceil(self.budget * (points + self.beaten_points) * each - 1e-9)
        return max(share - self.besides, min(points, LEAST) * each)


class Request(NamedTuple):
    """Request to measure a point until it has ``repeats`` runs, earlier visits included.
    ``together``: on the same device as the rest of the round."""

    key: str
    repeats: int
    together: bool = False


@dataclass(frozen=True)
class Response:
    """Result of a point: its scores, and the runs behind the first of them (empty where it is not a
    time). ``scores`` is None where the point failed."""

    scores: tuple[float, ...] | None
    samples: tuple[float, ...] = ()


# Yields rounds of requests, which may be measured in parallel; receives their results by key; ends
# when it has no further request. A method is deterministic: replaying the stored results resumes an
# interrupted search.
Search = Generator[list[Request], dict[str, Response], None]


class Method(NamedTuple):
    """A method of search. ``summary``: a phrase for the spec's schema; ``options``: the fields of a
    spec's ``search`` that it takes beside method and objectives; ``exhaustive``: it measures every
    point; ``extreme``: it finds the largest one that works, not the best."""

    search: Callable[[Sequence[Candidate], SearchSettings], Search]
    summary: str
    options: tuple[str, ...] = ()
    exhaustive: bool = False
    extreme: bool = False


def followed_by(search: Search, keys: Sequence[str], repeats: int) -> Search:
    """Asks as ``search`` does, and at its end for ``repeats`` runs of ``keys``."""
    yield from search
    if keys:
        yield [Request(key, repeats, together=True) for key in keys]


def score(metric: str, value: float) -> float:
    """Returns ``value`` as a score."""
    return value if METRICS[metric].less_is_better else -value


def layers(items: Iterable[T], scores: Callable[[T], Scores]) -> Iterator[list[T]]:
    """Yields the Pareto front of ``items``, then the front of the rest, and so on.

    An item is in the front if no other is at least as good in all scores and better in one. Each
    layer is sorted by its scores; items of equal scores keep their order.
    """
    remaining = sorted(((scores(item), item) for item in items), key=lambda pair: pair[0])
    while remaining:
        front: set[Scores] = set()
        for mine, _ in remaining:  # sorted: an item that is better in all scores comes before
            if mine not in front and not any(
                all(a <= b for a, b in zip(other, mine, strict=True)) for other in front
            ):
                front.add(mine)
        yield [item for mine, item in remaining if mine in front]
        remaining = [(mine, item) for mine, item in remaining if mine not in front]


def ranked(items: Iterable[T], scores: Callable[[T], Scores]) -> list[T]:
    """Returns ``items`` layer by layer, the best first."""
    whole = list(items)
    if all(len(scores(item)) == 1 for item in whole):
        return sorted(whole, key=scores)
    return [item for layer in layers(whole, scores) for item in layer]
