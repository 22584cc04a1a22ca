"""Results of searches: for each problem the best point, the front and the runs that it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from ringray.base import units
from ringray.lab.driver.studies import StudyResult
from ringray.lab.plan.plan import Plan
from ringray.lab.plan.problems import searched
from ringray.lab.report import tables, words
from ringray.lab.search import METHODS
from ringray.lab.search.base import LEAST
from ringray.lab.trial.metrics import METRICS
from ringray.lab.trial.outcome import TrialRow

_ROWS = 12  # largest number of rows of a front


def lines(plan: Plan, rows: Sequence[TrialRow], studies: Sequence[StudyResult]) -> list[str]:
    """Writes a line for each study: its problem, the best point, the runs that it took."""
    by_key = {row.key: row for row in rows}
    texts = []
    for study in studies:
        name = _problem(plan, study)
        asked = len(study.trials) - len(study.not_requested)
        full = len(study.trials) * plan.spec.measure.repeats
        took = f"{asked} of {len(study.trials)} points, {study.runs} of {full} runs"
        if len(study.trials) <= LEAST and not METHODS[plan.spec.search.method].exhaustive:
            took += "; too few for a search"
        if study.best is None:
            texts.append(f"best of {name}: nothing could be measured ({took})")
            continue
        row = by_key[study.best]
        scores = ", ".join(_value(objective, row) for objective in plan.spec.search.objectives)
        choice = _choice(study, study.best)
        if study.ranking.undecided:
            names = {key: _choice(study, key) for key in study.ranking.keys}
            choice = f"{study.ranking.why(names)}; {choice}"
        texts.append(f"best of {name}: {choice}  {scores}  ({took}){_beside(plan, study, by_key)}")
    return texts


def _beside(plan: Plan, study: StudyResult, by_key: Mapping[str, TrialRow]) -> str:
    """Writes how the best point of a tuning compares with the default."""
    if not plan.spec.trial_kind.tunes or study.default is None:
        return ""
    if study.default == study.best:
        return "; it is the default, so nothing is kept"
    value = _value(plan.spec.search.objectives[0], by_key[study.default])
    default = f"; the default, {_choice(study, study.default)}, has {value}"
    return default if study.better else f"{default}, which is not surely worse, so nothing is kept"


def fronts(plan: Plan, rows: Sequence[TrialRow], studies: Sequence[StudyResult]) -> list[Table]:
    """Returns the Pareto front of each study, where there are several objectives."""
    objectives = plan.spec.search.objectives
    if len(objectives) < 2:
        return []
    by_key = {row.key: row for row in rows}
    made = []
    for study in studies:
        title = f"front of {_problem(plan, study)}"
        table = tables.bare_table(title, *objectives, texts=[title])
        for key in study.front[:_ROWS]:
            cells = [_value(name, by_key[key], unit=False) for name in objectives]
            table.add_row(_choice(study, key), *cells)
        if len(study.front) > _ROWS:
            table.add_row(f"and {len(study.front) - _ROWS} more")
        made.append(table)
    return made


def _problem(plan: Plan, study: StudyResult) -> str:
    fields = [name for name in plan.varying if name not in searched(plan.spec.trial_kind)]
    return words.label(study.trials[0].config.as_dict(), fields) or plan.spec.name


def _choice(study: StudyResult, key: str) -> str:
    configs = {trial.key: trial.config.as_dict() for trial in study.trials}
    names = searched(study.trials[0].kind)
    fields = [name for name in names if len({repr(c.get(name)) for c in configs.values()}) > 1]
    return words.label(configs[key], fields) or "the only point"


def _value(name: str, row: TrialRow, *, unit: bool = True) -> str:
    number = row.metrics.get(name)
    if METRICS[name].unit == "bytes" and number is not None:
        return units.memory(number)
    return units.digits(number) + (f" {METRICS[name].unit or name}" if unit else "")
