"""Picture of a trace: computation, transfers and waits of each rank on one axis of time.

``python -m ringray.lab.report.trace_figure TRACE.json OUT.svg [--caption TEXT]`` draws it.

Ranks are rows, each with a lane of computation, a narrow one of waits and one or more of transfers.
The pointer shows a rectangle's name, bytes and time.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ringray.base.redaction import plain
from ringray.base.units import MIB

_WIDTH, _SIDES, _TOP, _BOTTOM = 900, 62, 40, 44  # of the picture and around the rows, pixels
_HEIGHTS = {"compute": 22, "wait": 8, "transfer": 8}  # of a lane, pixels
_GAP, _BETWEEN = 3, 14  # between lanes and between ranks, pixels
_CHARACTER = 6.0  # approximate width of a character, pixels
# Colour-blind readers can tell them apart.
_COLOURS = {
    "compute, forward (chunk)": "#4477aa",
    "compute, backward (chunk)": "#88bbdd",
    "wait": "#ee6677",
    "transfer under way": "#ccbb44",
}
# Text stays text, and the same trace gives the same bytes.
_SETTINGS: Any = {"font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "trace"}
_SVG = "http://www.w3.org/2000/svg"


class Bar(NamedTuple):
    """One rectangle; ``began`` and ``took`` are milliseconds, ``moved`` bytes."""

    rank: int
    lane: int
    kind: str
    name: str
    began: float
    took: float
    moved: int

    @property
    def legend(self) -> str:
        """The bar's entry in the legend, a key of ``_COLOURS``."""
        if self.kind != "compute":
            return "wait" if self.kind == "wait" else "transfer under way"
        which = "backward" if self.name.startswith("backward") else "forward"
        return f"compute, {which} (chunk)"

    @property
    def title(self) -> str:
        """The text that the pointer shows."""
        moved = f", {self.moved / MIB:.2f} MiB" if self.moved else ""
        return f"{self.kind}: {self.name}{moved}, {self.took:.2f} ms"

    def label(self, room: float) -> str:
        """Returns a computation's chunk or its number, where ``room`` pixels hold it."""
        chunk = self.name.rpartition(": ")[2] if self.kind == "compute" else ""
        texts = (chunk, chunk.rpartition(" ")[2])
        return next((text for text in texts if len(text) * _CHARACTER + 4 < room), "")


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
    bar = Bar(
        int(event["pid"]), int(event["tid"]), event["cat"], plain(str(event["name"])),
        event["ts"] / 1e3, event["dur"] / 1e3, int(moved),
    )  # fmt: skip
    if bar.kind not in _HEIGHTS or not (0 <= bar.began < 1e12 and 0 <= bar.took < 1e12):
        raise ValueError(f"{bar}")
    return bar


def draw(bars: Sequence[Bar], caption: str = "") -> str:
    """Returns the SVG of a trace with ``caption`` below it.

    Raises:
        ValueError: the trace is empty.
    """
    if not bars:
        raise ValueError("the trace is empty")
    tops, bottom = _lanes(bars)
    lines = textwrap.wrap(caption, round((_WIDTH - 24) / _CHARACTER))
    below = _BOTTOM + 15 * len(lines)
    height, width = _TOP + bottom + below, _WIDTH - 2 * _SIDES
    with mpl.rc_context(_SETTINGS):
        figure = Figure((_WIDTH / 72, height / 72))
        place = (_SIDES / _WIDTH, below / height, width / _WIDTH, bottom / height)
        axes = figure.add_axes(place, frameon=False, axisbelow=True)
        end = max(bar.began + bar.took for bar in bars) or 1.0
        axes.set(xlim=(0, end), ylim=(bottom, 0))
        middles = {rank: top + _HEIGHTS["compute"] / 2 for (rank, _), top in reversed(tops.items())}
        axes.set_yticks(list(middles.values()), [f"rank {rank}" for rank in middles])
        axes.set_xlabel("ms", loc="right")
        axes.grid(axis="x", color="#dddddd")
        axes.tick_params(length=0)
        used = {bar.legend for bar in bars}
        handles = [Patch(color=c, label=name) for name, c in _COLOURS.items() if name in used]
        figure.legend(handles=handles, loc="upper left", ncols=4, frameon=False)
        text = "\n".join(lines)
        figure.text(12 / _WIDTH, 6 / height, text, color="#555555", parse_math=False)
        for at, bar in enumerate(bars):
            _rectangle(axes, f"bar{at}", bar, tops[bar.rank, bar.lane], bar.took / end * width)
        out = io.StringIO()
        title = f"Computation, transfers and waits of {len(middles)} ranks in {end:.0f} ms"
        about = {"Title": title, "Date": None, "Creator": None}
        figure.savefig(out, format="svg", metadata=about)
    return _titled(out.getvalue(), {f"bar{at}": bar.title for at, bar in enumerate(bars)})


def _lanes(bars: Sequence[Bar]) -> tuple[dict[tuple[int, int], float], float]:
    """Returns the top of each lane, by rank and lane, and the bottom of the last, in pixels."""
    tops: dict[tuple[int, int], float] = {}
    bottom = 0.0
    for (rank, lane), kind in sorted({(bar.rank, bar.lane): bar.kind for bar in bars}.items()):
        bottom += _BETWEEN if tops and rank != next(reversed(tops))[0] else 0
        tops[rank, lane] = bottom
        bottom += _HEIGHTS[kind] + _GAP
    return tops, bottom


def _rectangle(axes: Axes, name: str, bar: Bar, top: float, room: float) -> None:
    """Draws a bar, ``room`` pixels wide, with its label."""
    height = _HEIGHTS[bar.kind]
    axes.barh(
        top, bar.took, height, bar.began, align="edge", color=_COLOURS[bar.legend],
        edgecolor="white", linewidth=0.5 if room > 3 else 0, gid=name,
    )  # fmt: skip
    if label := bar.label(room):
        axes.text(
            bar.began + bar.took / 2, top + height / 2, label, ha="center", va="center",
            color="white" if "forward" in bar.legend else "#1a1a1a", parse_math=False,
        )  # fmt: skip


def _titled(svg: str, titles: dict[str, str]) -> str:
    """Adds titles to the shapes of an SVG, by their ids; matplotlib writes none."""
    ElementTree.register_namespace("", _SVG)
    root = ElementTree.fromstring(svg)
    for element in root.iter(f"{{{_SVG}}}g"):
        if (text := titles.get(element.get("id", ""))) is not None:
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = text
            element.insert(0, title)
    return ElementTree.tostring(root, encoding="unicode")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; exit code 2 where a file cannot be read or written or is not a trace."""
    parser = argparse.ArgumentParser(
        prog="python -m ringray.lab.report.trace_figure", description="Draws a trace as an SVG."
    )
    parser.add_argument("trace", type=Path, help="JSON file that kind overlap wrote")
    parser.add_argument("out", type=Path, help="SVG file to write")
    parser.add_argument("--caption", default="", help="text below the picture")
    given = parser.parse_args(arguments)
    try:
        given.out.write_text(draw(read(given.trace.read_text()), given.caption))
    except (OSError, ValueError) as error:
        print(f"{given.trace}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
