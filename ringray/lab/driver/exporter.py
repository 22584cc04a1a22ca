"""The metrics of a running sweep in Ray's own, which Prometheus scrapes.

The driver only notes numbers here; a thread hands them to Ray, so that nothing waits for it. Ray
forgets a gauge that is not set again within two of its reports. So the thread sets all gauges every
second, and they end with the sweep; counters stay until the agent of the driver's node ends.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ringray.base.errors import reason_of
from ringray.lab.driver.resume import Resume
from ringray.lab.plan.plan import Plan
from ringray.lab.plan.trial import Trial
from ringray.lab.trial.exported import EXPORTED, PENDING, RING_STARTS, TRIALS, ExportedMetric
from ringray.lab.trial.outcome import STATUSES, Outcome

PUSH_S = 1.0  # seconds between two pushes; Ray reports as often at most
END_S = 2.0  # seconds for the last one

Sample = tuple[ExportedMetric, str, float]  # the second is the value of its label


class Exporter:
    """The numbers of a sweep that Prometheus sees; pushed while ``running``."""

    def __init__(self, plan: Plan) -> None:
        self._sweep = {"sweep": plan.spec.name, "kind": plan.spec.kind}
        self._planned = len(plan.trials)
        self._lock = threading.Lock()
        self._ended: dict[str, str] = {}  # status by key
        self._numbers: dict[str, float] = {}  # of the last trial that was measured
        self._starts = Counter[str]()  # of rings, by cause

    def trial_ended(self, trial: Trial, outcome: Outcome) -> None:
        """Notes the end of a trial."""
        with self._lock:
            self._ended[trial.key] = outcome.status
        if outcome.status == "ok":
            self.measured(outcome.metrics)

    def measured(self, metrics: Mapping[str, float]) -> None:
        """Notes the numbers of a trial, the last until others come."""
        with self._lock:
            self._numbers = dict(metrics)

    def ring_started(self, cause: str) -> None:
        """Notes the start of a ring."""
        with self._lock:
            self._starts[cause] += 1

    @contextmanager
    def running(self, resume: Resume, note: Callable[[str], None]) -> Iterator[None]:
        """Pushes within the block; ``note`` is told if that fails, and the block goes on."""
        self._ended = dict.fromkeys(resume.pruned, "pruned")
        self._ended |= {key: row.status for key, row in resume.done.items() if row.status}
        over = threading.Event()
        thread = threading.Thread(target=self._push, args=(over, note), name="metrics", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(END_S)

    def samples(self) -> list[Sample]:
        """Returns all numbers as they are now."""
        with self._lock:
            counts, numbers = Counter(self._ended.values()), self._numbers
            samples: list[Sample] = [(TRIALS, status, counts[status]) for status in STATUSES]
            samples.append((PENDING, "", self._planned - len(self._ended)))
            samples += [(RING_STARTS, cause, count) for cause, count in self._starts.items()]
        values = ((x, numbers.get(x.metric, math.nan) * x.scale) for x in EXPORTED)
        return samples + [(x, "", value) for x, value in values if math.isfinite(value)]

    def _push(self, over: threading.Event, note: Callable[[str], None]) -> None:
        """Pushes until ``over`` is set, and then once more."""
        try:
            from ray.util import metrics as of_ray

            types: dict[str, Any] = {"gauge": of_ray.Gauge, "counter": of_ray.Counter}
            made = {x: types[x.type](x.name, x.help, x.labels) for x in EXPORTED}
            pushed: dict[tuple[ExportedMetric, str], float] = {}
            last = False
            while not last:
                last = over.wait(PUSH_S)
                for metric, label, value in self.samples():
                    tags = {**self._sweep, metric.label: label} if metric.label else self._sweep
                    increase = value - pushed.get((metric, label), 0.0)
                    pushed[metric, label] = value
                    if metric.type == "gauge":
                        made[metric].set(value, tags)
                    elif increase:
                        made[metric].inc(increase, tags)
        except Exception as error:  # of many types; none of them is worth a trial
            note(f"no more metrics for Prometheus: {reason_of(error)}")
