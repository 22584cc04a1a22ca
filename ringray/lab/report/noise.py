"""The noise of two sweeps: which changes of their points are beyond it.

Values are compared as logarithms, so that noise is a share of the value. The noise of a point is
the spread between its replicas, and at least what the spread of its repeats explains. Few replicas
tell little of it, so that each point takes a part of what all points show: its variance is the mean
of its own and of the median point's.

Intervals come from a studentised bootstrap: differences of replicas from their point, of all
points, are drawn in place of its own ones, and each draw is measured by the noise that it shows
itself. If the changes of the points differ among each other by more than that, as they do on a
machine whose speed drifts, the intervals grow accordingly. In at most 2.5% of comparisons without
a change any point seems to have changed (Bonferroni).

The change of a sweep as a whole is the median over its points. Replicas are measured in turns, and
the state of the machine moves all points of one turn; the interval is that of the turns, or that of
points drawn again where it is wider. Sides that were measured in turns of their own, A, B, A, B,
are compared without what neighbouring rounds share: a slow drift of the machine. If every point was
measured once, nothing tells how much two measurements differ without a change, and :data:`UNKNOWN`
is assumed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Places = NDArray[np.int64]

WRONG = 0.05  # share of comparisons without a change that may show one
UNKNOWN = 0.05  # noise of a measurement where nothing tells it, as a share
_PRIOR = 3  # degrees of freedom that the noise of all points counts at each
_FEW = 8  # degrees of freedom from which the noise of all points is known
_DRAWS = 100_000  # of the noise: the limits of 1,000 points are in its outer 2 of 100,000
_RESAMPLED = 1000  # of the points of a sweep
_REPEATS = 100  # resamples of the repeats of a trial


class Interval(NamedTuple):
    """B over A, and where that lies in 95% of comparisons."""

    ratio: float
    low: float
    high: float


class Values(NamedTuple):
    """Logarithms of the values of a point on one side in the order of measurement, and the
    variances of each that its repeats explain."""

    logs: list[float]
    within: list[float]


def variance_of_median(repeats: Sequence[float]) -> float:
    """Returns the variance of the logarithm of the median, by resampling the repeats."""
    if len(repeats) < 3:
        return 0.0
    low, high = _middle(len(repeats))
    logs = np.log(np.sort(repeats))
    return float(np.var((logs[low] + logs[high]) / 2))


@cache
def _middle(count: int) -> tuple[Places, Places]:
    """Returns the places of both middle values in resamples of ``count`` values, by size."""
    chosen = np.sort(np.random.default_rng(0).integers(0, count, (_REPEATS, count)))
    return chosen[:, (count - 1) // 2], chosen[:, count // 2]


class SweepNoise:
    """The noise of points with values on both sides."""

    def __init__(self, values: Sequence[Sequence[Values]], exact: bool, paired: bool) -> None:
        """``paired``: the logarithms are of rounds A, B, A, B, each with all points."""
        self._values, self._exact = _without_drift(values) if paired else values, exact
        self._share = 0.5 if paired else 1.0  # of the degrees of freedom that the drift leaves
        centres = [[statistics.median(side.logs) for side in pair] for pair in self._values]
        self._changes = np.array([b - a for a, b in centres])
        measured = np.array([sum(len(side.logs) for side in pair) for pair in values])
        self._freedom = self._share * (measured - 2)
        squares = [
            sum((one - statistics.fmean(side.logs)) ** 2 for side in pair for one in side.logs)
            for pair in self._values
        ]
        own = np.array(squares) / np.maximum(self._freedom, 1)
        within = np.array([statistics.fmean(pair[0].within + pair[1].within) for pair in values])
        own, known = np.maximum(own, within), self._freedom > 0
        self.assumed = not exact and not known.any()
        self._all = self._of_all(own[known], within)
        weight = np.where(known, self._freedom, 0)
        total = (_PRIOR * self._all + weight * own) / (_PRIOR + weight)
        # Of one measurement of each point; that of the sweep as a whole beside it, where assumed.
        self._scale = np.sqrt(np.maximum(total, within))
        self._common = UNKNOWN if self.assumed else 0.0
        self._pool = self._standardised()

    def _of_all(self, own: Array, within: Array) -> float:
        """Returns the variance of the median point."""
        if self._freedom.sum() >= _FEW:
            return float(np.median(own))
        if len(self._changes) >= _FEW:  # measured once, but most of them did not change
            spread = np.median(np.abs(self._changes - np.median(self._changes)))
            return float((1.4826 * spread) ** 2 / 2)
        return max(UNKNOWN**2, float(np.median(within)))

    def _standardised(self) -> Array:
        """Returns differences of measurements from their point, of the variance 1 or more."""
        scale = np.maximum(self._scale, 1e-12)
        found: list[float] = []
        if self._freedom.sum() >= _FEW:
            found = [
                (one - statistics.fmean(side.logs)) / noise * math.sqrt(len(side.logs) / free)
                for pair, noise in zip(self._values, scale, strict=True)
                for side in pair
                if (free := len(side.logs) - 1)
                for one in side.logs
            ]
        elif len(self._changes) >= _FEW:
            found = list((self._changes - np.median(self._changes)) / scale / math.sqrt(2))
        if not any(found):
            return np.random.default_rng(1).standard_normal(_DRAWS)
        return np.sort(found) / min(1.0, float(np.std(found)))

    @cache  # noqa: B019  # as long as a comparison is made
    def _draws(self, a: int, b: int) -> Array:
        """Returns changes of a point of ``a`` and ``b`` replicas that did not change, in units of
        the noise that they show, by size."""
        random = np.random.default_rng(2)
        sides = [random.choice(self._pool, (_DRAWS, min(count, 32))) for count in (a, b)]
        spread = sum(((one - one.mean(1, keepdims=True)) ** 2).sum(1) for one in sides)
        noise = np.sqrt((_PRIOR + spread) / (_PRIOR + sum(one.shape[1] - 1 for one in sides)))
        return np.sort(np.abs(np.median(sides[1], 1) - np.median(sides[0], 1)) / noise)

    def intervals(self) -> list[tuple[Interval, bool]]:
        """Returns the change of each point, and whether it is beyond the noise of all points."""
        found = []
        scale = np.hypot(self._scale * self._beyond_replicas(), self._common)
        for change, noise, pair in zip(self._changes, scale, self._values, strict=True):
            draws = self._draws(*(len(side.logs) for side in pair))
            size = 0.0 if self._exact else float(noise * draws[int(_DRAWS * (1 - WRONG))])
            far = _DRAWS - np.searchsorted(draws, abs(change) / max(noise, 1e-12))
            surely = (far + 1) / _DRAWS * len(self._changes) < WRONG / 2
            found.append((_interval(change, size), bool(change) if self._exact else bool(surely)))
        return found

    def _beyond_replicas(self) -> float:
        """Returns by how much the changes differ among each other beyond what replicas explain: a
        machine drifts between sweeps, too."""
        if len(self._changes) < _FEW:
            return 1.0
        expected = self._scale * [
            self._draws(*(len(side.logs) for side in pair))[_DRAWS // 2] for pair in self._values
        ]
        apart = np.abs(self._changes - np.median(self._changes))
        return max(1.0, float(np.median(apart / np.maximum(expected, 1e-12))))

    def overall(self) -> tuple[Interval, bool]:
        """Returns the change of the sweep as a whole, and whether it is beyond the noise."""
        if len(self._changes) == 1:
            return self.intervals()[0]
        change, random = float(np.median(self._changes)), np.random.default_rng(3)
        chosen = random.choice(np.sort(self._changes), (_RESAMPLED, len(self._changes)))
        of_points = np.abs(np.median(chosen, axis=1) - change)
        size = float(np.quantile(of_points, 1 - WRONG))
        if not self._exact:
            size = max(size, float(np.quantile(np.abs(self._of_turns(random)), 1 - WRONG)))
        return _interval(change, size), abs(change) > size

    def _of_turns(self, random: np.random.Generator) -> Array:
        """Returns draws of the change that the state of the machine makes."""
        squares, freedom, measured = 0.0, 0.0, 0.0
        for side in range(2):
            logs = [pair[side].logs for pair in self._values]
            turns = int(statistics.median(map(len, logs)))
            moved = [
                statistics.median(one[at] - statistics.fmean(one) for one in logs if at < len(one))
                for at in range(turns)
            ]
            squares += sum((one - statistics.fmean(moved)) ** 2 for one in moved)
            freedom, measured = freedom + self._share * (turns - 1), measured + 1 / turns
        if not freedom:
            return random.standard_normal(_DRAWS) * UNKNOWN * math.sqrt(measured)
        return random.standard_t(freedom, _DRAWS) * math.sqrt(squares / freedom * measured)


def _without_drift(values: Sequence[Sequence[Values]]) -> list[list[Values]]:
    """Returns the values without what all points of neighbouring rounds share."""
    logs = np.array([[side.logs for side in pair] for pair in values])
    drift = np.median((logs - logs.mean(2, keepdims=True)).mean(1), axis=0)
    return [
        [Values(list(logs[at, side] - drift), one.within) for side, one in enumerate(pair)]
        for at, pair in enumerate(values)
    ]


def _interval(change: float, size: float) -> Interval:
    return Interval(*(math.exp(one) for one in (change, change - size, change + size)))
