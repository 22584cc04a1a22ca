"""The metrics of a sweep on their way to Ray, which is a stand-in."""

from __future__ import annotations

import math
import threading
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from ray.util import metrics as of_ray

from ringray.lab.driver import exporter
from ringray.lab.driver.events import (
    StepEnded,
    SweepEnded,
    SweepStarted,
    TrialEnded,
    TrialStarted,
)
from ringray.lab.driver.exporter import Exporter
from ringray.lab.plan.plan import Plan, build
from ringray.lab.specs.model import parse
from ringray.lab.trial.exported import EXPORTED
from ringray.lab.trial.outcome import STATUSES, Outcome
from tests.support.place import tiny

UNITS = ("_seconds", "_bytes", "_ratio", "_per_second")


@pytest.fixture
def pushes(monkeypatch: pytest.MonkeyPatch) -> Queue[tuple[str, float, dict[str, str]]]:
    """The calls of Ray's gauges: name, value, tags."""
    calls: Queue[tuple[str, float, dict[str, str]]] = Queue()

    def make(name: str, help: str, labels: tuple[str, ...]) -> Any:
        def take(value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(labels)
            calls.put((name, value, dict(tags)))

        return SimpleNamespace(set=take)

    monkeypatch.setattr(of_ray, "Gauge", make)
    monkeypatch.setattr(exporter, "PUSH_S", 0.01)
    return calls


def started(done: Any = None) -> tuple[Exporter, Plan]:
    made, plan = Exporter(), build(parse(tiny("a", replicas=4)))
    made.take(SweepStarted(plan, SimpleNamespace(), done or {}))  # type: ignore[arg-type]
    return made, plan


def seen(under_test: Exporter) -> dict[tuple[str, str], float]:
    return {(metric.name, label): value for metric, label, value in under_test.samples()}


def test_trials_count_once_and_numbers_are_those_of_one_trial() -> None:
    under_test, plan = started()
    first, second, third, _ = plan.trials
    whole = {"median_ms": 20.0, "tflops": 3.0, "sent_bytes": 7.0, "ratio": 0.9}
    for trial, outcome in [
        (first, Outcome("pruned", "why")),
        (second, Outcome("failed")),
        (second, Outcome("ok", metrics=whole)),  # visited again
        (third, Outcome("oom", metrics={"median_ms": 1.0})),
    ]:
        under_test.take(TrialEnded(trial, outcome))
    numbers = seen(under_test)
    counts = {status: numbers["ringray_trials", status] for status in STATUSES}
    assert counts == {"ok": 1, "oom": 1, "pruned": 1, "timeout": 0, "failed": 0}
    assert numbers["ringray_pending_trials", ""] == 1
    assert numbers["ringray_pass_seconds", ""] == pytest.approx(0.02)
    assert numbers["ringray_flops_per_second", ""] == pytest.approx(3e12)
    under_test.take(StepEnded(third, 2, {}, {"median_ms": math.nan, "tflops": 1.0}))
    names = {name for name, _ in seen(under_test)} & {x.name for x in EXPORTED if x.metric}
    assert names == {"ringray_flops_per_second"}
    earlier, plan = started({plan.trials[0].key: SimpleNamespace(status="oom")})
    assert seen(earlier)["ringray_trials", "oom"] == 1


def test_gauges_are_set_again_and_a_last_time_at_the_end(pushes: Queue[Any]) -> None:
    under_test, plan = started()
    under_test.take(TrialStarted(plan.trials[0], 1))
    pending = 0
    while pending < 3:
        name, value, tags = pushes.get(timeout=60)
        assert (tags["sweep"], tags["kind"]) == ("a", "latency")
        pending += (name, value) == ("ringray_pending_trials", 4)
    under_test.take(TrialEnded(plan.trials[0], Outcome("ok")))
    under_test.take(SweepEnded(SimpleNamespace()))  # type: ignore[arg-type]
    last = [value for name, value, _ in pushes.queue if name == "ringray_pending_trials"][-1]
    assert last == 3
    assert not any(thread.name == "metrics" for thread in threading.enumerate())


def test_a_ray_that_refuses_or_hangs_ends_nothing(
    pushes: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, never = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        begun.set()
        never.wait()
        raise ValueError("no such thing")

    monkeypatch.setattr(of_ray, "Gauge", lambda *_: SimpleNamespace(set=hang))
    monkeypatch.setattr(exporter, "END_S", 0.01)
    under_test, plan = started()
    under_test.take(TrialStarted(plan.trials[0], 1))
    begun.wait()
    under_test.take(TrialEnded(plan.trials[0], Outcome("ok", metrics={"tflops": 1.0})))
    under_test.close()
    never.set()
    under_test._thread.join()
    with pytest.raises(RuntimeError, match="no more metrics for Prometheus: no such thing"):
        under_test.take(TrialStarted(plan.trials[1], 1))
