"""Speed-up of each strategy over the baseline: bars by sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import altair as alt

from ringray.lab.report import words
from ringray.lab.report.figures import data, style
from ringray.lab.report.figures.data import Panel
from ringray.lab.report.palette import colour
from ringray.lab.trial.outcome import TrialRow

MAX_STRATEGIES = 12
MAX_LENGTHS = 4
_SHADES = tuple(map(colour, ("s1", "s2", "s3", "s4")))


class Bars(NamedTuple):
    """Speed-ups of one panel."""

    names: list[str]  # of strategies, the largest speed-up at the greatest length first
    lengths: list[int]
    values: dict[tuple[str, int], float]  # by strategy and length


def bars(panel: Panel, fields: Sequence[str]) -> Bars:
    """Returns at most ``MAX_STRATEGIES`` strategies and the ``MAX_LENGTHS`` greatest lengths."""
    values: dict[tuple[str, int], float] = {}
    for point in panel.points:
        values[data.strategy(point, fields), point.config["seq_len"]] = 1 / point.metrics["ratio"]
    lengths = sorted({length for _, length in values})[-MAX_LENGTHS:]
    names = list(dict.fromkeys(name for name, _ in values))
    names.sort(key=lambda name: [-values.get((name, length), 0.0) for length in lengths[::-1]])
    return Bars(names[:MAX_STRATEGIES], lengths, values)


def draw(points: Sequence[TrialRow]) -> style.Chart | None:
    """Draws 1 / ratio; None without a baseline or with a single strategy."""
    timed = data.having(points, "ratio", "median_ms")
    shown = [point for point in timed if point.metrics["ratio"] > 0]
    fields = data.strategies(shown)
    panels, left_out = data.panels(shown, beside=("seq_len",))
    if not fields or not panels:
        return None
    drawn = [bars(panel, fields) for panel in panels]
    baseline = words.baseline(shown[0].config) or "the baseline"
    tallest = max(len(panel_bars.names) * len(panel_bars.lengths) for panel_bars in drawn)
    lengths = sorted({length for panel_bars in drawn for length in panel_bars.lengths})
    made = [
        _panel(panel.title, panel_bars, lengths)
        for panel, panel_bars in zip(panels, drawn, strict=True)
    ]
    names = [name for panel_bars in drawn for name in panel_bars.names]
    title, height = f"Speed-up over {baseline}", max(130, 19 * tallest)
    return style.grid(made, title, left_out, height, names)


def _panel(title: str, bars: Bars, lengths: Sequence[int]) -> style.Layers:
    records: style.Records = []
    for (name, length), value in bars.values.items():
        if name in bars.names and length in bars.lengths:
            place = {"strategy": name, "length": f"{style.tokens(length)} tokens"}
            records.append({**place, "value": value, "text": f"{value:.2f}"})
    most = max(record["value"] for record in records)
    texts = [f"{style.tokens(length)} tokens" for length in lengths]
    # A single length has the colour that stands out from the paper and from the line.
    count = len(lengths)
    shades = [_SHADES[4 * place // count if count > 1 else 1] for place in range(count)]
    legend = alt.Legend(title=None, columns=style.columns(texts)) if len(lengths) > 1 else None
    scale = alt.Scale(domain=[0, max(1.1, most * 1.15)], nice=False)
    x = alt.X("value:Q", title="times as fast (line: equal)", scale=scale)
    bands, axis = alt.Scale(paddingInner=0.25, paddingOuter=0.1), alt.Axis(grid=False)
    y = alt.Y("strategy:N", title=None, sort=bars.names, scale=bands, axis=axis)
    beside = alt.YOffset("length:N", sort=texts)  # the bars of one name stand together
    base = alt.Chart().encode(x=x, y=y, yOffset=beside)
    colours = alt.Scale(domain=texts, range=shades)
    drawn = base.mark_bar().encode(
        color=alt.Color("length:N", scale=colours, legend=legend),
        tooltip=style.tip(strategy="strategy", length="length", text="times as fast"),
    )
    numbers = base.mark_text(align="left", dx=4).encode(text="text:N")
    equal = alt.Chart().mark_rule(color=style.INK).encode(x=alt.datum(1))
    return style.panel(records, drawn, numbers, equal, title=title)
