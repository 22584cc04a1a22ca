"""Metrics of sweeps on a real cluster, as a real Prometheus and the dashboard have them."""

from __future__ import annotations

import re
import signal

import pytest

from ringray.lab.trial.exported import EXPORTED, PENDING, TRIALS
from ringray.lab.trial.outcome import STATUSES
from tests.chaos.struck import NODE, REPLICAS, ended, faults
from tests.support import place as drive
from tests.support import prometheus, ray_heads
from tests.support.place import Place, tiny
from tests.support.prometheus import Prometheus, expressions

pytestmark = [pytest.mark.slow, prometheus.needed]

# Ray reports every 10 s; a gauge ends after two reports.
OFTEN = {"RAY_metrics_report_interval_ms": "2000"}
TRAIN = """
version: 1
name: trained
kind: train
ring: {size: 2, device: cpu, threads: 1}
problem: {seq_len: 64, batch: 2, dtype: float32}
training: {model: llama-tiny, steps: 100000, mlp_rows: 64}
"""


def values(prometheus: Prometheus, expression: str) -> list[float]:
    """All values that an expression ever had."""
    return [float(at[1]) for series in prometheus.history(expression) for at in series["values"]]


def test_prometheus_sees_a_sweep_and_the_dashboard_shows_it(place: Place) -> None:
    place.variables |= OFTEN
    with ray_heads.cluster(place, cpus=4, **NODE) as head:
        discovery = place.ray / "prom_metrics_service_discovery.json"
        drive.wait_until("Ray says where its metrics are", discovery.exists)
        with prometheus.running(place.home, discovery) as seen:
            _trials_with_a_dead_rank(place, head.address, seen)
            _a_training(place, head.address, seen)
            for title, expression in expressions().items():
                found = seen.history(re.sub(r"\$\w+", ".*", expression))
                assert found, f"the chart {title!r} shows nothing: {expression}"
                assert all({"sweep", "kind"} <= set(series["metric"]) for series in found)

            def over() -> bool:
                gauges = [metric.series for metric in EXPORTED]
                return not any(map(seen.now, gauges))

            drive.wait_until("the gauges end", over)


def _trials_with_a_dead_rank(place: Place, address: str, seen: Prometheus) -> None:
    """Its last report is complete."""
    text = tiny("measured", replicas=REPLICAS, repeats=60)
    driver = place.start("run", place.spec(text), "--no-tracking", "--address", address)
    drive.wait_until("2 trials", lambda: ended(place, "measured") >= 2)
    place.ranks()[0].kill()
    done = place.end(driver)
    assert done.code == 0, done.out + done.err
    rows = place.trials("measured")

    def complete() -> bool:
        found = seen.history(f'{TRIALS.series}{{sweep="measured"}}')
        counts = {one["metric"]["status"]: float(one["values"][-1][1]) for one in found}
        return counts == dict.fromkeys(STATUSES, 0.0) | {"ok": REPLICAS}

    drive.wait_until("the last report is seen", complete)
    assert values(seen, PENDING.series)[-1] == 0
    assert len([fault for row in rows for fault in faults(row)]) == 1
    for one in EXPORTED:
        if one.metric:
            numbers = [row.metrics[one.metric] for row in rows if one.metric in row.metrics]
            found = values(seen, f'{one.series}{{sweep="measured"}}')
            assert bool(found) == bool(numbers), one.name
            for value in found:
                assert any(value == pytest.approx(number * one.scale) for number in numbers)


def _a_training(place: Place, address: str, seen: Prometheus) -> None:
    """Its speed is seen while it runs, for as long as that takes."""
    driver = place.start("run", place.spec(TRAIN), "--no-tracking", "--address", address)
    numbers = ("pass_seconds", "tokens_per_second", "flops_per_second", "mfu_ratio")

    def speed() -> list[float] | None:
        assert driver.poll() is None, driver.communicate()
        found = [seen.now(f'ray_ringray_{one}{{sweep="trained"}}') for one in numbers]
        return [float(one["value"][1]) for (one,) in found] if all(found) else None

    wanted = 2 * 64
    step_s, tokens_per_s, flops_per_s, mfu = drive.wait_until("its speed is seen", speed)
    print(
        f"{step_s:.3g} s a step, {tokens_per_s:.3g} tokens/s, {flops_per_s:.3g} FLOP/s, {mfu:.3g}"
    )
    assert 0 < mfu < 1
    assert 0.1 * wanted < step_s * tokens_per_s < 10 * wanted  # from two looks at most
    assert {one["value"][1] for one in seen.now(f'{PENDING.series}{{sweep="trained"}}')} == {"1"}
    driver.send_signal(signal.SIGINT)
    done = place.end(driver)
    assert done.code == 130, done.out + done.err
