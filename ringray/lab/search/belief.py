"""Beliefs about points: their predictions and their runs, each as far as it can be trusted.

The first score of a point is its prediction, times a factor that all points share, times an error.
How large errors are is learned from the points with runs, beginning with what the predictions say
of themselves (empirical Bayes). Scores are compared in logarithms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ringray.lab.search.base import LEAST, Candidate, Response, ranked

_NOISE = 0.1  # relative spread of one run before a point was measured twice
_OF_MEDIAN = 1.5  # variance of the median of some runs over that of their mean
_PRIOR = 2.0  # points that tell as much of the errors as the predictions say themselves
_SURE = 2.0  # standard deviations on each side
_UNKNOWN = 1.0  # deviation where nothing is predicted
_LEAST = 0.05  # deviation of any prediction


class Belief(NamedTuple):
    """The logarithm of a point's first score, and its standard deviation."""

    mean: float
    deviation: float

    def at(self, deviations: float) -> float:
        """Returns the value so many standard deviations above the mean."""
        return self.mean + deviations * self.deviation


def hopeful(candidates: Sequence[Candidate], results: Mapping[str, Response]) -> list[str]:
    """Returns the points that may be the best and did not fail: no other is at least as good in
    every objective and surely better in the first. Until ``LEAST`` have been measured, so many are.
    Those come first that would be the best if each were better than believed by a standard
    deviation."""
    able = [c for c in candidates if c.key not in results or results[c.key].scores is not None]
    others = {
        c.key: (results[c.key].scores or () if c.key in results else c.predicted)[1:] for c in able
    }
    beliefs = believe(able, results)
    rivals = sorted((belief.at(_SURE), others[key]) for key, belief in beliefs.items())

    def may_be_best(key: str) -> bool:
        low, scores = beliefs[key].at(-_SURE), others[key]
        for high, other in rivals:
            if high > low:
                break
            better = high < low or other != scores
            if better and all(b <= a for a, b in zip(scores, other, strict=True)):
                return False
        return True

    order = ranked(beliefs, lambda key: (beliefs[key].at(-1.0), *others[key]))
    least = LEAST if sum(point.key in results for point in able) < LEAST else 0
    return [key for place, key in enumerate(order) if place < least or may_be_best(key)]


def believe(candidates: Sequence[Candidate], results: Mapping[str, Response]) -> dict[str, Belief]:
    """Returns what is believed of points that did not fail, by their keys."""
    predicted = {point.key: _log(point.predicted[0]) for point in candidates}
    doubt = max((point.doubt for point in candidates), default=_UNKNOWN)
    if not all(map(math.isfinite, predicted.values())):
        predicted, doubt = dict.fromkeys(predicted, 0.0), _UNKNOWN
    runs = {key: results[key].samples for key in predicted if key in results}
    values = {key: _log(scores[0]) for key in runs if (scores := results[key].scores)}
    variances = _variances(runs)
    error = max(doubt, _LEAST) ** 2
    weights = {key: 1 / (error + variances[key]) for key in runs}
    apart = {key: values[key] - predicted[key] for key in runs}
    shared = sum(weights[key] * apart[key] for key in apart) / (sum(weights.values()) or 1.0)
    # A point tells of the errors what its runs do not explain.
    unexplained = {key: error * weight for key, weight in weights.items()}
    squares = {key: (apart[key] - shared) ** 2 - variances[key] for key in runs}
    learned = _PRIOR * error + sum(unexplained[key] * squares[key] for key in runs)
    error = max(learned / (_PRIOR + sum(unexplained.values())), error / _PRIOR**2)
    beliefs = {}
    for key, value in predicted.items():
        mean, variance = value + shared, error
        if key in runs:
            part = error / (error + variances[key])
            mean, variance = mean + part * (values[key] - mean), (1 - part) * error
        beliefs[key] = Belief(mean, math.sqrt(variance))
    return beliefs


def _variances(runs: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns the square of each point's standard error; 0 of scores that have no runs."""
    several = [samples for samples in runs.values() if len(samples) > 1]
    spreads = [statistics.stdev(samples) / statistics.fmean(samples) for samples in several]
    noise = _OF_MEDIAN * (statistics.median(spreads) if spreads else _NOISE) ** 2
    return {key: noise / len(samples) if samples else 0.0 for key, samples in runs.items()}


def _log(score: float) -> float:
    """Returns the logarithm of a score, shifted so that those below 0 keep their order."""
    return math.copysign(math.log(max(abs(score), 1e-300)) + 700, score) if score else 0.0
