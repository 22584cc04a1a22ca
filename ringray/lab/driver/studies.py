"""Results of studies, and the tuned choices that follow."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringray.lab.plan.plan import Plan
from ringray.lab.plan.problems import defaults, studies
from ringray.lab.plan.trial import Trial
from ringray.lab.search.base import Response, layers, score
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.machine_load import BUSY
from ringray.lab.trial.metrics import METRICS, columns
from ringray.lab.trial.outcome import (
    NOT_REQUESTED,
    NOT_TRIED,
    Outcome,
    TrialRow,
    foreign_share,
    runs_of,
)
from ringray.lab.trial.ranking import RankedPoint, Ranking, rank, timed
from ringray.traffic import geometry
from ringray.tuning import table as tuned
from ringray_kernels.backends import PREFERRED, on_device

_USUAL = {"auto", *(names[0] for names in PREFERRED.values())}  # backends that compute untuned


@dataclass(frozen=True)
class StudyResult:
    """Result of a study: keys of the best point by the first objective, of the Pareto front over
    all objectives (best first) and of the points that were not measured; and the number of runs.

    ``ranking``: by the first objective; ``default``: key of the point that is taken where nothing
    is tuned, with the threads of the best one, if it was measured; ``better``: the best one was
    compared with another, and surely beats the default (:mod:`ringray.lab.trial.ranking`).
    """

    trials: tuple[Trial, ...]
    best: str | None
    front: tuple[str, ...]
    not_requested: tuple[str, ...]
    runs: int
    ranking: Ranking
    default: str | None = None
    better: bool = True


def score_of(
    result: Outcome | TrialRow, objectives: Sequence[str], repeats: int | None = None
) -> Response:
    """Returns a result as a search is told it, as far as known as it was after ``repeats`` runs."""
    first, metrics = objectives[0], result.metrics
    if result.status != "ok" or any(name not in metrics for name in objectives):
        return Response(None)
    values = [metrics[name] for name in objectives]
    median_of = METRICS[first].median_of
    samples: list[float] = []
    if not METRICS[first].exact:  # those that are not medians of samples vary as times do
        samples = result.samples.get(median_of or "ms", [])[:repeats]
    if samples and median_of:
        values[0] = statistics.median(samples)
    scores = tuple(score(name, x) for name, x in zip(objectives, values, strict=True))
    return Response(scores, tuple(samples))


def outcome_of(
    trials: Sequence[Trial], results: Mapping[str, Outcome | TrialRow], objectives: Sequence[str]
) -> StudyResult:
    """Returns what the ``trials`` of a study have shown, by their ``results`` so far.

    The best one is the first of their ``ranking``. Replicas are one point, named by their median.
    """
    points: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.key in results:
            points.setdefault(repr(trial.config.changed(replica=0)), []).append(trial)
    scores: dict[str, tuple[float, ...]] = {}
    ranked: dict[str, RankedPoint] = {}
    for same in points.values():
        told = {t.key: score_of(results[t.key], objectives).scores for t in same}
        ranked_keys = sorted((some, key) for key, some in told.items() if some is not None)
        if ranked_keys:
            by_objective = zip(*(some for some, _ in ranked_keys), strict=True)
            key = ranked_keys[(len(ranked_keys) - 1) // 2][1]
            scores[key] = tuple(map(statistics.median, by_objective))
            replicas = [results[key] for _, key in ranked_keys]
            ranked[key] = RankedPoint(key, same[0].config.as_dict(), replicas)
    ranking = rank(ranked.values(), objectives[0])
    best = next(iter(ranking.keys), None)
    among = list(scores) if len(objectives) > 1 else ranking.keys
    threads = {trial.key: trial.config.ring.threads for trial in trials}
    usual = [t for t in defaults(trials) if best and t.config.ring.threads == threads[best]]
    usual.sort(key=lambda trial: trial.config.strategy.backend not in _USUAL)
    default = next((trial.key for trial in usual if trial.key in scores), None)
    better = best is not None and len(scores) > 1
    if better and best and default:
        better = rank([ranked[best], ranked[default]], objectives[0]).winner == best != default
    not_requested = tuple(trial.key for trial in trials if trial.key not in results)
    runs = sum(runs_of(results[trial.key]) for trial in trials if trial.key in results)
    front = tuple(next(layers(among, scores.__getitem__), []))
    return StudyResult(tuple(trials), best, front, not_requested, runs, ranking, default, better)


def results(plan: Plan, rows: Sequence[TrialRow]) -> list[StudyResult]:
    """Returns the results of all studies of a sweep that is over, in the plan's order."""
    refused, ended = set(), {}
    for row in rows:
        reason = row.reason or ""
        if row.status == "pruned" and not reason.startswith(NOT_TRIED):
            if reason != NOT_REQUESTED:
                refused.add(row.key)
        elif row.status is not None:
            ended[row.key] = row
    groups = studies([trial for trial in plan.runnable if trial.key not in refused])
    outcomes = [outcome_of(group, ended, plan.spec.search.objectives) for group in groups]
    backends = [{trial.config.strategy.backend for trial in group} for group in groups]
    if not set().union(*backends) & _USUAL:
        return outcomes
    # A backend that is a study by itself is no default: `entries` compares it with the others.
    return [
        outcome if own & _USUAL else replace(outcome, default=None, better=True)
        for outcome, own in zip(outcomes, backends, strict=True)
    ]


def load_of(
    plan: Plan, study: StudyResult, rows: Mapping[str, TrialRow], cores: int
) -> float | None:
    """Returns the largest share of a host's ``cores`` that other processes used while the best
    point, the default or all points of a study were measured; None if no time was, or none for long
    enough."""
    if not timed(plan.spec.search.objectives[0]):
        return None
    ranks = study.trials[0].config.ring.size
    if plan.spec.trial_kind.independent_ranks:  # they measure side by side
        ranks = plan.spec.sweep("ring", "size")[0]
    points = {trial.key: repr(trial.config.changed(replica=0)) for trial in study.trials}
    ended = {key: rows[key] for key in points if key in rows and rows[key].status == "ok"}
    loads = [foreign_share(ended.values(), ranks, cores)]
    for chosen in (study.best, study.default):
        replicas = [row for key, row in ended.items() if points[key] == points.get(chosen or "")]
        loads.append(foreign_share(replicas, ranks, cores))
    return max((load for load in loads if load is not None), default=None)


def entries(plan: Plan, rows: Sequence[TrialRow], cores: int = 0) -> list[tuned.Entry]:
    """Returns the best point of each study of a sweep that is over, as a tuned choice, where it
    beats the default and was not measured on hosts whose ``cores`` were busy with other processes.
    Of problems that share a bucket the largest one wins."""
    by_key = {row.key: row for row in rows}
    ok = {row.key for row in rows if row.status == "ok"}
    backends = {trial.config.strategy.backend for trial in plan.runnable if trial.key in ok}
    best_of: dict[Any, tuple[TrialConfig, tuned.Entry]] = {}
    for study in results(plan, rows):
        if study.best is None or not (by_key[study.best].environment or {}).get("place"):
            continue  # nothing was measured, or the place was lost with a part of the store
        if not study.better:
            continue
        if (load_of(plan, study, by_key, cores) or 0) > BUSY:
            continue
        trial = next(trial for trial in study.trials if trial.key == study.best)
        entry = _entry(plan, trial, by_key[study.best], backends)
        if len({sibling.config.ring.threads for sibling in study.trials}) > 1:
            entry = replace(entry, choice={**entry.choice, "threads": trial.config.ring.threads})
        place = entry.place, entry.bucket, entry.choice["backend"]
        problem = trial.config.changed(blocks=None, replica=0)
        if place in best_of and best_of[place][0] == problem:
            # Of kernels that are tuned one by one, each adds its blocks.
            before = best_of[place][1]
            blocks = f"{before.choice['blocks']},{entry.choice['blocks']}"
            choice, when = {**before.choice, "blocks": blocks}, entry.when
            entry = replace(min(before, entry, key=_time), choice=choice, when=when)
        elif place in best_of and _size(best_of[place][0]) > _size(problem):
            continue
        best_of[place] = problem, entry
    fastest: dict[tuple[tuned.Place, tuned.Bucket], tuned.Entry] = {}
    for _, entry in sorted(best_of.values(), key=lambda pair: (-_size(pair[0]), _time(pair[1]))):
        fastest.setdefault((entry.place, entry.bucket), entry)
    return list(fastest.values())


def _time(entry: tuned.Entry) -> float:
    return entry.metrics.get("median_ms", math.inf)


def _size(config: TrialConfig) -> int:
    problem = config.problem
    return problem.batch * problem.heads * geometry.total_visible(problem.mask)


def _entry(plan: Plan, trial: Trial, row: TrialRow, backends: Collection[str]) -> tuned.Entry:
    """Returns the choice of ``trial``. ``backends``: those that were measured, as the spec names
    them."""
    assert row.environment is not None
    place = tuned.Place(**row.environment["place"])
    config, chosen = trial.config, row.environment.get("chosen", {})
    use = trial.kind.tunes
    assert use
    own = {**vars(config.strategy), **chosen}
    del own["source"]
    choice: dict[str, Any] = own if use == "strategy" else {"blocks": own["blocks"]}
    choice["backend"] = on_device(own["backend"], place.device)
    compared = {on_device(backend, place.device) for backend in backends}
    if len(compared) > 1:
        choice["compared"] = sorted(compared)
    if choice.get("backward") == "auto":
        choice["backward"] = tuned.DEFAULTS["backward"]
    names_kept = [metric.name for metric in columns("tuned")]
    metrics = {name: row.metrics[name] for name in names_kept if name in row.metrics}
    bucket = getattr(config.buckets(place.device), use)
    return tuned.Entry(use, place, bucket, choice, metrics, plan.digest, row.ended or 0.0)
