"""Style of figures: units on each axis, colours and marks for colour-blind readers too.

The only module that gives charts to Vega. Colours are variables of CSS (``report/palette.py``): a
page sets them for light and dark paper, a picture that stands alone is on white.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt
import vl_convert

from ringray.lab.report.page import Picture
from ringray.lab.report.palette import LINES, VEGA_LITE, colour, light

Chart = alt.ConcatChart
Layers = alt.LayerChart
Records = list[dict[str, Any]]

# The first is part of vl-convert, so pictures are the same on every machine.
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross"]
SHAPES += ["triangle-down", "triangle-right", "triangle-left"]
_DASHES = ([1, 0], [6, 3], [2, 2])
INK, PALE, BACK = colour("ink"), colour("pale"), colour("back")
# Two panels beside each other with their axes are as wide as MLflow's column for descriptions.
PANEL = (310, 210)  # pixels
_ALONE = 600  # width of a single panel, pixels
_COLUMNS = 2
_TEXT = 11
_NAME = 200  # greatest width of a name at an axis, pixels
_CHARACTER = 6.0  # width of a character of that size, pixels
_LABELLED = re.compile(
    r'(<path|<line|<text) aria-label="([^"]*)" role="graphics-symbol"'
    r'(?: aria-roledescription="[^"]*")?([^>]*?)(/>|>)'
)
_SCALE = 1.1  # of a PNG
_LABELS = {"labelFontSize": _TEXT, "titleFontSize": _TEXT, "titleFontWeight": "normal"}
_CONFIG: dict[str, Any] = {
    "background": colour("paper"),
    "font": FONT,
    "padding": 8,
    "view": {"stroke": None},
    "title": {"color": INK, "fontSize": 15, "anchor": "start", "offset": 12},
    "axis": _LABELS
    | {"labelColor": PALE, "titleColor": INK, "domainColor": BACK, "tickColor": BACK}
    | {"gridColor": colour("rule"), "labelLimit": _NAME, "titlePadding": 8},
    "axisQuantitative": {"tickCount": 6, "labelOverlap": "greedy", "labelSeparation": 8},
    "legend": _LABELS
    | {"labelColor": INK, "titleColor": PALE, "labelLimit": 340, "columnPadding": 18}
    | {"orient": "bottom", "symbolSize": 70, "symbolOpacity": 1},
    "text": {"color": INK, "fontSize": _TEXT},
    "concat": {"spacing": 28},
}


def spec(chart: Chart) -> dict[str, Any]:
    """Returns a chart as Vega-Lite takes it, with null for numbers that JSON lacks."""
    made = chart.to_dict(validate=False)  # the contract suite does
    parsed: dict[str, Any] = json.loads(json.dumps(made), parse_constant=lambda _: None)
    return parsed


def png(chart: Chart) -> bytes:
    """Returns a chart as PNG, on white."""
    text = light(json.dumps(spec(chart)))
    return vl_convert.vegalite_to_png(text, vl_version=VEGA_LITE, scale=_SCALE)


def svg(made: Mapping[str, Any], name: str, title: str) -> str:
    """Returns a chart as SVG for a page.

    Its shapes have titles, which the pointer shows without a script. ``name``: what tells its ids
    from those of other figures of the page.
    """
    text = vl_convert.vegalite_to_svg(json.dumps(made), vl_version=VEGA_LITE)
    text = re.sub(r'(\bid="|url\(#)', rf"\1{name}-", text)
    text = _LABELLED.sub(_titled, text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1)


def picture(chart: Chart, name: str, title: str = "") -> Picture:
    """Returns a chart as a page takes it, under ``title`` or its own title as a heading."""
    made = spec(chart)
    title = title or made.pop("title")["text"]
    return Picture(title, svg(made, name, title))


def _titled(match: re.Match[str]) -> str:
    tag, label, rest, end = match.groups()
    close = f"</{tag[1:]}>" if end == "/>" else ""
    return f"{tag}{rest}><title>{label}</title>{close}"


def panel(records: Records, *layers: alt.Chart, title: str = "") -> Layers:
    """Returns one set of axes whose layers share ``records``."""
    small = alt.TitleParams(title, fontSize=12, offset=6, color=INK)
    return Layers(layer=list(layers), data=alt.Data(values=records), title=small)


def grid(
    panels: Sequence[Layers],
    title: str,
    left_out: int = 0,
    height: int = PANEL[1],
    names: Iterable[str] = (),
) -> Chart:
    """Returns a figure of panels, ``_COLUMNS`` in a row; ``names`` stand at the y axes."""
    columns = min(len(panels), _COLUMNS)
    width = PANEL[0] if columns > 1 else _ALONE
    # An axis has room for 50 pixels of names; longer ones take theirs from the panel.
    width -= max(0, min(_NAME, round(max(map(len, names), default=0) * _CHARACTER)) - 50)
    if left_out:
        title += f"  (and {left_out} more problems: see the table)"
    sized = [panel.properties(width=width, height=height) for panel in panels]
    return figure(sized, alt.TitleParams(title), columns)


def figure(panels: Sequence[Layers], title: alt.TitleParams, columns: int = 1) -> Chart:
    """Returns panels that have their sizes as one chart."""
    made = alt.concat(*panels).properties(
        columns=columns, title=title, config=alt.Config(**_CONFIG)
    )
    return made.resolve_scale(x="independent", y="independent")


def tip(**names: str) -> list[alt.Tooltip]:
    """Returns what the pointer shows: fields with their names; numbers with four digits."""
    exact = ("strategy", "tokens", "length", "text", "name", "step")
    return [
        alt.Tooltip(f"{field}:N", title=name)
        if field in exact
        else alt.Tooltip(f"{field}:Q", title=name, format=",.4~r")
        for field, name in names.items()
    ]


def looks(names: Sequence[str], baseline: str | None = None) -> dict[str, Any]:
    """Returns encodings by which lines look the same in every panel: colour, mark and, after the
    last colour, dashes; those of the ``baseline`` are pale."""
    domain = [*names, *([baseline] if baseline else [])]
    back = [baseline is not None and name == baseline for name in domain]
    colours = [BACK if is_back else LINES[index % 8] for index, is_back in enumerate(back)]
    shapes = ["stroke" if is_back else SHAPES[index % 8] for index, is_back in enumerate(back)]
    dashes = [[3, 3] if is_back else _DASHES[index // 8 % 3] for index, is_back in enumerate(back)]
    legend = None if len(domain) < 2 else alt.Legend(title=None, columns=columns(domain))
    channels = (alt.Color, colours), (alt.Shape, shapes), (alt.StrokeDash, dashes)
    scales = [(channel, alt.Scale(domain=domain, range=values)) for channel, values in channels]
    made = [channel("strategy:N", scale=scale, legend=legend) for channel, scale in scales]
    return dict(zip(("color", "shape", "strokeDash"), made, strict=True))


def columns(names: Sequence[str]) -> int:
    """Returns how many entries of a legend fit beside each other."""
    # In 720 pixels of a figure; a symbol with its padding takes as much as six characters.
    return max(1, min(len(names), int(720 / ((max(map(len, names)) + 6) * _CHARACTER))))


def lengths(values: Sequence[float]) -> alt.X:
    """Returns a logarithmic x axis with ticks at (some of) the sequence lengths."""
    ticks = sorted(set(values))
    step = math.ceil(len(ticks) / 7)
    shown = ticks[::-1][::step][::-1]  # the longest always is
    axis = alt.Axis(
        values=shown, labelExpr=labels({length: tokens(length) for length in shown}), grid=True
    )
    scale = alt.Scale(type="log", base=2, nice=False, padding=12)
    return alt.X("length:Q", title="sequence length (tokens)", scale=scale, axis=axis)


def labels(names: Mapping[float, str]) -> str:
    """Returns the expression that writes the ticks of an axis by their names."""
    return f"{json.dumps({f'{place:.15g}': name for place, name in names.items()})}[datum.value]"


def heat(
    records: Records, x: alt.X, y: alt.Y, shade: alt.Color, tooltip: list[alt.Tooltip], title: str
) -> Layers:
    """Returns a heat map: cells coloured by ``value``, each with its ``text``: white in a
    ``dark`` cell."""
    base = alt.Chart().encode(x=x, y=y)
    cells = base.mark_rect(stroke=colour("paper")).encode(color=shade, tooltip=tooltip)
    ink = alt.condition("datum.dark", alt.value("#ffffff"), alt.value("#1a1a1a"))
    texts = base.mark_text(lineBreak="\n")
    return panel(records, cells, texts.encode(text="text:N", color=ink), title=title)


def tokens(count: float) -> str:
    """Writes ``8192`` as ``8k``; a length that is not a multiple of 1024 in full."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count / size:.0f}{unit}"
    return f"{count:,.0f}"


def log_ticks(least: float, most: float) -> list[float]:
    """Returns ticks of a logarithmic axis around the values: few, and as round as they can be."""
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    near = most / least < 8
    steps = (1, 1.5, 2, 3, 4, 5, 6, 8) if near else (1, 2, 5) if high - low < 4 else (1,)
    ticks = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    return [tick for tick in ticks if least * 0.8 <= tick <= most * 1.25]
