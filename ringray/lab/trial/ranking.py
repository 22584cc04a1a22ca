"""The order of points by their times, and what their samples decide of it.

The one rule by which texts, tables, figures, MLflow and searches name a fastest point. Values are
logarithms, so that noise is a share of the value.

*Value*: the median ratio to the baseline where all points were measured in turns with the same
one, as a drift of the machine's speed cancels in each pair; else the metric itself. Of replicas the
median counts.

*Variance*: that of the median by its samples (a bootstrap), and that between replicas, at least
that of all points together; of a point without replicas :data:`ALONE` is assumed between trials.
The drift of the baseline is added: a point whose baseline took longer than that of another point
may owe a part of its value to the load, all of it if there is no ratio, and a share
:data:`REACTION` else, as a ring does not react to a load exactly as its baseline does.

*Decision*: the first point is the best if it is better than each other one by a one-sided test of
Welch (1947), with the level :data:`WRONG` divided by the number of others (Bonferroni), so that
points that are equal do not yield a best one by their number (multiple comparisons with the best,
Hsu, Annals of Statistics 12, 1984).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ringray.base.units import plural
from ringray.lab.trial.metrics import METRICS, Metric
from ringray.lab.trial.outcome import Outcome, TrialRow, measured_enough, runs_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WRONG = 0.025  # share of rankings of equal points that may name a best one
ALONE = 0.02  # noise between trials of one point where no replicas tell it, as a share
REACTION = 0.07  # by which share a ring and its baseline may react differently to a load
_RUNS = 3  # fewer runs have no spread
_REPEATS = 200  # resamples of the repeats of a trial

Part = tuple[float, float]  # a variance and its degrees of freedom
Undecided = Literal["", "runs", "drift", "noise"]


def variance_of_median(repeats: Sequence[float]) -> float:
    """Returns the variance of the logarithm of the median, by resampling the repeats."""
    import numpy as np

    if len(repeats) < _RUNS:
        return 0.0
    low, high = _middle(len(repeats))
    logs = np.log(np.sort(repeats))
    return float(np.var((logs[low] + logs[high]) / 2)) * len(repeats) / (len(repeats) - 1)


@cache
def _middle(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the places of both middle values in resamples of ``count`` values, by size."""
    import numpy as np

    chosen = np.sort(np.random.default_rng(0).integers(0, count, (_REPEATS, count)))
    return chosen[:, (count - 1) // 2], chosen[:, count // 2]


def welch(parts: Sequence[Part]) -> tuple[float, float]:
    """Returns the standard deviation of a sum of parts, and its degrees of freedom by Welch and
    Satterthwaite."""
    variance = sum(part for part, _ in parts)
    if not 0 < variance < math.inf:
        return math.sqrt(variance), 1.0
    inverse = sum((part / variance) ** 2 / degrees for part, degrees in parts)
    return math.sqrt(variance), 1 / max(1e-9, inverse)


class Estimate(NamedTuple):
    """A logarithm and the parts of its variance."""

    value: float
    parts: tuple[Part, ...]

    def chance(self, other: Estimate | None = None) -> float:
        """Returns the probability, were both equal, that it lies so far below the ``other``, or
        below 0."""
        from scipy.special import stdtr

        deviation, freedom = welch(self.parts + (other.parts if other else ()))
        apart = self.value - (other.value if other else 0.0)
        # Exact values differ or not; of values with too few runs nothing is known.
        if not 0 < deviation < math.inf:
            return float(deviation > 0 or apart >= 0)
        return float(stdtr(freedom, apart / deviation))


@dataclass(frozen=True)
class RankedPoint:
    """A point to rank: the config and the ok results of its replicas."""

    key: str
    config: Mapping[str, Any]
    replicas: Sequence[Outcome | TrialRow]


@dataclass(frozen=True)
class Ranking:
    """Points in the order of their values, the best first; see :func:`rank`.

    ``paired``: values are ratios to the baseline; ``drift``: the longest time of the baseline over
    the shortest; ``undecided``: why the first is not told from the ``rivals``, "" without any.
    """

    keys: tuple[str, ...]
    values: Mapping[str, Estimate]
    paired: bool
    drift: float
    rivals: tuple[str, ...]
    undecided: Undecided

    @property
    def winner(self) -> str | None:
        """The key of the best of several points; None where that is not decided."""
        return self.keys[0] if len(self.keys) > 1 and not self.undecided else None

    def behind(self, key: str) -> float:
        """Returns by which share a point is worse than the first."""
        return math.exp(self.values[key].value - self.values[self.keys[0]].value) - 1

    def why(self, names: Mapping[str, str]) -> str:
        """Writes why no point is the best; ``names``: of the points, by key."""
        first, *others = (names[key] for key in (*self.keys[:1], *self.rivals))
        both = f"{first} and " + (others[0] if len(others) == 1 else plural(len(others), "other"))
        reasons = {
            "runs": f"too few runs to tell {both} apart",
            "drift": f"the baseline drifted by {self.drift:.1f} ×, {both} are within that",
            "noise": f"{both} are within their noise",
        }
        return f"not decided: {reasons[self.undecided]}" if self.undecided else ""


def rank(points: Iterable[RankedPoint], metric: str = "median_ms") -> Ranking:
    """Ranks the points that have the metric and at least half as many runs as any other."""
    having = [
        point
        for point in points
        if point.replicas
        and all(math.isfinite(row.metrics.get(metric, math.nan)) for row in point.replicas)
    ]
    runs = {point.key: sum(map(runs_of, point.replicas)) for point in having}
    enough = measured_enough(runs)
    among = [point for point in having if point.key in enough]
    bases = {point.key: _baseline(point.config) for point in among}
    paired = len(set(bases.values())) == 1 and all(
        row.metrics.get("ratio", 0) > 0 for point in among for row in point.replicas
    )
    paired &= timed(metric) and None not in bases.values()
    slowed = _slowed(among, bases) if timed(metric) else {}
    decisive = METRICS["ratio" if paired else metric]
    between, reaction = _between(among, decisive), REACTION if paired else 1.0
    values = {
        point.key: _estimate(point, decisive, between, reaction * slowed.get(point.key, 0.0))
        for point in among
    }
    keys = tuple(sorted(values, key=lambda key: values[key].value))
    level = WRONG / max(1, len(keys) - 1)

    def not_told(estimates: Mapping[str, Estimate]) -> tuple[str, ...]:
        return tuple(key for key in keys[1:] if estimates[keys[0]].chance(estimates[key]) >= level)

    undecided: Undecided = ""
    # The drift of the baseline is the reason if without its part the first would be the best.
    if rivals := not_told(values):
        steady = {key: Estimate(x.value, x.parts[:-1]) for key, x in values.items()}
        few = any(welch(values[key].parts)[0] == math.inf for key in (keys[0], *rivals))
        undecided = "runs" if few else "noise" if not_told(steady) else "drift"
    drift = math.exp(max(slowed.values(), default=0.0))
    return Ranking(keys, values, paired, drift, rivals, undecided)


def timed(metric: str) -> bool:
    """Tells whether a metric depends on the load of the machine."""
    return METRICS[metric].predicted == "time_ms" or metric == "ratio"


def _baseline(config: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Returns what the baseline of a point computes beside the problem; None without one."""
    if not config.get("baseline"):
        return None
    threads = config.get("baseline_threads")
    # A baseline on the ring has no threads of its own, and another time on another ring.
    on_ring = (config.get("ring_size"), config.get("threads")) if threads is None else ()
    return config["baseline"], threads, *on_ring


def _slowed(
    points: Sequence[RankedPoint], bases: Mapping[str, tuple[Any, ...] | None]
) -> dict[str, float]:
    """Returns the logarithm of the time of each point's baseline over the shortest of the same
    baseline."""
    logs = {
        point.key: statistics.fmean(map(math.log, times))
        for point in points
        if (times := [x for row in point.replicas if (x := row.metrics.get("baseline_ms", 0)) > 0])
    }
    least: dict[object, float] = {}
    for key, log in logs.items():
        least[bases[key]] = min(log, least.get(bases[key], log))
    return {key: log - least[bases[key]] for key, log in logs.items()}


def _logs(point: RankedPoint, metric: Metric) -> list[float]:
    sign = 1 if metric.less_is_better else -1
    return [sign * math.log(max(row.metrics[metric.name], 1e-300)) for row in point.replicas]


def _between(points: Sequence[RankedPoint], metric: Metric) -> Part:
    """Returns the variance between replicas of all points together."""
    several = [_logs(point, metric) for point in points if len(point.replicas) > 1]
    freedom = sum(len(logs) - 1 for logs in several)
    squares = sum((len(logs) - 1) * statistics.variance(logs) for logs in several)
    return squares / max(1, freedom), float(freedom)


def _estimate(point: RankedPoint, metric: Metric, between: Part, drift: float) -> Estimate:
    """Returns the value of a point and its variance; that of the ``drift`` comes last."""
    logs, count = _logs(point, metric), len(point.replicas)
    centre = statistics.median(logs)
    if metric.exact:
        return Estimate(centre, ((0.0, 1.0),))
    within = [_within(row, metric.median_of) for row in point.replicas]
    share = statistics.fmean(variance for variance, _ in within) / count
    part: Part = (share, float(sum(freedom for _, freedom in within)))
    alone: Part = (ALONE**2, math.inf)
    if count > 1:
        own = max(between[0], statistics.variance(logs)) / count
        # The variance of the median of three and more: of normal values pi / 2 times the mean's.
        part = max(part, (own * (1 if count == 2 else math.pi / 2), between[1]))
        alone = (0.0, 1.0)
    return Estimate(centre, (part, alone, (drift**2 / count, math.inf)))


def _within(result: Outcome | TrialRow, median_of: str) -> Part:
    """Returns the variance of a trial's median by its samples."""
    samples = [x for x in result.samples.get(median_of or "ms", ()) if 0 < x < math.inf]
    if len(samples) >= _RUNS:
        return variance_of_median(samples), len(samples) - 1
    low, high = (result.metrics.get(name, 0.0) for name in ("p20_ms", "p80_ms"))
    if not samples and 0 < low <= high:  # restored without samples: a normal distribution's
        deviation = math.log(high / low) / 1.683  # of which p20 and p80 are 0.8416 away from it
        return math.pi / 2 * deviation**2 / _RUNS, _RUNS - 1  # of as few runs as have a spread
    return math.inf, 1.0
