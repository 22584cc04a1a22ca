"""Rows of the tables of docs/published.md, as the records have their figures."""

from __future__ import annotations

import re

from tests.support.records import rows

WHO = r"(predicted|null model)"
RUNS, STRIPED = "published-runs.json", "published-striped.json"


def sums(group: str) -> list[str]:
    """Returns median error, 90th percentile and share that is too fast: predicted, then null."""
    lines = [
        re.findall(r"[\d.]+%", line)
        for line in rows("published.json")
        if re.match(rf" *\d+ {group} +{WHO}", line)
    ]
    return [figure for median, _, ninth, fast in lines for figure in (median, ninth, fast)]


def order() -> list[str]:
    """Returns pairs of rivals, then those in order, as equal and reversed: predicted, and null."""
    lines = [line for line in rows("published.json") if "pairs of rivals" in line]
    pairs, right, wrong, equal = zip(*(re.findall(r"\d+", line) for line in lines), strict=True)
    return [pairs[0], right[0], equal[0], wrong[0], right[1], equal[1], wrong[1]]


def gaps() -> list[str]:
    """Returns the pairs in order and all pairs, of those predicted to be close and of others."""
    lines = [line for line in rows("published.json") if "pairs predicted" in line]
    return [figure for line in lines for figure in re.findall(r"^\d+|\d+(?= in order)", line)[::-1]]


def cells(name: str) -> list[list[str]]:
    """Returns the cells of a record's lines, none of those that are empty."""
    return [line.split(" | ") for line in rows(name) if line]


def beside(figures: str) -> str:
    """Returns two cells: published, and predicted with its error; of figures that nobody published
    only the predicted one."""
    published, *predicted = figures.split()
    return f"{published} | {predicted[0]} ({predicted[1]})" if predicted else f"– | {published}"


def ringed() -> list[str]:
    """Returns a row for each run of TRL."""
    return [
        f"| {name} | {beside(seconds)} | {beside(gigabytes)} | {', '.join(own.split())} |"
        for name, seconds, gigabytes, own in (line for line in cells(RUNS) if len(line) == 4)
    ]


def rated() -> list[str]:
    """Returns a row for each run of prime-rl."""
    return [
        f"| {name} | {' | '.join((*rates.split(), *memory.split()))} |"
        for name, rates, memory in (line for line in cells(RUNS) if len(line) == 3)
    ]


def striped() -> list[str]:
    """Returns a row for each ratio of striped to contiguous rows."""
    return [f"| {name} | {beside(figures)} |" for name, figures in cells(STRIPED)]
