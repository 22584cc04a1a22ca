"""The answer of a sweep: of each problem the fastest point, its lead, and its time beside the
baseline's. Texts, tables, MLflow and figures take their winners from here.

Of the points with at least half as many runs as the most measured one, the winner has the least
median time: the rule by which a search chooses. Replicas are one point.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from ringray.base import units
from ringray.lab.report import words
from ringray.lab.report.board import worst_error
from ringray.lab.report.figures import data
from ringray.lab.report.replicas import by_problem
from ringray.lab.trial.metrics import prediction_errors
from ringray.lab.trial.outcome import TrialRow, measured_enough, runs_of

TOLD = 12  # problems that are told one by one
_RUNS = 3  # fewer runs have no spread
_BUSY = 0.15  # share of a host's cores that other processes may use
_LONG_S = 0.5  # time of a trial whose load can be told: hosts count their time in steps of 10 ms


class Contest(NamedTuple):
    """The points of one problem, the fastest first. ``problem``: what tells it from the others, ""
    if it is the only one; ``names``: of the strategies of the first two."""

    ranking: list[TrialRow]
    problem: str
    names: list[str]

    @property
    def first(self) -> TrialRow:
        """The winner."""
        return self.ranking[0]

    @property
    def second(self) -> TrialRow | None:
        """The next, None of a problem that was measured in one way."""
        return self.ranking[1] if len(self.ranking) > 1 else None

    def lead(self) -> str:
        """Writes by how much the second is slower, and what the runs say of that."""
        assert self.second is not None
        first, second = self.first.metrics, self.second.metrics
        said = f"{second['median_ms'] / first['median_ms'] - 1:.1%}"
        if any(0 < runs_of(row) < _RUNS for row in self.ranking[:2]):
            return f"{said}, too few runs to be sure"
        # The faster fifth of the second reaches the slower fifth of the first.
        overlap = second.get("p20_ms", 0.0) <= first.get("p80_ms", 0.0)
        return f"{said}, within the spread" if overlap else said


def contests(rows: Iterable[TrialRow]) -> list[Contest]:
    """Returns a contest for each problem with a time, in the order of ``rows``."""
    rankings = []
    for same in by_problem(data.having(data.points(list(rows)), "median_ms")):
        among = measured_enough({row.key: runs_of(row) for row in same})
        by_time = sorted(same, key=lambda row: row.metrics["median_ms"])
        rankings.append([row for row in by_time if row.key in among])
    points = [row for ranking in rankings for row in ranking]
    problem = words.varying((row.config for row in points), words.PROBLEM)
    fields = data.strategies(points)
    return [
        Contest(one, data.problem(one[0], problem), [data.strategy(x, fields) for x in one[:2]])
        for one in rankings
    ]


def winners(rows: Iterable[TrialRow]) -> list[TrialRow]:
    """Returns the fastest point of each problem that was measured in several ways."""
    return [one.first for one in contests(rows) if one.second is not None]


def lines(rows: Sequence[TrialRow]) -> list[str]:
    """Writes the answer: a line for each problem, and one for the errors of kind correctness."""
    found = contests(rows)
    said = [_line(one) for one in found[:TOLD]]
    if len(found) > TOLD:
        said.append(f"and {len(found) - TOLD} more problems")
    shares = [(share, row) for row in rows if (share := worst_error(row.metrics)) is not None]
    if shares:
        worst, row = max(shares, key=lambda pair: pair[0])
        right = sum(share <= 1 for share, _ in shares)
        said.append(
            f"{right:,} of {units.plural(len(shares), 'trial')} within the error budget; the worst "
            f"takes {units.digits(worst)} of it: #{row.index + 1}"
        )
    statuses = {row.status for row in rows} - {None, "pruned"}
    if not said and statuses and "ok" not in statuses:
        said.append("none, because no trial ended well")
    return said


def _line(found: Contest) -> str:
    first, (name, *others) = found.first, found.names
    metrics, config = first.metrics, first.config
    at = found.problem and f"{found.problem}: "
    takes = f"{units.digits(metrics['median_ms'])} ms"
    if "peak_memory_bytes" in metrics:
        takes += f" and {units.memory(metrics['peak_memory_bytes'])} per rank"
    if not others:
        said = f"{at}{name} takes {takes}"
    else:
        said = f"{at}{name} is the fastest, {takes}; next {others[0]}, slower by {found.lead()}"
    if "ratio" in metrics:
        said += f"; {units.ratio(metrics['ratio'])} × the time of {words.baseline(config)}"
        ratios = sorted(first.samples.get("ratio", ()))
        fifth = len(ratios) // 5
        if len(ratios) >= _RUNS and ratios[fifth] <= 1 <= ratios[-1 - fifth]:
            said += ", equal within the spread"
    return said


def busy(rows: Iterable[TrialRow], cores: int) -> str | None:
    """Writes how much other processes disturbed the trials, which ran on hosts of ``cores``; None
    if they hardly did, or if that is not known."""
    shares = []
    for row in rows:
        host, own = (row.metrics.get(name) for name in ("host_cpu_percent", "cpu_percent"))
        took = (row.ended or 0) - (row.started or 0)
        if cores and host is not None and own is not None and took >= _LONG_S:
            shares.append((host - own * row.config["ring_size"] / cores) / 100)
    disturbed = [share for share in shares if share > _BUSY]
    if not disturbed:
        return None
    trials = f"{len(disturbed):,} of {units.plural(len(shares), 'trial')}"
    return (
        f"other processes used {median(disturbed):.0%} of {units.plural(cores, 'core')} in {trials}"
        f" (at most {max(disturbed):.0%}): measure again when the machine is idle"
    )


def predictions(rows: Iterable[TrialRow]) -> str | None:
    """Writes how far the predictions of the trials were off; None if nothing was predicted."""
    errors = prediction_errors(row.numbers for row in rows if row.status == "ok")
    if not errors:
        return None
    memory = errors.get("prediction_memory_error")
    return (
        f"median error {errors['prediction_median_error']:.0%}, "
        f"90th percentile {errors['prediction_p90_error']:.0%} over "
        f"{units.plural(int(errors['prediction_trials']), 'trial')}"
        f"{'' if memory is None else f' (memory {memory:.0%})'}"
    )
