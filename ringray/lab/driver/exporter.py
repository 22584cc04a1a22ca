"""The metrics of a running sweep in Ray's own, which Prometheus scrapes.

The listener only notes numbers; a thread hands them to Ray, so that nothing waits for it. Ray
forgets a gauge that is not set again within two of its reports. So the thread sets all gauges every
second, and they end with the sweep.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ringray.base.errors import reason_of
from ringray.lab.driver.events import (
    Event,
    StepEnded,
    SweepEnded,
    SweepStarted,
    TrialEnded,
    TrialStarted,
)
from ringray.lab.trial.exported import EXPORTED, PENDING, TRIALS, ExportedMetric
from ringray.lab.trial.outcome import STATUSES

PUSH_S = 1.0  # seconds between two pushes; Ray reports as often at most
END_S = 2.0  # seconds for the last one

Sample = tuple[ExportedMetric, str, float]  # the second is the value of its label


class Exporter:
    """The numbers of a sweep that Prometheus sees; pushed from its first trial on."""

    def __init__(self) -> None:
        self._sweep: dict[str, str] = {}
        self._planned = 0
        self._lock = threading.Lock()
        self._ended: dict[str, str] = {}  # status by key
        self._numbers: Mapping[str, float] = {}  # of the last trial or step that was measured
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    def take(self, event: Event) -> None:
        with self._lock:
            match event:
                case SweepStarted(plan=plan, done=done):
                    self._sweep = {"sweep": plan.spec.name, "kind": plan.spec.kind}
                    self._planned = len(plan.trials)
                    self._ended = {key: row.status for key, row in done.items() if row.status}
                case TrialEnded(trial, outcome):
                    self._ended[trial.key] = outcome.status or ""
                    if outcome.status == "ok":
                        self._numbers = outcome.metrics
                case StepEnded(metrics=metrics) if metrics:
                    self._numbers = metrics
        if isinstance(event, TrialStarted) and self._thread is None:
            self._thread = threading.Thread(target=self._push, name="metrics", daemon=True)
            self._thread.start()
        if isinstance(event, SweepEnded):
            self.close()
        if self._failure:
            raise RuntimeError(self._failure)

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(END_S)

    def samples(self) -> list[Sample]:
        """Returns all numbers as they are now."""
        with self._lock:
            counts, numbers = Counter(self._ended.values()), self._numbers
            samples: list[Sample] = [(TRIALS, status, counts[status]) for status in STATUSES]
            samples.append((PENDING, "", self._planned - len(self._ended)))
        values = ((x, numbers.get(x.metric, math.nan) * x.scale) for x in EXPORTED)
        return samples + [(x, "", value) for x, value in values if math.isfinite(value)]

    def _push(self) -> None:
        """Pushes until the sweep is over, and then once more."""
        try:
            from ray.util.metrics import Gauge

            gauges: dict[ExportedMetric, Any] = {
                metric: Gauge(metric.name, metric.help, metric.labels) for metric in EXPORTED
            }
            last = False
            while not last:
                last = self._over.wait(PUSH_S)
                for metric, label, value in self.samples():
                    tags = {**self._sweep, metric.label: label} if metric.label else self._sweep
                    gauges[metric].set(value, tags)
        except Exception as error:  # of many types; the next event reports it
            self._failure = f"no more metrics for Prometheus: {reason_of(error)}"
