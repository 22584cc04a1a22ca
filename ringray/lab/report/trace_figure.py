"""A trace as a picture.

``python -m ringray.lab.report.trace_figure TRACE.json OUT.svg [--caption TEXT]`` draws it.

Ranks are rows, each with a lane of computation, a narrow one of waits and one or more of transfers,
on a common axis of milliseconds. The picture is 900 pixels wide, as pages are, and names each
rectangle where the pointer rests on it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.sax.saxutils import escape

from ringray.base.redaction import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 900
LEFT, RIGHT, TOP = 62, 16, 46
GAP, BETWEEN = 3, 14  # pixels between the lanes of a rank, and between ranks
HEIGHTS = {"compute": 22, "wait": 8, "transfer": 8}
# Told apart by colour-blind eyes too.
COLOURS = {
    "forward": "#4477aa",
    "backward": "#88bbdd",
    "transfer": "#ccbb44",
    "wait": "#ee6677",
}
_FONT = "font-family='Helvetica, Arial, sans-serif'"
_CHARACTER = 6.0  # pixels, about, at font size 11


class Bar(NamedTuple):
    """One rectangle; ``began`` and ``took`` are milliseconds."""

    rank: int
    lane: int
    kind: str
    name: str
    began: float
    took: float
    moved: int

    @property
    def colour(self) -> str:
        """By what it is, for computation by the pass it belongs to."""
        if self.kind != "compute":
            return COLOURS[self.kind]
        return COLOURS["backward" if self.name.startswith("backward") else "forward"]


def read(text: str) -> list[Bar]:
    """The bars of a trace; ValueError if it is none."""
    try:
        events = json.loads(text)
        return [_bar(event) for event in events if event["ph"] == "X"]
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a trace of ringray: {error!r}") from None


def _bar(event: dict[str, Any]) -> Bar:
    moved = max(event["args"].get("sent_bytes", 0), event["args"].get("received_bytes", 0))
    bar = Bar(
        int(event["pid"]), int(event["tid"]), event["cat"], plain(str(event["name"])),
        event["ts"] / 1e3, event["dur"] / 1e3, int(moved),
    )  # fmt: skip
    if bar.kind not in HEIGHTS or not (0 <= bar.began < 1e12 and 0 <= bar.took < 1e12):
        raise ValueError(f"{bar}")
    return bar


def draw(bars: Sequence[Bar], caption: str = "") -> str:
    """The SVG of a trace. ``caption`` stands below it, in as many lines as it needs."""
    if not bars:
        raise ValueError("the trace is empty")
    end = max(bar.began + bar.took for bar in bars) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / end
    tops, bottom = _layout(bars)
    shapes = [_legend(bars)]
    for rank in sorted({bar.rank for bar in bars}):
        lanes = [(top, kind) for (at, _), (top, kind) in tops.items() if at == rank]
        middle = (min(top for top, _ in lanes) + max(t + HEIGHTS[k] for t, k in lanes)) / 2
        shapes.append(_text(LEFT - 8, middle + 4, f"rank {rank}", anchor="end"))
    shapes += _axis(end, scale, bottom)
    for bar in bars:
        top, kind = tops[bar.rank, bar.lane]
        shapes += _rectangle(bar, top, HEIGHTS[kind], scale)
    lines = _wrapped(caption, round((WIDTH - 24) / _CHARACTER))
    for at, line in enumerate(lines):
        shapes.append(_text(12, bottom + 54 + 15 * at, line, colour="#555555"))
    height = round(bottom + 44 + 15 * len(lines) + (6 if lines else 0))
    ranks = len({bar.rank for bar in bars})
    said = f"What {ranks} ranks computed, sent and waited for in {end:.0f} ms"
    size = f"width='{WIDTH}' height='{height}'"
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} viewBox='0 0 {WIDTH} {height}' "
        f"role='img' aria-label='{said}' {_FONT} font-size='11'>"
    )
    return "\n".join([head, f"<rect {size} fill='#ffffff'/>", *shapes, "</svg>", ""])


def _layout(bars: Sequence[Bar]) -> tuple[dict[tuple[int, int], tuple[float, str]], float]:
    """By rank and lane, where it begins and what it shows; and where the last one ends."""
    kinds = {(bar.rank, bar.lane): bar.kind for bar in bars}
    tops, y, rank = {}, float(TOP), min(bar.rank for bar in bars)
    for at in sorted(kinds):
        if at[0] != rank:
            y, rank = y + BETWEEN, at[0]
        tops[at] = (y, kinds[at])
        y += HEIGHTS[kinds[at]] + GAP
    return tops, y


def _rectangle(bar: Bar, top: float, height: int, scale: float) -> list[str]:
    x, width = LEFT + bar.began * scale, bar.took * scale
    if width < 0.2:  # it would be a hair, or nothing
        return []
    moved = f", {bar.moved / (1 << 20):.2f} MiB" if bar.moved else ""
    said = f"{bar.kind}: {bar.name}{moved}, {bar.took:.2f} ms"
    edge = " stroke='#ffffff' stroke-width='0.6'" if width > 3 else ""
    place = f"x='{x:.2f}' y='{top:.1f}' width='{width:.2f}' height='{height}'"
    shapes = [f"<rect {place} fill='{bar.colour}'{edge}><title>{escape(said)}</title></rect>"]
    label = bar.name.rpartition(": ")[2]
    if bar.kind == "compute":
        for text in (label, label.rpartition(" ")[2]):
            if len(text) * _CHARACTER + 4 < width:
                white = bar.colour == COLOURS["forward"]
                colour = "#ffffff" if white else "#1a1a1a"
                shapes.append(_text(x + width / 2, top + 15, text, anchor="middle", colour=colour))
                break
    return shapes


def _axis(end: float, scale: float, bottom: float) -> list[str]:
    """Ticks at round numbers of milliseconds, and lines up from them."""
    step = 10 ** math.floor(math.log10(end / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if end / (step * factor) <= 10)
    shapes = []
    for at in range(math.floor(end / step) + 1):
        x = LEFT + at * step * scale
        shapes.append(
            f"<line x1='{x:.2f}' y1='{TOP - 6}' x2='{x:.2f}' y2='{bottom + 4:.1f}' "
            "stroke='#dddddd' stroke-width='1'/>"
        )
        if x < WIDTH - RIGHT - 40:
            shapes.append(_text(x, bottom + 18, f"{at * step:g}", anchor="middle"))
    shapes.append(_text(WIDTH - RIGHT, bottom + 18, "ms", anchor="end"))
    return shapes


def _legend(bars: Sequence[Bar]) -> str:
    """What the colours mean, of those that occur."""
    words = {
        "forward": "compute, forward (chunk)",
        "backward": "compute, backward (chunk)",
        "wait": "wait",
        "transfer": "transfer under way",
    }
    used = {bar.colour for bar in bars}
    x, shapes = LEFT, []
    for name, text in words.items():
        if COLOURS[name] in used:
            shapes.append(f"<rect x='{x}' y='14' width='14' height='11' fill='{COLOURS[name]}'/>")
            shapes.append(_text(x + 19, 24, text))
            x += 19 + round(len(text) * _CHARACTER) + 22
    return "\n".join(shapes)


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#1a1a1a") -> str:
    place = f" text-anchor='{anchor}'" if anchor != "start" else ""
    return f"<text x='{x:.1f}' y='{y:.1f}' fill='{colour}'{place}>{escape(text)}</text>"


def _wrapped(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 2 where a file cannot be read or written, or is no trace."""
    parser = argparse.ArgumentParser(
        prog="python -m ringray.lab.report.trace_figure", description="Draws a trace as an SVG."
    )
    parser.add_argument("trace", type=Path, help="JSON that kind overlap wrote")
    parser.add_argument("out", type=Path, help="the SVG to write")
    parser.add_argument("--caption", default="", help="a text below the picture")
    given = parser.parse_args(arguments)
    try:
        given.out.write_text(draw(read(given.trace.read_text()), given.caption))
    except (OSError, ValueError) as error:
        print(f"{given.trace}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
