"""Exported metrics: the numbers of a running sweep that Prometheus sees, one table for all that
push, document or draw them.

To export a metric of trials, give it an ``exported`` name and a ``meaning`` in ``metrics``. A unit
stands in the name, as usual in Prometheus.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringray.lab.trial.metrics import METRICS

SWEEP_LABELS = ("sweep", "kind")  # of every exported metric
PREFIX = "ringray_"
RAY_PREFIX = "ray_"  # which Ray puts before the name of every metric

# What a number of ours is multiplied with, and the unit that it then has.
_BASE_UNITS = {
    "ms": (1e-3, "seconds"),
    "TFLOP/s": (1e12, "FLOP/s"),
    "tokens/s": (1.0, "tokens/s"),
    "bytes": (1.0, "bytes"),
    "share": (1.0, "ratio"),
}


@dataclass(frozen=True)
class ExportedMetric:
    """A gauge. ``label``: the one that it has beside those of the sweep; ``metric``: that of the
    last trial which it shows, times ``scale``; ``over``: the exported metric by which a chart
    divides it."""

    name: str  # for Ray
    unit: str
    help: str  # in ASCII: Ray takes nothing else
    label: str = ""
    metric: str = ""
    scale: float = 1.0
    over: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its labels."""
        return (*SWEEP_LABELS, *filter(None, [self.label]))

    @property
    def series(self) -> str:
        """Its name as Prometheus sees it."""
        return RAY_PREFIX + self.name


TRIALS = ExportedMetric(f"{PREFIX}trials", "trials", "Trials that have ended, by status.", "status")
PENDING = ExportedMetric(f"{PREFIX}pending_trials", "trials", "Trials that are left to do.")
EXPORTED = (
    TRIALS,
    PENDING,
    *(
        ExportedMetric(
            PREFIX + metric.exported,
            _BASE_UNITS[metric.unit][1],
            metric.meaning,
            metric=metric.name,
            scale=_BASE_UNITS[metric.unit][0],
            over=f"{PREFIX}pass_seconds" if metric.name == "wait_ms" else "",
        )
        for metric in METRICS.values()
        if metric.exported
    ),
)
