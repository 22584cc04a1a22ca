"""Balance of the hops: computation, transfer and wait of each, by what kind overlap measured."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from ringray.base import units
from ringray.lab.report import words
from ringray.lab.report.figures import data, style
from ringray.lab.report.palette import LINES
from ringray.lab.trial.measurement import HOP
from ringray.lab.trial.outcome import TrialRow

_PARTS = ("compute", "transfer", "wait")
_COLOURS = (LINES[0], LINES[4], LINES[1])
_HOPS = 32  # of a panel


def draw(points: Sequence[TrialRow]) -> style.Chart | None:
    """Draws a panel for each of the fastest points with hops; None without any."""
    found = [point for point in points if hops(point)]
    if not found:
        return None
    found.sort(key=lambda point: point.metrics.get("median_ms", 0.0))
    shown = found[: data.MAX_PANELS]
    varying = words.varying(point.config for point in found)
    panels = [_panel(point, words.label(point.config, varying)) for point in shown]
    rest = f", the fastest {len(shown)} of {len(found)} points" if len(found) > len(shown) else ""
    tallest = max(min(_HOPS, len(hops(point))) for point in shown)
    title = f"Time by hop, of the slowest rank{rest}"
    names = [name for point in shown for name in hops(point)]
    return style.grid(panels, title, height=max(90, 32 * tallest), names=names)


def hops(point: TrialRow) -> dict[str, list[float]]:
    """Returns the times and bytes of a point's hops, as ``HOP_VALUES`` names them."""
    return {
        name.removeprefix(HOP): values
        for name, values in point.samples.items()
        if name.startswith(HOP) and len(values) > len(_PARTS)
    }


def _panel(point: TrialRow, title: str) -> style.Layers:
    few = list(hops(point).items())[:_HOPS]
    records = [
        {"hop": hop, "part": part, "ms": ms, "text": units.memory(values[3])}
        for hop, values in few
        for part, ms in zip(_PARTS, values[:3], strict=True)
    ]
    legend = alt.Legend(title=None, columns=len(_PARTS))
    colours = alt.Scale(domain=_PARTS, range=_COLOURS)
    bars = alt.Chart().mark_bar().encode(
        x=alt.X("ms:Q", title="time (ms)", scale=alt.Scale(zero=True)),
        y=alt.Y("hop:N", title=None, sort=[hop for hop, _ in few], scale=style.BANDS,
                axis=alt.Axis(grid=False)),
        yOffset=alt.YOffset("part:N", sort=_PARTS),
        color=alt.Color("part:N", scale=colours, legend=legend),
        tooltip=[alt.Tooltip("part:N"), *style.tip(hop="hop", ms="ms", text="sent")],
    )  # fmt: skip
    return style.panel(records, bars, title=title)
