"""Rows of the tables of docs/packed.md, as the records have their figures."""

from __future__ import annotations

from tests.support.records import CPU, rows

SHOWN = ("contiguous", "zigzag", "striped", "balanced")
OURS = ("balanced, direct", "balanced, hybrid:8")
COLUMNS = 5  # of a record: what it is, GPUs, three figures


def cells(name: str) -> list[list[str]]:
    """Returns the cells of a record's lines, without its heads."""
    return [line.split() for line in rows(name)[1:]]


def deals() -> list[str]:
    """Returns balance, the least of it and the rows of the busiest rank, by table and ranks."""
    figures = {tuple(line[:3]): line[3:6] for line in cells("balanced-deal.json")}
    lines = []
    for table, ranks in dict.fromkeys(key[:2] for key in figures):
        shown = [figures[table, ranks, partition] for partition in SHOWN]
        numbers = [f"{float(x):.2f} ({float(y):.2f}), {float(z):.1f}" for x, y, z in shown]
        lines.append(f"| {table}, {ranks} | {' | '.join(numbers)} |")
    return lines


def plans() -> str:
    """Returns the median and the longest time of dealing and planning for 32 ranks."""
    times = [line[7:9] for line in cells("balanced-deal.json") if line[1:3] == ["32", "balanced"]]
    medians, longest = zip(*((float(x), float(y)) for x, y in times), strict=True)
    return f"{max(medians):.0f} ms in the median, {max(longest):.0f} ms at most"


def pairs() -> list[str]:
    """Returns a row for each batch of measured pairs."""
    lines = []
    for line in cells(f"{CPU}.balanced-pairs.json"):
        ranks, documents, _, ours, theirs, balanced, zigzag, ratio, least, most = line
        numbers = f"{float(theirs):.2f}, {float(ours):.2f}", f"{float(zigzag):,.0f} ms"
        ratios = f"{float(ratio):.2f} ({float(least):.2f} to {float(most):.2f})"
        lines.append(
            f"| {ranks} | {documents} | {' | '.join(numbers)} | {float(balanced):,.0f} ms | "
            f"{ratios} |"
        )
    return lines


def growth() -> str:
    """Returns the memory of a process after a tenth of 10,000 batches, and after all."""
    memory = [line[1] for line in cells(f"{CPU}.balanced-batches.json")]
    return f"{memory[0]} MiB after 1,000 batches, {memory[-1]} MiB after 10,000"


def charts() -> list[str]:
    """Returns a row for each way and direction: figures of 8, 16, 32 and 64 GPUs."""
    lines = rows("packed-charts.json")
    table = []
    for place, direction in enumerate(("forward", "backward")):
        begin = lines.index(f"packed documents, causal, {direction}") + 2
        for way in ("ring", "usp"):
            bars = [line.split() for line in lines[begin : begin + 8] if line.startswith(way)]
            numbers = " | ".join(f"{bar[2]} ({float(bar[3]):.0f})" for bar in bars)
            table.append(f"| {way}, {direction} | {numbers} |")
        for way in OURS:
            figures = [line.removeprefix(way).split() for line in lines if line.startswith(way)]
            numbers = " | ".join(f"({float(each[1 + place]):.0f})" for each in figures)
            table.append(f"| {way}, {direction} | {numbers} |")
    return table
