"""A comparison in words, as a table, as JSON and as a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ringray.base.units import ABSENT, plural
from ringray.lab.report import page, words
from ringray.lab.report.comparison import ComparedSide, Comparison, PointChange
from ringray.lab.report.noise import UNKNOWN, Interval
from ringray.lab.report.tables import bare_table

FORMAT = 2  # of the object of ``--json``; grows with each field
_STYLES = {
    "lost": "bold red", "slower": "red", "worse": "red", "faster": "green", "better": "green",
    "gained": "", "equal": "", "not decided": "yellow", "absent": "bright_black",
}  # fmt: skip
_TONES = {"red": "bad", "bold red": "bad", "green": "good"}
LEGEND = (
    "change: of the medians, and where it lies in 95% of comparisons; a verdict allows for all "
    "points: in 97.5% of comparisons without a change, none is slower or faster; not decided: the "
    "interval holds no change and one that counts"
)
_NAMED = 5  # points that are told by name


def answer(found: Comparison) -> list[str]:
    """Writes the result in words."""
    compared = sum(one.change is not None for one in found.points)
    change = f"{found.metric.name} {_percent(found.overall.ratio)} ({_between(found.overall)})"
    lead = "not decided" if found.verdict == "not decided" else f"B is {found.verdict}"
    said = [f"{lead}: {change}, the median change of {plural(compared, 'point')}"]
    counts = [(one, sum(point.verdict == one for point in found.points)) for one in _STYLES]
    said.append("points: " + " · ".join(f"{count:,} {one}" for one, count in counts if count))
    for side, only in zip("AB", found.only, strict=True):
        if only:
            said.append(f"{plural(len(only), 'point')} in {side} only: {_names(found, only)}")
    if found.same:
        which = "all measurements of A" if found.same == len(found.a.rows) else (
            f"{found.same:,} of {plural(len(found.a.rows), 'measurement')} of A"
        )  # fmt: skip
        said.append(f"A is compared with itself: {which} are in B, too")
    if found.assumed:
        said.append(
            "each point was measured once, which tells nothing of its noise: no point is decided, "
            f"and changes of the whole sweep are compared with a noise of {UNKNOWN:.0%}, which is "
            "assumed; replicas: 3 under measure in the spec measures it"
        )
    return said


def failure(found: Comparison, above: float | None) -> str:
    """Writes which regressions are beyond the share ``above`` whatever the noise, and which points
    B lacks; "" if there is none, or no limit."""
    if above is None:
        return ""
    beyond, worse, phrases = f"by more than {above * 100:g}%", found.regressions(above), []
    if found.regressed(above):
        phrases.append(f"B as a whole is {found.verdict} {beyond}")
    lost = sum(point.verdict == "lost" for point in worse)
    if len(worse) > lost:
        phrases.append(f"{plural(len(worse) - lost, 'point')} worse {beyond} and the noise")
    if lost:
        phrases.append(f"{plural(lost, 'point')} without a result in B")
    if missing := found.only[0]:
        lacks = f"{plural(len(missing), 'point')} of A that B lacks"
        phrases.append(f"{lacks}: {_names(found, missing)}")
    return "; ".join(phrases)


def doubt(found: Comparison, above: float | None) -> str:
    """Writes how many points may be worse by more than ``above``, or not; "" if none."""
    if above is None or not (points := found.doubtful(above)):
        return ""
    many = f"{plural(len(points), 'point')} may be worse by more than {above * 100:g}%"
    return f"not decided: {many}, or not: {_names(found, [point.config for point in points])}"


def _names(found: Comparison, configs: Sequence[Mapping[str, Any]]) -> str:
    """Writes the first points by the fields in which points differ."""
    every = [*(point.config for point in found.points), *found.only[0], *found.only[1]]
    fields = words.varying(every)
    names = [words.label(config, fields) or "the only point" for config in configs[:_NAMED]]
    return ", ".join(names) + (f" and {len(configs) - _NAMED} more" * (len(configs) > _NAMED))


def origin(side: ComparedSide) -> str:
    """Writes what a side is."""
    trials = sum(row.status not in (None, "pruned") for row in side.rows)
    return f"{side.name} {side.digest[:12]} ({side.label}), {plural(trials, 'trial')}"


def changes(found: Comparison) -> list[str]:
    """Writes what differs between the sides."""
    return [f"{one.what}: {one.a} → {one.b}" for one in found.changes]


def worst(points: Sequence[PointChange], less_is_better: bool) -> list[PointChange]:
    """Sorts points: those without a value in B, then by how much they are worse."""

    def rank(one: PointChange) -> float:
        if one.change is None:
            return -math.inf if one.verdict == "lost" else math.inf
        return -one.change.ratio if less_is_better else one.change.ratio

    return sorted(points, key=rank)


def points_table(found: Comparison, points: Sequence[PointChange]) -> Table:
    """Returns a line for each of ``points``."""
    heads, rows = _cells(found, points)
    table = bare_table(*heads, left=("verdict", "why"))
    for one, row in zip(points, rows, strict=True):
        texts = [cell if isinstance(cell, str) else cell.text for cell in row]
        at = heads.index("verdict")
        table.add_row(*texts[:at], Text(texts[at], _STYLES[one.verdict]), *texts[at + 1 :])
    return table


def _cells(
    found: Comparison, points: Sequence[PointChange]
) -> tuple[list[str], list[list[str | page.Number]]]:
    """Returns the headings and the lines of a table."""
    fields = words.varying(one.config for one in found.points)
    metric = found.metric
    heading = metric.heading.split("–")[0] or metric.name
    reasons = any(one.reason for one in points)
    heads = [words.HEADS[name] for name in fields] or ["point"]
    heads += [f"A {heading}", f"B {heading}", "change", "95% interval", "replicas", "verdict"]

    rows: list[list[str | page.Number]] = []
    for one in points:
        tone = _TONES.get(_STYLES[one.verdict], "")
        change = one.change
        rows.append([
            *([words.value(name, one.config.get(name)) for name in fields] or ["1"]),
            *(page.Number(words.number(metric, value), value) for value in (one.a, one.b)),
            page.Number(_percent(change.ratio), change.ratio, tone) if change else ABSENT,
            _between(change) if change else ABSENT,
            "{}, {}".format(*one.replicas), one.verdict, *([one.reason] * reasons),
        ])  # fmt: skip
    return [*heads, *(["why"] * reasons)], rows


def record(found: Comparison, above: float | None) -> dict[str, Any]:
    """Returns the object of ``--json``."""

    def change(one: Interval | None) -> dict[str, float] | None:
        return one and one._asdict()

    return {
        "format": FORMAT,
        "metric": found.metric.name,
        **{
            key: {"given": side.label, "name": side.name, "sweep": side.digest}
            for key, side in (("a", found.a), ("b", found.b))
        },
        "verdict": found.verdict,
        "overall": change(found.overall),
        "same": found.same,
        "fail_above": above,
        "failure": failure(found, above) or None,
        "noise_assumed": found.assumed,
        "changes": [one._asdict() for one in found.changes],
        "only": dict(zip("ab", map(len, found.only), strict=True)),
        "missing": found.only[0],
        "doubt": doubt(found, above) or None,
        "points": [
            {
                "config": one.config, "a": one.a, "b": one.b, "replicas": one.replicas,
                "change": change(one.change), "verdict": one.verdict, "reason": one.reason or None,
            }
            for one in found.points
        ],
    }  # fmt: skip


def html(found: Comparison, above: float | None) -> str:
    """Returns the page of ``--html``."""
    said, failed, doubtful = answer(found), failure(found, above), doubt(found, above)
    blocks: list[Any] = [page.Text(said[0], _TONES.get(_STYLES[found.verdict], ""))]
    blocks += [page.Text(f"regression: {failed}", "bad")] if failed else []
    blocks += [page.Text(doubtful)] if doubtful else []
    blocks.append(page.Listing(said[1:]))
    points = worst(found.points, found.metric.less_is_better)
    heads, rows = _cells(found, points)
    sides = [("A", origin(found.a)), ("B", origin(found.b))]
    changed = [[one.what, one.a, one.b] for one in found.changes]
    return page.render(
        f"{found.a.name} and {found.b.name} compared",
        [
            page.Section("Result", blocks),
            page.Section("Points", [page.PageTable(LEGEND, heads, rows, sorts=True)]),
            page.Section("What changed", [
                page.Facts(sides),
                page.PageTable("Facts in which A and B differ", ["fact", "A", "B"], changed)
                if changed else page.Text("Nothing that is recorded."),
            ]),
        ],
        f"{found.a.label} against {found.b.label}",
    )  # fmt: skip


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"


def _between(found: Interval) -> str:
    return f"{_percent(found.low)} to {_percent(found.high)}"
