"""From a plan to measurements, by the spec's method of search: what is measured next.

A *study* is the search among the points of one problem on one size of ring: those that differ only
in the fields that are searched. Studies follow each other in the plan's order. What the store
already holds is told to the method instead of being measured, so a search that was cut off
continues where it was.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ringray.lab.kinds import KINDS
from ringray.lab.plan.kernel_cuts import kernel_of
from ringray.lab.search import METHODS
from ringray.lab.search.base import Candidate, SearchSettings, Told, layers, score
from ringray.lab.trial.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ringray.lab.plan.cost_model import Cost
    from ringray.lab.plan.plan import Plan, Trial
    from ringray.lab.search.base import Ask, Search
    from ringray.lab.trial.config import TrialConfig
    from ringray.lab.trial.outcome import Outcome, TrialRow

_STRATEGY = ("transport", "backward", "backend", "blocks", "partition")


class Work(NamedTuple):
    """Measure ``trial`` until it has ``repeats`` samples; ``before`` is what it has; ``together``:
    where the rest of its round is measured."""

    trial: Trial
    repeats: int
    before: Outcome | TrialRow | None
    together: bool

    @property
    def config(self) -> TrialConfig:
        """What a ring is to run: the repeats that are still lacking."""
        had = _counted(self.before) if self.before is not None else 0
        return replace(self.trial.config, repeats=self.repeats - had)


@dataclass(frozen=True)
class StudyResult:
    """What a study found: keys of the best point by the first objective, of the Pareto front over
    all (the best first) and of the points that were not measured; and how many runs it took."""

    trials: tuple[Trial, ...]
    best: str | None
    front: tuple[str, ...]
    unasked: tuple[str, ...]
    runs: int


def outcome_of(
    trials: Sequence[Trial],
    results: Mapping[str, Outcome | TrialRow],
    objectives: Sequence[str],
) -> StudyResult:
    """What has been found among the ``trials`` of a study, by their ``results`` so far.

    Who was measured often stands for itself; a lucky single run does not: the best is among those
    with half as many runs as any. Replicas are one point, named by the middle one of them.
    """
    points: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.key in results:
            points.setdefault(repr(replace(trial.config, replica=0)), []).append(trial)
    scores: dict[str, tuple[float, ...]] = {}
    often: dict[str, int] = {}
    for same in points.values():
        told = {t.key: score_of(results[t.key], objectives).scores for t in same}
        known = sorted((one, key) for key, one in told.items() if one is not None)
        if known:
            columns = zip(*(one for one, _ in known), strict=True)
            key = known[(len(known) - 1) // 2][1]
            scores[key] = tuple(map(statistics.median, columns))
            often[key] = sum(_counted(results[key]) for _, key in known)
    most = max(often.values(), default=0)
    finalists = [key for key in scores if 2 * often[key] >= most]
    among = list(scores) if len(objectives) > 1 else finalists
    front = next(layers(among, scores.__getitem__), [])
    return StudyResult(
        tuple(trials),
        min(finalists, key=lambda key: scores[key], default=None),
        tuple(front),
        tuple(trial.key for trial in trials if trial.key not in results),
        sum(_counted(results[trial.key]) for trial in trials if trial.key in results),
    )


def score_of(
    result: Outcome | TrialRow, objectives: Sequence[str], repeats: int | None = None
) -> Told:
    """A result, as far as that is known as it was after ``repeats`` runs, as a search is told."""
    first, metrics = objectives[0], result.metrics
    if result.status != "ok" or any(name not in metrics for name in objectives):
        return Told(None)
    values = [metrics[name] for name in objectives]
    median_of = METRICS[first].median_of
    samples: list[float] = []
    if not METRICS[first].exact:  # those that are not medians of samples vary as times do
        samples = result.samples.get(median_of or "ms", [])[:repeats]
    if samples and median_of:
        values[0] = statistics.median(samples)
    scores = tuple(score(name, x) for name, x in zip(objectives, values, strict=True))
    return Told(scores, tuple(samples))


class Schedule:
    """Hands out work, and is told what came of it. Work that is out at the same time may be done
    side by side and told in any order.

    Args:
        plan: every point that may be measured; its search says how.
        refused: keys of points that the cluster cannot run.
        done: what earlier runs have measured, by key.
        unasked: of a search that came to its end, the points that it did not ask for; None where it
            did not. A study is not begun again if all others of its points are done.
    """

    def __init__(
        self,
        plan: Plan,
        refused: Mapping[str, str],
        done: Mapping[str, TrialRow],
        unasked: Collection[str] | None = None,
    ) -> None:
        self._objectives = plan.spec.search.objectives
        self._results: dict[str, Outcome | TrialRow] = dict(done)
        trials = [trial for trial in plan.runnable if trial.key not in refused]
        self._studies = [self._study(plan, group) for group in studies(trials)]
        self._of = {key: study for study in self._studies for key in study.trials}
        self._open = [
            study
            for study in self._studies
            if unasked is None or any(k not in done and k not in unasked for k in study.trials)
        ]
        self._left = [study for study in self._studies if study not in self._open]

    def _study(self, plan: Plan, trials: Sequence[Trial]) -> _Study:
        search, measure = plan.spec.search, plan.spec.measure
        settings = SearchSettings(
            measure.repeats, measure.warmup, search.share, search.seed or 0, len(self._objectives)
        )
        varying = [
            name
            for name in searched(plan.spec.kind)
            if len({getattr(t.config, name) for t in trials}) > 1
        ]
        candidates = [
            Candidate(
                trial.key,
                tuple((name, getattr(trial.config, name)) for name in varying),
                tuple(_prediction(name, trial.predicted) for name in self._objectives),
            )
            for trial in trials
        ]
        asking = METHODS[search.method].search(candidates, settings)
        return _Study({trial.key: trial for trial in trials}, asking)

    def ahead(self) -> list[Trial]:
        """Trials that may still come, the next ones first."""
        return [trial for study in self._open for trial in study.ahead()]

    def next(self) -> Work | None:
        """What to measure now. None: nothing until work that is out has been told of, or, if there
        is none out, nothing more."""
        for study in list(self._open):
            while study.queue:
                ask = study.queue.popleft()
                before = self._results.get(ask.key)
                if before is None or not _enough(before, ask.repeats):
                    study.out += 1
                    return Work(study.trials[ask.key], ask.repeats, before, ask.together)
                study.answers[ask.key] = score_of(before, self._objectives, ask.repeats)
                if not study.queue and not study.out:
                    study.advance()
            if not study.out:
                self._open.remove(study)
                self._left.append(study)
        return None

    def tell(self, work: Work, outcome: Outcome) -> None:
        """``work`` was done."""
        key = work.trial.key
        study = self._of[key]
        self._results[key] = outcome
        study.answers[key] = score_of(outcome, self._objectives, work.repeats)
        study.out -= 1
        if not study.queue and not study.out:
            study.advance()

    def unasked(self) -> list[Trial]:
        """Points without a result of the studies that have ended since this was last called."""
        ended, self._left = self._left, []
        return [t for study in ended for key, t in study.trials.items() if key not in self._results]

    def found(self) -> list[StudyResult]:
        """The result of every study that has ended."""
        return [
            outcome_of(list(study.trials.values()), self._results, self._objectives)
            for study in self._studies
            if study not in self._open
        ]


class _Study:
    """One search, and where it stands: what its round still asks, how much of that is out, and what
    has come back."""

    def __init__(self, trials: dict[str, Trial], asking: Search) -> None:
        self.trials = trials
        self.answers: dict[str, Told] = {}
        self.queue: deque[Ask] = deque()
        self.out = 0
        self._asking = asking
        self._take(next(asking, []))

    def _take(self, asks: Sequence[Ask]) -> None:
        # On a cluster ranks of other threads are other actors, which take seconds to start.
        self.queue.extend(sorted(asks, key=lambda ask: self.trials[ask.key].config.threads))

    def ahead(self) -> list[Trial]:
        """Those of this round first; after it any may come."""
        first = dict.fromkeys(ask.key for ask in self.queue)
        return [self.trials[key] for key in (first | dict.fromkeys(self.trials))]

    def advance(self) -> None:
        """To the next round, if there is one."""
        answers, self.answers = self.answers, {}
        try:
            self._take(self._asking.send(answers))
        except StopIteration:
            return


def searched(kind: str) -> tuple[str, ...]:
    """The fields of a config that are searched, not part of the problem."""
    return (*_STRATEGY, "threads") if KINDS[kind].tunes else _STRATEGY


def studies(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Trials by what is not searched, in their order; of kernels each one by itself."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        apart = [
            value
            for name, value in trial.config.as_dict().items()
            if name not in (*searched(trial.kind), "replica")
        ]
        if KINDS[trial.kind].ranks_alone:
            apart.append(kernel_of(trial.config.blocks))
        same = repr(apart)
        groups.setdefault(same, []).append(trial)
    return list(groups.values())


def _prediction(objective: str, cost: Cost | None) -> float:
    name = METRICS[objective].predicted
    return float(getattr(cost, name)) if cost is not None and name else float("inf")


def _enough(result: Outcome | TrialRow, repeats: int) -> bool:
    if result.status != "ok":
        return True  # it failed, and would again
    return _counted(result) >= repeats or not _counted(result)


def _counted(result: Outcome | TrialRow) -> int:
    return len(result.samples.get("ms", ()))
