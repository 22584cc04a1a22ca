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
    """Speed-ups of one panel by strategy and length: the largest at the greatest length first."""

    names: list[str]
    lengths: list[int]
    values: dict[tuple[str, int], float]


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
    tallest = max(len(one.names) * len(one.lengths) for one in drawn)
    lengths = sorted({length for one in drawn for length in one.lengths})
    made = [_panel(panel.title, one, lengths) for panel, one in zip(panels, drawn, strict=True)]
    names = [name for one in drawn for name in one.names]
    title, height = f"Speed-up over {baseline}", max(130, 19 * tallest)
    return style.grid(made, title, left_out, height, names)


def _panel(title: str, found: Bars, lengths: Sequence[int]) -> style.Layers:
    records: style.Records = [
        {"strategy": name, "length": f"{style.tokens(length)} tokens", "value": value,
         "text": f"{value:.2f}"}
        for (name, length), value in found.values.items()
        if name in found.names and length in found.lengths
    ]  # fmt: skip
    most = max(one["value"] for one in records)
    texts = [f"{style.tokens(length)} tokens" for length in lengths]
    shades = [_SHADES[1]] if len(lengths) == 1 else [_SHADES[at * 4 // len(lengths)] for at in
                                                    range(len(lengths))]  # fmt: skip
    legend = alt.Legend(title=None, columns=style.columns(texts)) if len(lengths) > 1 else None
    base = alt.Chart().encode(
        x=alt.X("value:Q", title="times as fast (line: equal)",
                scale=alt.Scale(domain=[0, max(1.1, most * 1.15)], nice=False)),
        y=alt.Y("strategy:N", title=None, sort=found.names, scale=style.BANDS,
                axis=alt.Axis(grid=False)),
        yOffset=alt.YOffset("length:N", sort=texts),
    )  # fmt: skip
    return style.panel(
        records,
        base.mark_bar().encode(
            color=alt.Color("length:N", scale=alt.Scale(domain=texts, range=shades), legend=legend),
            tooltip=style.tip(strategy="strategy", length="length", text="times as fast"),
        ),
        base.mark_text(align="left", dx=4).encode(text="text:N"),
        alt.Chart().mark_rule(color=style.INK).encode(x=alt.datum(1)),
        title=title,
    )
