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
    found = [point for point in points if _bars(point, HOP)]
    if not found:
        return None
    found.sort(key=lambda point: point.metrics.get("median_ms", 0.0))
    shown = found[: data.MAX_PANELS // 2]
    varying = words.varying(point.config for point in found)
    panels, tallest = [], 0
    names: list[str] = []
    for point in shown:
        for prefix, what in ((HOP, "slowest rank of each hop"), (RANK, "sums of each rank")):
            if bars := _bars(point, prefix):
                title = ", ".join(filter(None, (words.label(point.config, varying), what)))
                panels.append(_panel(bars, prefix.rstrip(": "), title))
                names += bars
                tallest = max(tallest, len(bars))
    rest = f", {len(shown)} of {len(found)} points by time" if len(found) > len(shown) else ""
    height = max(90, 32 * tallest)
    return style.grid(panels, f"Time by hop and by rank{rest}", height=height, names=names)


def _bars(point: TrialRow, prefix: str) -> dict[str, list[float]]:
    """Returns times and bytes of a point's first hops or ranks, as ``HOP_VALUES`` names them."""
    found = {
        name.removeprefix(prefix): values
        for name, values in point.samples.items()
        if name.startswith(prefix) and len(values) > len(_PARTS)
    }
    return dict(list(found.items())[:_MOST])


def _panel(found: Mapping[str, Sequence[float]], of: str, title: str) -> style.Layers:
    records = [
        {"bar": bar, "part": part, "ms": ms, "text": units.memory(values[3])}
        for bar, values in found.items()
        for part, ms in zip(_PARTS, values[:3], strict=True)
    ]
    legend = alt.Legend(title=None, columns=len(_PARTS))
    colours = alt.Scale(domain=_PARTS, range=_COLOURS)
    bars = alt.Chart().mark_bar().encode(
        x=alt.X("ms:Q", title="time (ms)", scale=alt.Scale(zero=True)),
        y=alt.Y("bar:N", title=of, sort=[*found], scale=style.BANDS,
                axis=alt.Axis(grid=False)),
        yOffset=alt.YOffset("part:N", sort=_PARTS),
        color=alt.Color("part:N", scale=colours, legend=legend),
        tooltip=[alt.Tooltip("part:N"), *style.tip(bar=of, ms="ms", text="sent")],
    )  # fmt: skip
    return style.panel(records, bars, title=title)
