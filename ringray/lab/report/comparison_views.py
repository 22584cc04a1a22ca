"""A comparison in words, as a table, as JSON and as a page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ringray.base.units import ABSENT, plural
from ringray.lab.report import page, words
from ringray.lab.report.comparison import ComparedSide, Comparison, PointChange
from ringray.lab.report.noise import UNKNOWN, Effect
from ringray.lab.report.tables import bare_table

FORMAT = 2  # of the object of ``--json``; grows with each field
_STYLES = {"lost": "bold red", "slower": "red", "worse": "red", "faster": "green"}
_STYLES |= {"better": "green", "gained": "", "equal": "", "not decided": "yellow"}
_STYLES |= {"absent": "bright_black"}
_TONES = {"red": "bad", "bold red": "bad", "green": "good"}
LEGEND = (
    "change: of the medians, and where it lies in 95% of comparisons; a verdict allows for all "
    "points: in 97.5% of comparisons without a change, none is slower or faster; not decided: the "
    "interval holds no change and one that counts"
)
_NAMED = 5  # points that are told by name


def answer(result: Comparison) -> list[str]:
    """Writes the result in words."""
    compared = sum(point.change is not None for point in result.points)
    change = f"{result.metric.name} {_percent(result.overall.ratio)} ({_between(result.overall)})"
    lead = "not decided" if result.verdict == "not decided" else f"B is {result.verdict}"
    lines = [f"{lead}: {change}, the median change of {plural(compared, 'point')}"]
    counts = Counter[str](point.verdict for point in result.points)
    verdicts = (f"{counts[name]:,} {name}" for name in _STYLES if counts[name])
    lines.append("points: " + " · ".join(verdicts))
    for side, only in zip("AB", result.only, strict=True):
        if only:
            lines.append(f"{plural(len(only), 'point')} in {side} only: {_names(result, only)}")
    if result.same:
        which = f"{result.same:,} of {plural(len(result.a.rows), 'measurement')}"
        which = "all measurements" if result.same == len(result.a.rows) else which
        lines.append(f"A is compared with itself: {which} of A are in B, too")
    if result.assumed:
        lines.append(
            "each point was measured once, which tells nothing of its noise: no point is decided, "
            f"and changes of the whole sweep are compared with a noise of {UNKNOWN:.0%}, which is "
            "assumed; replicas: 3 under measure in the spec measures it"
        )
    return lines


def failure(result: Comparison, above: float | None) -> str:
    """Writes which regressions are beyond the share ``above`` whatever the noise, and which points
    B lacks; "" if there is none, or no limit."""
    if above is None:
        return ""
    beyond, worse, phrases = f"by more than {above * 100:g}%", result.regressions(above), []
    if result.regressed(above):
        phrases.append(f"B as a whole is {result.verdict} {beyond}")
    lost = sum(point.verdict == "lost" for point in worse)
    if len(worse) > lost:
        phrases.append(f"{plural(len(worse) - lost, 'point')} worse {beyond} and the noise")
    if lost:
        phrases.append(f"{plural(lost, 'point')} without a result in B")
    if missing := result.only[0]:
        lacks = f"{plural(len(missing), 'point')} of A that B lacks"
        phrases.append(f"{lacks}: {_names(result, missing)}")
    return "; ".join(phrases)


def doubt(result: Comparison, above: float | None) -> str:
    """Writes how many points may be worse by more than ``above``, or not; "" if none."""
    if above is None or not (points := result.doubtful(above)):
        return ""
    many = f"{plural(len(points), 'point')} may be worse by more than {above * 100:g}%"
    return f"not decided: {many}, or not: {_names(result, [point.config for point in points])}"


def _names(result: Comparison, configs: Sequence[Mapping[str, Any]]) -> str:
    """Writes the first points by the fields in which points differ."""
    every = [*(point.config for point in result.points), *result.only[0], *result.only[1]]
    fields = words.varying(every)
    names = [words.label(config, fields) or "the only point" for config in configs[:_NAMED]]
    return ", ".join(names) + (f" and {len(configs) - _NAMED} more" * (len(configs) > _NAMED))


def origin(side: ComparedSide) -> str:
    """Writes what a side is."""
    trials = sum(row.status not in (None, "pruned") for row in side.rows)
    return f"{side.name} {side.digest[:12]} ({side.label}), {plural(trials, 'trial')}"


def changes(result: Comparison) -> list[str]:
    """Writes what differs between the sides."""
    return [f"{change.what}: {change.a} → {change.b}" for change in result.changes]


def worst(result: Comparison) -> list[PointChange]:
    """Sorts the points: those without a value in B, then by how much they are worse."""
    sign = -1 if result.metric.less_is_better else 1

    def rank(point: PointChange) -> float:
        if point.change is None:
            return -math.inf if point.verdict == "lost" else math.inf
        return sign * point.change.ratio

    return sorted(result.points, key=rank)


def points_table(result: Comparison, points: Sequence[PointChange]) -> Table:
    """Returns a line for each of ``points``."""
    heads, rows = _cells(result, points)
    table = bare_table(*heads, texts=("verdict", "why"))
    for point, row in zip(points, rows, strict=True):
        texts: list[str | Text] = [cell if isinstance(cell, str) else cell.text for cell in row]
        texts[heads.index("verdict")] = Text(point.verdict, _STYLES[point.verdict])
        table.add_row(*texts)
    return table


def _cells(
    result: Comparison, points: Sequence[PointChange]
) -> tuple[list[str], list[list[str | page.Number]]]:
    """Returns the headings and the lines of a table."""
    fields = words.varying(point.config for point in result.points)
    metric = result.metric
    heading = metric.heading.split("–")[0] or metric.name
    reasons = any(point.reason for point in points)
    heads = [words.HEADS[name] for name in fields] or ["point"]
    heads += [f"A {heading}", f"B {heading}", "change", "95% interval", "replicas", "verdict"]
    rows: list[list[str | page.Number]] = []
    for point in points:
        cells: list[str | page.Number] = [ABSENT, ABSENT]
        if change := point.change:
            tone = _TONES.get(_STYLES[point.verdict], "")
            cells = [page.Number(_percent(change.ratio), change.ratio, tone), _between(change)]
        cells += ["{}, {}".format(*point.replicas), point.verdict, *([point.reason] * reasons)]
        name = [words.value(name, point.config.get(name)) for name in fields] or ["1"]
        values = [page.Number(words.number(metric, value), value) for value in (point.a, point.b)]
        rows.append([*name, *values, *cells])
    return [*heads, *(["why"] * reasons)], rows


def record(result: Comparison, above: float | None) -> dict[str, Any]:
    """Returns the object of ``--json``."""

    def interval(change: Effect | None) -> dict[str, float] | None:
        return change and {"ratio": change.ratio, "low": change.low, "high": change.high}

    def side(compared: ComparedSide) -> dict[str, str]:
        return {"given": compared.label, "name": compared.name, "sweep": compared.digest}

    points = [
        {"config": point.config, "a": point.a, "b": point.b, "replicas": point.replicas}
        | {"change": interval(point.change), "verdict": point.verdict}
        | {"reason": point.reason or None}
        for point in result.points
    ]
    return {
        "format": FORMAT,
        "metric": result.metric.name,
        "a": side(result.a),
        "b": side(result.b),
        "verdict": result.verdict,
        "overall": interval(result.overall),
        "same": result.same,
        "fail_above": above,
        "failure": failure(result, above) or None,
        "noise_assumed": result.assumed,
        "changes": [change._asdict() for change in result.changes],
        "only": dict(zip("ab", map(len, result.only), strict=True)),
        "missing": result.only[0],
        "doubt": doubt(result, above) or None,
        "points": points,
    }


def html(result: Comparison, above: float | None) -> str:
    """Returns the page of ``--html``."""
    lines, failed, doubtful = answer(result), failure(result, above), doubt(result, above)
    blocks: list[Any] = [page.Text(lines[0], _TONES.get(_STYLES[result.verdict], ""))]
    blocks += [page.Text(f"regression: {failed}", "bad")] if failed else []
    blocks += [page.Text(doubtful)] if doubtful else []
    blocks.append(page.Listing(lines[1:]))
    points = worst(result)
    heads, rows = _cells(result, points)
    changed: list[Any] = [page.Facts([("A", origin(result.a)), ("B", origin(result.b))])]
    if result.changes:
        caption, heads_of_facts = "Facts in which A and B differ", ["fact", "A", "B"]
        changed.append(page.PageTable(caption, heads_of_facts, result.changes))
    else:
        changed.append(page.Text("Nothing that is recorded."))
    table = page.PageTable(LEGEND, heads, rows, sorts=True)
    parts = {"Result": blocks, "Points": [table], "What changed": changed}
    sections = [page.Section(title, blocks) for title, blocks in parts.items()]
    title = f"{result.a.name} and {result.b.name} compared"
    return page.render(title, sections, f"{result.a.label} against {result.b.label}")


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"


def _between(change: Effect) -> str:
    return f"{_percent(change.low)} to {_percent(change.high)}"
