"""Peak memory of the largest rank against the sequence length, a line per strategy."""

from __future__ import annotations

from collections.abc import Sequence

from ringray.base.units import GIB, MIB
from ringray.lab.report.figures import lines, style
from ringray.lab.trial.outcome import TrialRow


def draw(points: Sequence[TrialRow]) -> style.Chart | None:
    """Draws MiB or GiB per rank on logarithmic axes; None where no length varies."""
    positive = [point for point in points if point.metrics.get("peak_memory_bytes", 0) > 0]
    title = "Peak memory by length"
    return lines.chart(positive, "peak_memory_bytes", title, _unit, logarithmic=True)


def _unit(most: float) -> tuple[float, str]:
    size, name = (GIB, "GiB") if most >= 4 * GIB else (MIB, "MiB")
    return size, f"peak memory per rank ({name})"
