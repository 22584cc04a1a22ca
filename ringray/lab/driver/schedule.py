"""The order in which a plan's points are measured, as the spec's search method asks for them.

Studies follow each other in the plan's order. The method is told the results that the store already
holds instead of measuring again, so an interrupted search continues where it was.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ringray.lab.driver.studies import StudyResult, outcome_of, score_of
from ringray.lab.plan.forecast import BEATEN
from ringray.lab.plan.plan import Plan
from ringray.lab.plan.problems import defaults, problem_of, searched, studies
from ringray.lab.plan.trial import Trial
from ringray.lab.predict.cost_model import Cost
from ringray.lab.search import METHODS
from ringray.lab.search.base import (
    Candidate,
    Request,
    Response,
    Search,
    SearchSettings,
    followed_by,
)
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.metrics import METRICS
from ringray.lab.trial.outcome import Outcome, TrialRow, runs_of

_ROUGH = 0.3  # relative standard deviation of predictions other than times
_DEVIATIONS = 1.28  # standard deviations to each side in an interval of 80%


class Work(NamedTuple):
    """A request to measure ``trial`` until it has ``repeats`` samples.

    ``before``: what it has; ``together``: on the same ring as the rest of its round.
    """

    trial: Trial
    repeats: int
    before: Outcome | TrialRow | None
    together: bool

    @property
    def config(self) -> TrialConfig:
        """Returns the config of the repeats that are still missing."""
        had = runs_of(self.before) if self.before is not None else 0
        return self.trial.config.changed(repeats=self.repeats - had)


class Schedule:
    """Hands out work and takes its results. Work that is out at the same time may run side by side
    and be told in any order.

    Args:
        plan: every point that may be measured, and the search.
        refused: keys of points that the cluster cannot run.
        done: results of earlier runs, by key.
        not_requested: points that a completed search left out, None of any other. A study does not
            begin again if all its other points are done.
    """

    def __init__(
        self,
        plan: Plan,
        refused: Mapping[str, str],
        done: Mapping[str, TrialRow],
        not_requested: Collection[str] | None = None,
    ) -> None:
        self._objectives = plan.spec.search.objectives
        self._returns = plan.spec.trial_kind.searchable
        self._results: dict[str, Outcome | TrialRow] = dict(done)
        trials = [trial for trial in plan.runnable if trial.key not in refused]
        beaten = [trial for trial in plan.trials if trial.pruned == BEATEN]
        self._beaten_points = Counter(problem_of(trial) for trial in beaten)
        self._studies = [self._study(plan, group) for group in studies(trials)]
        self._of = {key: study for study in self._studies for key in study.trials}
        over = {*done, *(not_requested or ())}
        self._open = [x for x in self._studies if not_requested is None or x.trials.keys() - over]
        self._left = [study for study in self._studies if study not in self._open]

    def _study(self, plan: Plan, trials: Sequence[Trial]) -> _Study:
        search, measure = plan.spec.search, trials[0].config.measure
        # A choice is kept only if it beats the default, which needs half of the other's runs.
        usual = defaults(trials) if plan.spec.trial_kind.tunes else []
        half = -(-measure.repeats // 2)
        runs = measure.repeats, measure.warmup, search.share, search.seed or 0
        pruned = self._beaten_points[problem_of(trials[0])]
        besides = len(usual) * (measure.warmup + half)
        settings = SearchSettings(*runs, len(self._objectives), pruned, besides)
        names = searched(plan.spec.trial_kind)
        configs = {trial.key: trial.config.flat() for trial in trials}
        varying = [name for name in names if len({x[name] for x in configs.values()}) > 1]
        candidates = []
        for trial in trials:
            choices = tuple((name, configs[trial.key][name]) for name in varying)
            scores = tuple(_prediction(name, trial.predicted) for name in self._objectives)
            doubt = _doubt(self._objectives[0], trial.predicted)
            candidates.append(Candidate(trial.key, choices, scores, doubt))
        asking = METHODS[search.method].search(candidates, settings)
        asking = followed_by(asking, [trial.key for trial in usual], half)
        return _Study({trial.key: trial for trial in trials}, asking)

    def ahead(self) -> list[Trial]:
        """Returns the trials that may still come, the next ones first."""
        return [trial for study in self._open for trial in study.ahead()]

    def next(self) -> Work | None:
        """Returns what to measure now. None: nothing until work that is out has been told, or
        nothing more if no work is out."""
        for study in list(self._open):
            while study.queue:
                ask = study.queue.popleft()
                before = self._results.get(ask.key)
                if before is None or (self._returns and not _enough(before, ask.repeats)):
                    study.out += 1
                    return Work(study.trials[ask.key], ask.repeats, before, ask.together)
                study.answer(ask.key, score_of(before, self._objectives, ask.repeats))
            if not study.out:
                self._open.remove(study)
                self._left.append(study)
        return None

    def tell(self, work: Work, outcome: Outcome) -> None:
        """Takes the result of ``work``."""
        key = work.trial.key
        study = self._of[key]
        self._results[key] = outcome
        study.out -= 1
        study.answer(key, score_of(outcome, self._objectives, work.repeats))

    def not_requested(self) -> list[Trial]:
        """Returns the points without a result of studies that ended since the last call."""
        ended, self._left = self._left, []
        return [t for study in ended for key, t in study.trials.items() if key not in self._results]

    def found(self) -> list[StudyResult]:
        """Returns the result of every study that has ended."""
        over = (study for study in self._studies if study not in self._open)
        return [outcome_of([*x.trials.values()], self._results, self._objectives) for x in over]


class _Study:
    """One search and its round: points still to ask for, the number that are out, answers."""

    def __init__(self, trials: dict[str, Trial], asking: Search) -> None:
        self.trials = trials
        self.answers: dict[str, Response] = {}
        self.queue: deque[Request] = deque()
        self.out = 0
        self._asking = asking
        self._take(next(asking, []))

    def _take(self, asks: Sequence[Request]) -> None:
        # On a cluster ranks of other threads are other actors, which take seconds to start.
        self.queue.extend(sorted(asks, key=lambda ask: self.trials[ask.key].config.ring.threads))

    def ahead(self) -> list[Trial]:
        """Returns all points, those of this round first."""
        first = dict.fromkeys(ask.key for ask in self.queue)
        return [self.trials[key] for key in (first | dict.fromkeys(self.trials))]

    def answer(self, key: str, told: Response) -> None:
        """Takes the answer for a point; the last one of a round begins the next."""
        self.answers[key] = told
        if not self.queue and not self.out:
            answers, self.answers = self.answers, {}
            with suppress(StopIteration):
                self._take(self._asking.send(answers))


def _prediction(objective: str, cost: Cost | None) -> float:
    name = METRICS[objective].predicted
    return float(getattr(cost, name)) if cost is not None and name else float("inf")


def _doubt(objective: str, cost: Cost | None) -> float:
    """Returns the relative standard deviation of a prediction: of times by their interval."""
    if cost is None or METRICS[objective].predicted != "time_ms":
        return _ROUGH
    return math.log(cost.high_ms / cost.low_ms) / 2 / _DEVIATIONS


def _enough(result: Outcome | TrialRow, repeats: int) -> bool:
    if result.status != "ok":
        return True  # it failed, and would again
    return runs_of(result) >= repeats or not runs_of(result)
