"""Balance of hops and ranks: computation, transfer and wait of each, as kind overlap measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt

from ringray.base import units
from ringray.lab.report import words
from ringray.lab.report.figures import data, style
from ringray.lab.report.palette import LINES
from ringray.lab.trial.measurement import HOP, RANK
from ringray.lab.trial.outcome import TrialRow

_PARTS = ("compute", "transfer", "wait")
_COLOURS = (LINES[0], LINES[4], LINES[1])
_MOST = 32  # of a panel


def draw(points: Sequence[TrialRow]) -> style.Chart | None:
    """Draws panels by hop and by rank of the points of the least times; None without any."""
    traced = [point for point in points if _bars(point, HOP)]
    if not traced:
        return None
    traced.sort(key=lambda point: point.metrics.get("median_ms", 0.0))
    shown = traced[: data.MAX_PANELS // 2]
    varying = words.varying(point.config for point in traced)
    panels, tallest = [], 0
    names: list[str] = []
    for point in shown:
        for prefix, what in ((HOP, "slowest rank of each hop"), (RANK, "sums of each rank")):
            if bars := _bars(point, prefix):
                title = ", ".join(filter(None, (words.label(point.config, varying), what)))
                panels.append(_panel(bars, prefix.rstrip(": "), title))
                names += bars
                tallest = max(tallest, len(bars))
    rest = f", {len(shown)} of {len(traced)} points by time" if len(traced) > len(shown) else ""
    height = max(90, 32 * tallest)
    return style.grid(panels, f"Time by hop and by rank{rest}", height=height, names=names)


def _bars(point: TrialRow, prefix: str) -> dict[str, list[float]]:
    """Returns times and bytes of a point's first hops or ranks, as ``HOP_VALUES`` names them."""
    values_by_name = {
        name.removeprefix(prefix): values
        for name, values in point.samples.items()
        if name.startswith(prefix) and len(values) > len(_PARTS)
    }
    return dict(list(values_by_name.items())[:_MOST])


def _panel(values_by_bar: Mapping[str, Sequence[float]], of: str, title: str) -> style.Layers:
    records = [
        {"bar": bar, "part": part, "ms": ms, "text": units.memory(values[3])}
        for bar, values in values_by_bar.items()
        for part, ms in zip(_PARTS, values[:3], strict=True)
    ]
    legend = alt.Legend(title=None, columns=len(_PARTS))
    colours = alt.Scale(domain=_PARTS, range=_COLOURS)
    bars = (
        alt.Chart()
        .mark_bar()
        .encode(
            x=alt.X("ms:Q", title="time (ms)", scale=alt.Scale(zero=True)),
            y=style.bands("bar", [*values_by_bar], of),
            yOffset=alt.YOffset("part:N", sort=_PARTS),
            color=alt.Color("part:N", scale=colours, legend=legend),
            tooltip=[alt.Tooltip("part:N"), *style.tip(bar=of, ms="ms", text="sent")],
        )
    )
    return style.panel(records, bars, title=title)
