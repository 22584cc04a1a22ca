"""The metrics of a sweep on their way to Ray, which is a stand-in."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from ray.util import metrics as of_ray

from ringray.instruments.progress import Progress
from ringray.lab.driver import exporter
from ringray.lab.driver.exporter import Exporter
from ringray.lab.driver.resume import Resume
from ringray.lab.driver.run import Sweep
from ringray.lab.driver.trials import TrialRunner
from ringray.lab.plan.plan import Plan, build
from ringray.lab.specs.model import parse
from ringray.lab.store.store import Store
from ringray.lab.trial.exported import EXPORTED, SWEEP_LABELS
from ringray.lab.trial.outcome import STATUSES, Outcome
from tests.support.place import tiny

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

UNITS = ("_seconds", "_bytes", "_total", "_ratio", "_per_second")


def planned() -> Plan:
    return build(parse(tiny("a", replicas=4)))


def resume(pruned: Any = None, done: Any = None) -> Any:
    return SimpleNamespace(pruned=pruned or {}, done=done or {})


def seen(under_test: Exporter) -> dict[tuple[str, str], float]:
    return {(one.name, label): value for one, label, value in under_test.samples()}


class Instruments:
    """Ray's gauges and counters, and what they are given."""

    def __init__(self) -> None:
        self.given: list[tuple[str, str, float, dict[str, str]]] = []

    def kind(self, verb: str) -> Callable[..., Any]:
        def make(name: str, help: str, labels: tuple[str, ...]) -> Any:
            def take(value: float, tags: dict[str, str]) -> None:
                assert set(tags) == set(labels)
                self.given.append((verb, name, value, dict(tags)))

            return SimpleNamespace(**{verb: take})

        return make

    def of(self, name: str) -> list[float]:
        return [value for _, known, value, _ in self.given if known == name]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Instruments:
    made = Instruments()
    monkeypatch.setattr(of_ray, "Gauge", made.kind("set"))
    monkeypatch.setattr(of_ray, "Counter", made.kind("inc"))
    monkeypatch.setattr(exporter, "PUSH_S", 0.01)
    return made


def test_lines_of_the_table_fit_ray_and_prometheus() -> None:
    assert len({one.name for one in EXPORTED}) == len(EXPORTED)
    for one in EXPORTED:
        assert one.name.startswith("ringray_")
        assert one.help.isascii()  # Ray raises for any other
        assert (one.type == "counter") == one.name.endswith("_total")
        assert one.name.endswith(UNITS) or one.unit == "trials"
        assert len(one.labels) <= len(SWEEP_LABELS) + 1
        assert one.over in {"", *(other.name for other in EXPORTED)}


def test_trials_count_once_and_once_only() -> None:
    plan = planned()
    keys = [trial.key for trial in plan.trials]
    under_test = Exporter(plan)
    earlier = {keys[1]: SimpleNamespace(status="oom")}
    with under_test.running(resume({keys[0]: "why"}, earlier), print):
        under_test.trial_ended(plan.trials[2], Outcome("failed"))
        under_test.trial_ended(plan.trials[2], Outcome("ok"))  # visited again
        found = seen(under_test)
    counts = {status: found["ringray_trials", status] for status in STATUSES}
    assert counts == {"ok": 1, "oom": 1, "pruned": 1, "timeout": 0, "failed": 0}
    assert found["ringray_pending_trials", ""] == 1


def test_numbers_are_those_of_one_trial_in_base_units() -> None:
    under_test, trial = Exporter(planned()), planned().trials[0]
    whole = {"median_ms": 20.0, "tflops": 3.0, "sent_bytes": 7.0, "ratio": 0.9}
    under_test.trial_ended(trial, Outcome("ok", metrics=whole))
    under_test.trial_ended(trial, Outcome("oom", metrics={"median_ms": 1.0}))
    found = seen(under_test)
    assert found["ringray_pass_seconds", ""] == pytest.approx(0.02)
    assert found["ringray_flops_per_second", ""] == pytest.approx(3e12)
    under_test.trial_ended(trial, Outcome("ok", metrics={"median_ms": math.nan, "tflops": 1.0}))
    numbers = {name for name, _ in seen(under_test)} & {one.name for one in EXPORTED if one.metric}
    assert numbers == {"ringray_flops_per_second"}


def test_what_the_driver_records_is_seen(tmp_path: Path) -> None:
    plan = planned()
    silent = SimpleNamespace(note=print, trial_ended=lambda *given: None)
    with Store(tmp_path / "store.db") as store:
        sweep = Sweep(plan, store, cast("Any", silent))
        sweep.begin(Resume.of(plan, store, sweep.info.environment), None)
        sweep.record(plan.trials[0], Outcome("timeout"))
    assert seen(sweep.exporter)["ringray_trials", "timeout"] == 1
    assert seen(sweep.exporter)["ringray_pending_trials", ""] == len(plan.trials) - 1


def test_gauges_are_set_again_and_counters_grow_once(ray: Instruments) -> None:
    under_test, notes = Exporter(planned()), []
    with under_test.running(resume(), notes.append):
        under_test.ring_started("first")
        under_test.ring_started("idle")
        while len(ray.of("ringray_pending_trials")) < 5:
            time.sleep(0.01)
        under_test.ring_started("idle")
    starts = {
        cause: sum(value for verb, _, value, tags in ray.given
                   if (verb, tags.get("cause")) == ("inc", cause))
        for cause in ("first", "idle")
    }  # fmt: skip
    assert starts == {"first": 1, "idle": 2}  # the last push comes at the end
    assert all(tags["sweep"] == "a" and tags["kind"] == "latency" for *_, tags in ray.given)
    told = len(ray.given)
    time.sleep(0.1)
    assert (len(ray.given), notes) == (told, [])


def test_a_ray_that_refuses_is_noted(ray: Instruments, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Any:
        raise ValueError("no such thing")

    monkeypatch.setattr(of_ray, "Gauge", refuse)
    under_test, notes = Exporter(planned()), []
    with under_test.running(resume(), notes.append):
        pass
    assert notes == ["no more metrics for Prometheus: no such thing"]


def test_a_ray_that_hangs_delays_nothing(ray: Instruments, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()

    def hang(*given: Any) -> None:
        never.wait()
        raise ValueError("at last")

    monkeypatch.setattr(of_ray, "Gauge", lambda *given: SimpleNamespace(set=hang))
    monkeypatch.setattr(exporter, "END_S", 0.2)
    plan = planned()
    under_test = Exporter(plan)
    with under_test.running(resume(), print):
        time.sleep(0.1)
        under_test.ring_started("first")
        under_test.trial_ended(plan.trials[0], Outcome("ok", metrics={"tflops": 1.0}))
        seen(under_test)
    never.set()  # who waits for Ray would not come here


def test_a_running_training_has_a_speed(
    monkeypatch: pytest.MonkeyPatch, ringray_home: object
) -> None:
    text = "version: 1\nname: t\nkind: train\nring: {size: 2, device: cpu}\n"
    plan = build(parse(text + "problem: {seq_len: 64, batch: 2}\ntraining: {model: llama-tiny}\n"))
    (trial,) = plan.runnable
    assert trial.predicted is not None
    exporter = Exporter(plan)
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    watch = TrialRunner._watch(SimpleNamespace(_plan=plan, _exporter=exporter), trial, 1e9)  # type: ignore[arg-type]
    watch(Progress(told=(3, {"loss": 1.0})))
    assert ("ringray_pass_seconds", "") not in seen(exporter)
    for at, step in ((104.0, 5), (107.0, 5)):  # told twice
        clock[0] = at
        watch(Progress(told=(step, {"loss": 1.0})))
    found = seen(exporter)
    assert found["ringray_pass_seconds", ""] == pytest.approx(2.0)
    assert found["ringray_tokens_per_second", ""] == pytest.approx(2 * 64 / 2.0)
    assert found["ringray_mfu_ratio", ""] == pytest.approx(trial.predicted.flops / 2.0 / 1e9)
