"""The noise of two sweeps: which changes of their points are beyond it.

Values are compared as logarithms, so that noise is a share of the value. A value is

    point + change of B + state of the machine in this turn + noise of the point

*Noise of a point*: the variance between its replicas, at least what the spread of its repeats
explains. Points differ in it, and few replicas tell little of it, so that each takes a part of what
the others show, the less the more they differ among each other: the moderated variances of Smyth
(Statistical Applications in Genetics and Molecular Biology 3, 2004), with a cautious estimate of
how alike the points are.

*State of the machine*: replicas are measured in turns, and what a turn moves is the median over all
points. It has the few degrees of freedom of the turns, however many points there are. Sides that
were measured in turns of their own, A, B, A, B, are compared round by round, without what both
share; of sides that were measured one after the other, the trend within them goes on between them.

*Changes*: a t-test with Welch's degrees of freedom. If changes of points differ among each other by
more than that (replicas that follow each other are alike), the noise grows accordingly, as in
genomic control (Devlin and Roeder, Biometrics 55, 1999). In at most 2.5% of comparisons without a
change the whole or any point seems to have changed (Bonferroni).

*Few replicas* may agree by chance, as where a machine has two states. A point with two or three has
changed only if it changed by clearly more than replicas of any other point differ; where no other
points tell that, :data:`UNKNOWN` is added. The whole has changed only by more than replicas of nine
in ten points do, where there are two, or where neighbours show that the machine changed in the
middle of a turn. Of a point that was measured once nothing tells how much two measurements differ
without a change, so that it is never decided; of the whole, :data:`UNKNOWN` is assumed for what
moves all points.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.special import digamma, polygamma, stdtrit

from ringray.lab.trial.ranking import Part, welch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

WRONG = 0.025  # share of comparisons without a change that may show one
UNKNOWN = 0.05  # noise of a measurement where nothing tells it, as a share
_AGREE = 3  # replicas that may agree by chance
_BEYOND = 1.5  # times the difference of other points' replicas, from which a change counts then
_GUESSED = 3  # degrees of freedom of a noise that is assumed
_FEW = 6  # points from which their changes tell of the noise
_ALIKE = 3  # points from which they tell of each other, and of the state of the machine
_RESAMPLED = 1000  # of the points of a sweep
_LEAST = 1e-10  # variance of any measurement


class Effect(NamedTuple):
    """A change of a point or of the whole."""

    ratio: float  # B over A
    low: float  # it lies between these in 95% of comparisons
    high: float
    surely_low: float  # all changes of a comparison lie between these in 97.5% of them
    surely_high: float


class Values(NamedTuple):
    """The values of a point on one side, in the order of measurement."""

    logs: list[float]  # logarithms
    within: list[float]  # the variance of each that its repeats explain


class SweepNoise:
    """The noise of points with values on both sides."""

    def __init__(self, values: Sequence[Sequence[Values]], exact: bool, paired: bool) -> None:
        """``paired``: the logarithms are of rounds A, B, A, B, each with all points."""
        self._exact, self._paired = exact, paired
        sides = [[np.array(side.logs) for side in pair] for pair in values]
        within = np.array([[statistics.fmean(side.within) for side in pair] for pair in values])
        if paired:  # what both sides of a round share is no change
            sides = [[np.zeros(1), b - a] for a, b in sides]
        noisy = [pair[1:] if paired else pair for pair in sides]  # not the zeros
        self._changes = np.array([np.median(b) - np.median(a) for a, b in sides])
        self._count = count = len(sides)

        def of_median(logs: Array) -> float:
            """Returns the variance of a median over that of a replica: of three and more it is that
            of a mean times pi / 2, of a normal distribution."""
            return (1 if len(logs) < 3 else math.pi / 2) / len(logs)

        self._share = np.array([sum(map(of_median, pair)) for pair in noisy])
        rest = [[logs - logs.mean() for logs in pair] for pair in sides]
        freedom = np.array([float(sum(len(logs) - 1 for logs in pair)) for pair in sides])
        self.assumed = not exact and not freedom.any()
        turns = self._turns(rest)
        if count >= _ALIKE:  # the noise of a point is what its turns do not explain
            for pair in rest:
                for side, moved in enumerate(turns):
                    if len(pair[side]) > 1:
                        pair[side] = pair[side] - moved[: len(pair[side])]
            freedom *= 1 - 1 / count  # each turn took one of its points
        squares = np.array([sum(float(logs @ logs) for logs in pair) for pair in rest])
        self._replicas = [min(map(len, pair)) for pair in noisy]
        self._moved_within_turns = _neighbours_alike(rest)
        self._ranges = np.array([max(float(np.ptp(logs)) for logs in pair) for pair in rest])
        # A difference of rounds has the noise of both sides.
        within = within.sum(1) if paired else within.mean(1)
        own = np.maximum(squares / np.maximum(freedom, 1e-9), np.maximum(within, _LEAST))
        self._machine = self._of_turns(turns)
        self._variance, self._freedom = _moderated(own, freedom)
        if self.assumed:
            self._freedom[:] = _GUESSED
        self._variance *= self._beyond()

    def _turns(self, rest: Sequence[Sequence[Array]]) -> list[Array]:
        """Returns how far each turn of a side moved its points, with as many as the longest has."""
        turns = []
        for side in zip(*rest, strict=True):
            longest = max(map(len, side))
            by_turn = [[logs[turn] for logs in side if turn < len(logs)] for turn in range(longest)]
            medians = [float(np.median(logs)) for logs in by_turn]
            turns.append(np.array(medians) - statistics.fmean(medians))
        return turns

    def _of_turns(self, turns: Sequence[Array]) -> list[Part]:
        """Returns the variances of a change that the state of the machine makes."""
        if self.assumed:
            return [(2 * UNKNOWN**2, _GUESSED)]
        freedom = sum(len(moved) - 1 for moved in turns)
        squares = sum(float(moved @ moved) for moved in turns)
        parts: list[Part] = []
        if self._count >= _ALIKE and freedom:
            share = float(np.median(self._share))
            parts.append((share * squares / freedom, float(freedom)))
        if not self._paired and min(map(len, turns)) >= _ALIKE:
            # The slope of a line through the turns, by least squares, and what it is between the
            # middles of A and B.
            places = [np.arange(len(turn)) - (len(turn) - 1) / 2 for turn in turns]
            moved = sum(float(x @ y) for x, y in zip(places, turns, strict=True))
            trend = moved / sum(float(x @ x) for x in places)
            parts.append(((trend * sum(map(len, turns)) / 2) ** 2, float(freedom)))
        return parts

    def _beyond(self) -> float:
        """Returns by how much the squares of changes are beyond what the noise explains."""
        if self._count < _FEW or self.assumed:
            return 1.0
        # Genomic control: the median of the absolute t statistics over that of Student's t.
        apart = np.abs(self._changes - np.median(self._changes))
        usual = stdtrit(self._freedom, 0.75)
        scale = np.sqrt(self._share * self._variance)
        return max(1.0, float(np.median(apart / np.maximum(scale, 1e-12) / usual)) ** 2)

    def points(self) -> list[Effect]:
        """Returns the change of each point."""
        part = 1 if self._count == 1 else 2  # the whole has the other half
        level = WRONG / part / self._count
        effects = []
        own = self._share * self._variance
        for index, (change, replicas) in enumerate(zip(self._changes, self._replicas, strict=True)):
            parts, least = [(own[index], self._freedom[index]), *self._machine], 0.0
            doubtful = replicas <= _AGREE or self._moved_within_turns
            if doubtful and self._count >= _ALIKE:
                # Its own replicas may agree by chance; those of the others tell how far apart
                # they could be.
                least = _BEYOND * float(np.delete(self._ranges, index).max())
            elif replicas < _AGREE:
                parts.append((self._share[index] * UNKNOWN**2, _GUESSED))
            least = math.inf if replicas < 2 else least
            effects.append(self._effect(float(change), parts, level, least))
        return effects

    def overall(self) -> Effect:
        """Returns the change of the sweep as a whole."""
        if self._count == 1:
            return self.points()[0]
        # A bootstrap over the points, with the correction n / (n - 1) of a sample's variance.
        change, random = float(np.median(self._changes)), np.random.default_rng(3)
        chosen = random.choice(np.sort(self._changes), (_RESAMPLED, self._count))
        drawn = float(np.var(np.median(chosen, axis=1))) * self._count / (self._count - 1)
        parts = [(drawn, self._count - 1.0), *self._machine]
        doubtful = min(self._replicas) == 2 or self._moved_within_turns
        usual = _BEYOND * float(np.quantile(self._ranges, 0.9, method="higher"))
        least = usual if doubtful else 0.0
        if self._count < _ALIKE:  # what moves both at once is in the noise of each
            parts.append((float(np.mean(self._share * self._variance)), self._freedom.min()))
            least = math.inf if self.assumed else least
        return self._effect(change, parts, WRONG / 2, least)

    def _effect(self, change: float, parts: Sequence[Part], level: float, least: float) -> Effect:
        """Returns a change of that noise, which may be none up to ``least``."""
        deviation, freedom = welch([(0.0, 1.0)] if self._exact else parts)
        size, wide = (deviation * float(stdtrit(freedom, 1 - p / 2)) for p in (0.05, level))
        none = abs(change) if abs(change) <= least and not self._exact else 0.0
        surely = max(size, wide, none * 1.001)  # so that it holds no change
        ends = change, change - size, change + size, change - surely, change + surely
        return Effect(*(math.exp(min(end, 700.0)) for end in ends))


def _moderated(own: Array, freedom: Array) -> tuple[Array, Array]:
    """Returns variances that each take a part of what all points show, and their degrees of
    freedom."""
    varied = freedom > 0
    count = int(varied.sum())
    if count < _ALIKE:
        return own, np.maximum(freedom, 1e-3)
    # Smyth's estimates from log variances: their mean and spread beyond those of log chi-squared.
    half = freedom[varied] / 2
    logs = np.log(own[varied]) - digamma(half) + np.log(half)
    chance = float(np.mean(polygamma(1, half)))
    seen = float(np.var(logs, ddof=1))
    # One standard deviation more than was seen: points that seem alike by chance are not pooled.
    differ = seen - chance + max(seen, chance) * math.sqrt(2 / (count - 1))
    differ = max(differ, 1e-3)
    # Twice the place of the trigamma function, 1/x + 1/(2x²) but for higher terms.
    prior = (1 + math.sqrt(1 + 2 * differ)) / differ
    usual = math.exp(statistics.fmean(logs) + float(digamma(prior / 2)) - math.log(prior / 2))
    return (prior * usual + freedom * own) / (prior + freedom), prior + freedom


def _neighbours_alike(rest: Sequence[Sequence[Array]]) -> bool:
    """Tells whether points that follow each other differ likewise between turns, which independent
    noise does in one of five sweeps: the machine changed in the middle of a turn."""
    products = [
        float(logs[:shorter] @ following[:shorter])
        for side in zip(*rest, strict=True)
        for logs, following in pairwise(side)
        if (shorter := min(len(logs), len(following)))
    ]
    # Their sum over its standard deviation, were they independent: above 0.8 with chance 0.2.
    return sum(products) > 0.8 * math.hypot(*products) > 0
