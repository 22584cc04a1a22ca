"""Two sweeps compared point by point: how much slower or faster one is, beyond the noise.

A *point* is a configuration, whichever code, hardware or versions measured it; its replicas count
together. :mod:`ringray.lab.report.noise` decides which changes count.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ringray.base import provenance
from ringray.base.errors import UserError
from ringray.base.redaction import plain
from ringray.base.units import ABSENT, plural
from ringray.lab.report import words
from ringray.lab.report.noise import Effect, SweepNoise, Values
from ringray.lab.report.replicas import groups
from ringray.lab.trial.metrics import METRICS, Metric
from ringray.lab.trial.ranking import variance_of_median

if TYPE_CHECKING:
    from ringray.lab.trial.outcome import TrialRow

Verdict = Literal[
    "faster", "slower", "better", "worse", "equal", "not decided", "lost", "gained", "absent"
]
MARGIN = 0.05  # changes up to this share are equal, unless another limit is asked for
# Fields of a config that say how it is measured.
_MEASURING = ("warmup", "repeats", "seed", "budget", "checkpoints", "save_every")
_BASELINE = ("baseline", "baseline_threads")


@dataclass(frozen=True)
class ComparedSide:
    """The measurements of one side."""

    label: str  # as the user named it
    name: str
    digest: str
    spec: Mapping[str, Any]  # {} where it is not known
    rows: Sequence[TrialRow]  # each with its environment; a replica may have several


@dataclass(frozen=True)
class PointChange:
    """A point of both sides."""

    config: Mapping[str, Any]
    a: float | None  # median of the metric; None if no trial ended well
    b: float | None
    replicas: tuple[int, int]  # how many of them, or of rounds, ended well
    change: Effect | None
    verdict: Verdict
    reason: str = ""  # why a or b is None


class Change(NamedTuple):
    """A fact in which the sides differ, as text."""

    what: str
    a: str
    b: str


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`."""

    a: ComparedSide
    b: ComparedSide
    metric: Metric
    points: list[PointChange]
    overall: Effect
    verdict: Verdict
    only: tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]  # configs that one side has
    changes: list[Change]
    assumed: bool  # the noise between trials, which nothing tells
    same: int  # measurements that are on both sides

    def regressions(self, above: float) -> list[PointChange]:
        """Returns the points that are worse by more than the share ``above`` whatever the noise, or
        that have no value any more."""
        return [
            point
            for point in self.points
            if point.verdict == "lost" or (point.change and self._worse(point.change)[0] > above)
        ]

    def regressed(self, above: float) -> bool:
        """Tells whether the sweep as a whole is worse by more than ``above`` whatever the noise."""
        return self._worse(self.overall)[0] > above

    def doubtful(self, above: float) -> list[PointChange]:
        """Returns the points whose intervals hold both sides of ``above``."""
        ends = [(point, self._worse(point.change)) for point in self.points if point.change]
        return [point for point, (low, high) in ends if low <= above < high]

    def _worse(self, change: Effect) -> tuple[float, float]:
        """Returns by which shares a change surely is worse, at least and at most."""
        ends = [worsening(end, self.metric) for end in (change.surely_low, change.surely_high)]
        return min(ends), max(ends)


def worsening(ratio: float, metric: Metric) -> float:
    """Returns by which share ``ratio`` is worse: 0.05 of a time that is 5% longer."""
    return (ratio if metric.less_is_better else 1 / max(ratio, 1e-300)) - 1


def compare(
    a: ComparedSide, b: ComparedSide, metric: str = "median_ms", margin: float = MARGIN
) -> Comparison:
    """Compares two sides by a metric. Changes that surely are within ``margin`` are equal.

    Raises:
        UserError: they share no point, or none has a value of the metric.
    """
    which = METRICS[metric]
    sides = [_points(side.rows, which) for side in (a, b)]
    shared = [key for key in sides[0] if key in sides[1]]
    if not shared:
        raise UserError(_no_point(a, b, sides))
    rows = [(sides[0][key], sides[1][key]) for key in shared]
    rounds = _rounds(a.rows, b.rows)
    values = [tuple(_values(side, which, rounds) for side in pair) for pair in rows]
    both = [index for index, pair in enumerate(values) if all(side.logs for side in pair)]
    if not both:
        raise UserError(
            f"{a.label} and {b.label} share {plural(len(shared), 'point')}, but none has a "
            f"positive {metric} on both sides; `ringray status` shows how the trials ended"
        )
    measured = [values[index] for index in both]
    # In turns, A, B, A, B: each round has all points once. More than two rounds tell of a drift.
    (most, *others) = {len(side.logs) for pair in measured for side in pair}
    in_turns = len(set(rounds.values())) == 2 * most > 4 and not others
    noise = SweepNoise(measured, which.exact, in_turns)
    changes = dict(zip(both, noise.points(), strict=True))
    points = []
    for index, pair in enumerate(rows):
        change = changes.get(index)
        verdict = _verdict(change, which, margin) if change else None
        points.append(_point(pair, values[index], change, verdict))
    overall = noise.overall()
    only = _only(sides[0], sides[1]), _only(sides[1], sides[0])
    same = len(set(map(_measurement, a.rows)) & set(map(_measurement, b.rows)))
    verdict, changed = _verdict(overall, which, margin), differences(a, b)
    assumed = noise.assumed
    return Comparison(a, b, which, points, overall, verdict, only, changed, assumed, same)


def _only(
    points: Mapping[str, list[TrialRow]], others: Mapping[str, list[TrialRow]]
) -> list[Mapping[str, Any]]:
    """Returns the configs of the points with a trial that is ok and that ``others`` lack."""
    alone = [rows for key, rows in points.items() if key not in others]
    return [rows[0].config for rows in alone if any(row.status == "ok" for row in rows)]


def _measurement(row: TrialRow) -> str:
    """Returns what tells a measurement from any other."""
    # A store has more digits of a time than a line of ``--json``.
    return repr((sorted(row.config.items()), sorted(row.metrics.items()), round(row.ended or 0, 3)))


def _points(rows: Sequence[TrialRow], metric: Metric) -> dict[str, list[TrialRow]]:
    """Returns the rows of each point that was measured, by what makes it a point."""
    apart = {"replica"}
    # More repeats measure the same time, but they and the seed make another training or error.
    if metric.group not in ("training", "error"):
        apart.update(_MEASURING, () if metric.group == "baseline" else _BASELINE)

    def key(row: TrialRow) -> list[tuple[str, object]]:
        return sorted((name, value) for name, value in row.config.items() if name not in apart)

    measured = [row for row in rows if row.status not in (None, "pruned")]
    return {repr(key(same[0])): same for same in groups(measured, key)}


def _rounds(a: Sequence[TrialRow], b: Sequence[TrialRow]) -> dict[int, int]:
    """Returns the round of each row by its id: sides that were measured in turns, A, B, A, B, have
    several. Measurements of one round are made in one go, and share the state of the machine."""
    by_time = sorted((row.ended or 0.0, side, id(row)) for side in (0, 1) for row in (a, b)[side])
    number, before, rounds = 0, 0, {}
    for _, side, row in by_time:
        number, before = number + (side != before), side
        rounds[row] = number
    return rounds


def _values(rows: Sequence[TrialRow], metric: Metric, rounds: Mapping[int, int]) -> Values:
    """Returns a value for each replica, or for each round if there are several."""
    by_round: dict[int, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row.ended or 0.0):
        value = row.metrics.get(metric.name, math.nan)
        if row.status == "ok" and 0 < value < math.inf:
            repeats = [x for x in row.samples.get(metric.median_of, ()) if 0 < x < math.inf]
            measured = math.log(value), variance_of_median(repeats)
            by_round.setdefault(rounds[id(row)], []).append(measured)
    several = list(by_round.values())
    if len(several) == 1:  # sides one after the other: each replica tells of the noise
        several = [[replica] for replica in several[0]]
    return Values(
        [statistics.median(log for log, _ in some) for some in several],
        [statistics.fmean(within for _, within in some) / len(some) for some in several],
    )


def _verdict(change: Effect, metric: Metric, margin: float) -> Verdict:
    if change.surely_low <= 1 <= change.surely_high:
        within = 1 / (1 + margin) <= change.low and change.high <= 1 + margin
        return "equal" if within else "not decided"
    worse = worsening(change.ratio, metric) > 0
    if metric.unit == "ms":
        return "slower" if worse else "faster"
    return "worse" if worse else "better"


def _point(
    rows: tuple[list[TrialRow], list[TrialRow]],
    values: Sequence[Values],
    change: Effect | None,
    verdict: Verdict | None,
) -> PointChange:
    """Returns the change of a point; ``verdict`` is None of a point without a change."""
    a, b = (math.exp(statistics.median(side.logs)) if side.logs else None for side in values)
    ended = [any(row.status == "ok" for row in side) for side in rows]
    if verdict is None:
        verdict = "absent" if ended[0] == ended[1] else "lost" if ended[0] else "gained"
    without = [*(rows[0] if a is None else []), *(rows[1] if b is None else [])]
    reason = f"{without[0].status}: {without[0].reason or 'no value'}" if without else ""
    counts = len(values[0].logs), len(values[1].logs)
    return PointChange(rows[1][0].config, a, b, counts, change, verdict, reason)


def _no_point(
    a: ComparedSide, b: ComparedSide, sides: Sequence[Mapping[str, Sequence[TrialRow]]]
) -> str:
    """Writes why two sides share no point."""
    for side, points in zip((a, b), sides, strict=True):
        if not points:
            ended = "no trial" if not side.rows else "no trial that was measured"
            return f"{side.label} has {ended}; `ringray resume {side.name}` measures"
    configs = [[rows[0].config for rows in points.values()] for points in sides]
    names = dict.fromkeys(name for config in (*configs[0], *configs[1]) for name in config)
    apart = []
    for name in names:
        if name in ("replica", *_MEASURING, *_BASELINE):
            continue
        texts = [{words.value(name, config.get(name)) for config in side} for side in configs]
        if not texts[0] & texts[1]:
            lists = (", ".join(sorted(some)[:5]) for some in texts)
            apart.append(f"{words.HEADS.get(name, name)} {' against '.join(lists)}")
    why = "; ".join(apart) or "each field has common values, but in other combinations"
    return (
        f"{a.label} and {b.label} share no point: {why}; compare sweeps of one spec, or of specs "
        "that differ only in what is measured beside the common points"
    )


def differences(a: ComparedSide, b: ComparedSide) -> list[Change]:
    """Returns the facts of origin in which two sides differ."""
    facts = [_facts(side) for side in (a, b)]
    names = dict.fromkeys(name for side in facts for name in side)
    return [
        Change(name, *both)
        for name in names
        if len(set(both := [side.get(name, ABSENT) for side in facts])) > 1
        and not (name.startswith("spec.") and not (a.spec and b.spec))
    ]


def _facts(side: ComparedSide) -> dict[str, str]:
    """Returns commit, versions, hardware and fields of the spec as text."""
    seen: dict[str, dict[str, None]] = {}

    def add(name: str, value: object) -> None:
        seen.setdefault(plain(name), {})[words.value(name, value)] = None

    for environment in {repr(row.environment): row.environment or {} for row in side.rows}.values():
        add("commit", provenance.commit(environment))
        parts = provenance.measured_parts(environment)
        add("code", str(parts["kernels"] or ABSENT)[:7])
        for name, value in (parts["versions"] | (environment.get("versions") or {})).items():
            add(name, value)
        add("python", environment.get("python"))
        add("os", environment.get("os"))
        for name, value in parts["hardware"].items():
            add(name, ", ".join(map(str, value)) if isinstance(value, list) else value)
    for name in (*_MEASURING, *_BASELINE):
        for row in side.rows:
            add(name, row.config.get(name))
    for name, value in words.flat({"spec": side.spec}, "."):
        if not {"tracking", "name"} & set(name.split(".")):  # neither changes what is measured
            add(name, str(value))
    return {name: ", ".join(values) for name, values in seen.items()}
