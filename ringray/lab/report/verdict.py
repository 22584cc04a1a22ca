"""The answer of a sweep: of each problem the fastest point, its lead, and its time beside the
baseline's. Texts, tables, MLflow and figures take their winners from here.

:mod:`ringray.lab.trial.ranking` says which point that is, and whether the samples decide it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from ringray.base import units
from ringray.lab.kinds import KINDS
from ringray.lab.report import words
from ringray.lab.report.board import worst_error
from ringray.lab.report.figures import data
from ringray.lab.report.replicas import by_problem, groups
from ringray.lab.trial.machine_load import BUSY
from ringray.lab.trial.metrics import prediction_errors
from ringray.lab.trial.outcome import TrialRow, foreign_share
from ringray.lab.trial.ranking import WRONG, RankedPoint, Ranking, rank

LISTED = 12  # problems that are told one by one
_DRIFT = 1.25  # times the shortest time of the baseline, from which its drift is told


class Contest(NamedTuple):
    """The points of one problem."""

    points: list[TrialRow]  # in the order of their ranking
    ranking: Ranking
    problem: str  # what tells it from the others, "" if it is the only one
    names: Mapping[str, str]  # of the strategies, by key
    beside: float  # chance that the first is as far from its baseline's time by its noise alone

    @property
    def first(self) -> TrialRow:
        """The point of the best value, which is the winner if that is decided."""
        return self.points[0]


def contests(rows: Iterable[TrialRow]) -> list[Contest]:
    """Returns a contest for each problem with a time, in the order of ``rows``."""
    good = [row for row in rows if row.status == "ok"]
    points = data.having(data.points(good), "median_ms")
    # Points have medians over their replicas; the ranking needs each replica, for its noise.
    measured = groups(good, lambda row: {**row.config, "replica": 0})
    replicas = {same[0].key: RankedPoint(same[0].key, same[0].config, same) for same in measured}
    rankings = [rank(replicas[row.key] for row in same) for same in by_problem(points)]
    by_key = {row.key: row for row in points}
    ordered = [([by_key[key] for key in order.keys], order) for order in rankings if order.keys]
    ranked = [row for same, _ in ordered for row in same]
    problem = words.varying((row.config for row in ranked), words.PROBLEM)
    fields = data.strategies(ranked)
    every = []
    for same, order in ordered:
        names = {row.key: data.strategy(row, fields) for row in same}
        beside = _by_noise(replicas[same[0].key])
        every.append(Contest(same, order, data.problem(same[0], problem), names, beside))
    return every


def _by_noise(point: RankedPoint) -> float:
    """Returns the chance that a point that takes as long as its baseline has such a ratio."""
    estimate = rank([point], "ratio").values.get(point.key)
    below = estimate.chance() if estimate else 0.0
    return min(below, 1 - below)


def winners(rows: Iterable[TrialRow]) -> list[TrialRow]:
    """Returns the fastest point of each problem whose samples decide which that is."""
    return [contest.first for contest in contests(rows) if contest.ranking.winner]


def answer(kind: str, rows: Sequence[TrialRow]) -> list[str]:
    """Writes the answer of a sweep of some kind, nothing where no point is the fastest: cuts of
    several kernels are no rivals, and of contexts the longest is searched."""
    facts = KINDS.get(kind)
    return [] if facts and (facts.independent_ranks or facts.bisects_length) else lines(rows)


def lines(rows: Sequence[TrialRow]) -> list[str]:
    """Writes the answer: a line for each problem, and one for the errors of kind correctness."""
    every = contests(rows)
    answer = [_line(contest) for contest in every[:LISTED]]
    if len(every) > LISTED:
        answer.append(f"and {len(every) - LISTED} more problems")
    shares = [(share, row) for row in rows if (share := worst_error(row.metrics)) is not None]
    if shares:
        worst, row = max(shares, key=lambda pair: pair[0])
        right = sum(share <= 1 for share, _ in shares)
        answer.append(
            f"{right:,} of {units.plural(len(shares), 'trial')} within the error budget; the worst "
            f"takes {units.digits(worst)} of it: #{row.index + 1}"
        )
    statuses = {row.status for row in rows} - {None, "pruned"}
    if not answer and statuses and "ok" not in statuses:
        answer.append("none, because no trial ended well")
    return answer


def _line(contest: Contest) -> str:
    first, ranking, names = contest.first, contest.ranking, contest.names
    metrics, name = first.metrics, names[first.key]
    problem = contest.problem and f"{contest.problem}: "
    takes = f"{units.digits(metrics['median_ms'])} ms"
    if "peak_memory_bytes" in metrics:
        takes += f" and {units.memory(metrics['peak_memory_bytes'])} per rank"
    if len(ranking.keys) == 1:
        line = f"{problem}{name} takes {takes}"
    elif ranking.winner:
        second = ranking.keys[1]
        line = f"{problem}{name} is the fastest, {takes}; next {names[second]}, slower by "
        line += f"{ranking.behind(second):.1%}"
        if ranking.paired and ranking.drift > _DRIFT:
            line += f" by the ratios, as the baseline drifted by {ranking.drift:.1f} ×"
    else:
        line = f"{problem}{ranking.why(names)}; {name} takes {takes}"
    if "ratio" in metrics:
        line += f"; {units.ratio(metrics['ratio'])} × the time of {words.baseline(first.config)}"
        line += ", which is within the noise" * (contest.beside >= WRONG)
    return line


def busy(rows: Iterable[TrialRow], cores: int) -> str | None:
    """Writes how much other processes disturbed the trials, which ran on hosts of ``cores``; None
    if they hardly did, or if that is not known."""
    loads = [(foreign_share([row], row.config["ring_size"], cores), row) for row in rows]
    shares = [share for share, _ in loads if share is not None]
    disturbed = [share for share in shares if share > BUSY]
    if not disturbed:
        return None
    trials = f"{len(disturbed):,} of {units.plural(len(shares), 'trial')}"
    nice = max(row.metrics.get("niceness", 0.0) for _, row in loads)
    behind = f"ranks run at nice {nice:.0f}, so load at nice 0 takes precedence; " * (nice > 0)
    return (
        f"other processes used {median(disturbed):.0%} of {units.plural(cores, 'core')} in {trials}"
        f" (at most {max(disturbed):.0%}): {behind}measure again when the machine is idle"
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
