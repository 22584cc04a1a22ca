"""Picture of a trace: computation, transfers and waits of each rank on one axis of time.

``python -m ringray.lab.report.trace_figure TRACE.json OUT.svg [--caption TEXT]`` draws it.

Ranks are rows, each with a lane of computation, a narrow one of waits and one or more of transfers.
The pointer shows a rectangle's name, bytes and time.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt

from ringray.base.errors import reason_of
from ringray.base.redaction import plain
from ringray.base.units import MIB
from ringray.lab.report.figures import style
from ringray.lab.report.palette import colour, light

_WIDTH = 760  # of the rows, pixels
_HEIGHTS = {"compute": 22, "wait": 8, "transfer": 8}  # of a lane, pixels
_GAP, _BETWEEN = 3, 14  # between lanes and between ranks, pixels
_CHARACTER = 6.0  # approximate width of a character, pixels
# Colour-blind readers can tell them apart.
_COLOURS = {
    "compute, forward (chunk)": colour("c1"),
    "compute, backward (chunk)": colour("pale1"),
    "wait": colour("c2"),
    "transfer under way": colour("c5"),
}


class Bar(NamedTuple):
    """One rectangle."""

    rank: int
    lane: int
    kind: str  # a key of _HEIGHTS
    name: str
    began: float  # milliseconds
    took: float
    moved: int  # bytes


def read(text: str) -> list[Bar]:
    """Returns the bars of a trace.

    Raises:
        ValueError: ``text`` is not a trace.
    """
    try:
        return [_bar(event) for event in json.loads(text) if event["ph"] == "X"]
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a trace of ringray: {error!r}") from None


def _bar(event: dict[str, Any]) -> Bar:
    moved = max(event["args"].get("sent_bytes", 0), event["args"].get("received_bytes", 0))
    rank, lane, name = int(event["pid"]), int(event["tid"]), plain(str(event["name"]))
    began, took = event["ts"] / 1e3, event["dur"] / 1e3
    bar = Bar(rank, lane, event["cat"], name, began, took, int(moved))
    if bar.kind not in _HEIGHTS or not (0 <= bar.began < 1e12 and 0 <= bar.took < 1e12):
        raise ValueError(f"{bar}")
    return bar


def draw(bars: Sequence[Bar], caption: str = "") -> str:
    """Returns the SVG of a trace with ``caption`` below it, on white.

    Raises:
        ValueError: the trace is empty.
    """
    if not bars:
        raise ValueError("the trace is empty")
    end = max(bar.began + bar.took for bar in bars)
    ranks = len({bar.rank for bar in bars})
    title = f"Computation, transfers and waits of {ranks} ranks in {end:.0f} ms"
    return light(style.svg(style.spec(chart(bars, caption)), "trace", title))


def chart(bars: Sequence[Bar], caption: str = "") -> style.Chart:
    """Returns the chart of a trace that has bars."""
    tops, bottom = _lanes(bars)
    end = max(bar.began + bar.took for bar in bars) or 1.0
    first = {rank: top for (rank, _), top in reversed(tops.items())}
    middles = {top + _HEIGHTS["compute"] / 2: f"rank {rank}" for rank, top in first.items()}
    records = [_record(bar, tops[bar.rank, bar.lane], bar.took / end * _WIDTH) for bar in bars]
    used = [name for name in _COLOURS if any(record["legend"] == name for record in records)]
    colours = alt.Scale(domain=used, range=[_COLOURS[name] for name in used])
    scale = alt.Scale(domain=[0, bottom], reverse=True, nice=False)
    places, names = [*middles], style.labels(middles)
    axis = alt.Axis(values=places, labelExpr=names, grid=False, ticks=False, domain=False)
    y = alt.Y("top:Q", title=None, scale=scale, axis=axis)
    x = alt.X("began:Q", title="ms", scale=alt.Scale(domain=[0, end], nice=False))
    legend = alt.Legend(title=None, orient="top")
    rectangles = (
        alt.Chart()
        .mark_rect(stroke=colour("paper"))
        .encode(x=x, x2="ended:Q", y=y, y2="bottom:Q", description="title:N")
    )
    rectangles = rectangles.encode(
        color=alt.Color("legend:N", scale=colours, legend=legend),
        strokeWidth=alt.condition("datum.wide", alt.value(0.5), alt.value(0)),
        tooltip=alt.Tooltip("title:N", title=" "),
    )
    ink = alt.condition("datum.pale", alt.value(style.INK), alt.value(colour("paper")))
    texts = alt.Chart().transform_filter("datum.label").mark_text(fontSize=11, aria=False)
    texts = texts.encode(x="middle:Q", y="centre:Q", text="label:N", color=ink)
    panel = style.panel(records, rectangles, texts)
    lines = textwrap.wrap(caption, round(_WIDTH / 5.5))
    below = alt.TitleParams(lines, orient="bottom", color=style.PALE)
    below.fontSize, below.fontWeight = 12, "normal"
    return style.figure([panel.properties(width=_WIDTH, height=bottom)], below)


def _record(bar: Bar, top: float, room: float) -> dict[str, Any]:
    """Returns a bar, ``room`` pixels wide, as the chart takes it."""
    legend, label = "wait" if bar.kind == "wait" else "transfer under way", ""
    if bar.kind == "compute":
        which = "backward" if bar.name.startswith("backward") else "forward"
        legend = f"compute, {which} (chunk)"
        chunk = bar.name.rpartition(": ")[2]
        texts = (chunk, chunk.rpartition(" ")[2])  # the latter is its number alone
        label = next((text for text in texts if len(text) * _CHARACTER + 4 < room), "")
    moved = f", {bar.moved / MIB:.2f} MiB" if bar.moved else ""
    title = f"{bar.kind}: {bar.name}{moved}, {bar.took:.2f} ms"
    height, ended = _HEIGHTS[bar.kind], bar.began + bar.took
    record: dict[str, Any] = {"legend": legend, "title": title, "label": label}
    record |= {"began": bar.began, "ended": ended, "middle": bar.began + bar.took / 2}
    record |= {"top": top, "bottom": top + height, "centre": top + height / 2}
    return record | {"wide": room > 3, "pale": "backward" in legend}


def _lanes(bars: Sequence[Bar]) -> tuple[dict[tuple[int, int], float], float]:
    """Returns the top of each lane, by rank and lane, and the bottom of the last, in pixels."""
    tops: dict[tuple[int, int], float] = {}
    bottom = 0.0
    for (rank, lane), kind in sorted({(bar.rank, bar.lane): bar.kind for bar in bars}.items()):
        bottom += _BETWEEN if tops and rank != next(reversed(tops))[0] else 0
        tops[rank, lane] = bottom
        bottom += _HEIGHTS[kind] + _GAP
    return tops, bottom


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; exit code 2 where a file cannot be read or written or is not a trace."""
    parser = argparse.ArgumentParser(
        prog="python -m ringray.lab.report.trace_figure", description="Draws a trace as an SVG."
    )
    parser.add_argument("trace", type=Path, help="JSON file that kind overlap wrote")
    parser.add_argument("out", type=Path, help="SVG file to write")
    parser.add_argument("--caption", default="", help="text below the picture")
    options = parser.parse_args(arguments)
    try:
        options.out.write_text(draw(read(options.trace.read_text()), options.caption))
    except (OSError, ValueError) as error:
        print(f"{options.trace}: {reason_of(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
