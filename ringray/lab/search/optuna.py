"""``optuna``: Optuna's sampler proposes points from the scores of earlier ones.

The sampler is the tree-structured Parzen estimator, for one objective or several. The study begins
with the points of the best predictions, a quarter of those that the budget allows. Proposals get a
few runs each, and at the end the best of them are measured in full, one after another; where the
budget allows a few points only, all proposals are.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from ringray.lab.search.base import (
    Candidate,
    Method,
    Request,
    Response,
    Search,
    SearchSettings,
    ranked,
)

_FINALISTS = 3  # points measured in full
_SKETCH = 5  # repeats of a full measurement per repeat of a proposal
_TRIES = 20  # proposals in a row without a new point, before one is drawn


def search(candidates: Sequence[Candidate], settings: SearchSettings) -> Search:
    """Asks for one point a round, and in a last round for the finalists."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            seed=settings.seed, multivariate=True, n_startup_trials=4
        )
    study = optuna.create_study(directions=["minimize"] * settings.objectives, sampler=sampler)
    space: dict[str, Any] = {}
    for name, _ in candidates[0].choices:
        values = tuple(dict.fromkeys(dict(c.choices)[name] for c in candidates))
        space[name] = optuna.distributions.CategoricalDistribution(values)
    by_choices = {candidate.choices: candidate for candidate in candidates}
    sketch = max(1, settings.repeats // _SKETCH)
    finalists = min(_FINALISTS, len(candidates))
    runs, each = settings.runs(len(candidates)), settings.warmup + settings.repeats
    rounds = (runs - finalists * (each - sketch)) // (settings.warmup + sketch)
    if rounds <= finalists:  # then every proposal is measured in full
        sketch, rounds = settings.repeats, runs // each
    rounds = min(rounds, len(candidates))
    likely = ranked(candidates, lambda point: point.predicted)
    for candidate in likely[: -(-rounds // 4)]:
        study.enqueue_trial(dict(candidate.choices))
    measured: dict[str, Response] = {}
    drawn = iter(likely)
    while len(measured) < rounds:
        proposed = _propose(study, space, by_choices, measured)
        if proposed is None:
            candidate = next(point for point in drawn if point.key not in measured)
            study.enqueue_trial(dict(candidate.choices))
            proposed = study.ask(space), candidate
        trial, candidate = proposed
        response = (yield [Request(candidate.key, sketch)])[candidate.key]
        measured[candidate.key] = response
        _tell(study, trial, response.scores)
    able = [key for key, response in measured.items() if response.scores is not None]
    best = ranked(able, lambda key: measured[key].scores or ())[:finalists]
    if best and sketch < settings.repeats:
        yield [Request(key, settings.repeats, together=True) for key in best]


def _propose(
    study: Any,
    space: dict[str, Any],
    by_choices: dict[Any, Candidate],
    measured: dict[str, Response],
) -> tuple[Any, Candidate] | None:
    """Returns a proposal that exists and was not measured; repeated proposals get their score."""
    for _ in range(_TRIES):
        trial = study.ask(space)
        candidate = by_choices.get(tuple((name, trial.params[name]) for name in space))
        if candidate is not None and candidate.key not in measured:
            return trial, candidate
        _tell(study, trial, measured[candidate.key].scores if candidate is not None else None)
    return None


def _tell(study: Any, trial: Any, scores: tuple[float, ...] | None) -> None:
    import optuna

    study.tell(trial, scores, None if scores else optuna.trial.TrialState.FAIL)


METHOD = Method(search, "points that Optuna's sampler proposes", ("budget", "seed"))
