"""Fits to measured trials, against hardware whose rates and links are known."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringray.base import provenance
from ringray.lab.cli import main
from ringray.lab.plan.plan import build
from ringray.lab.predict import cost_model
from ringray.lab.predict.fitting import LEAST, MeasuredTrial, fitted
from ringray.lab.predict.hardware import Fleet, parse_fleet
from ringray.lab.specs.model import parse
from ringray.lab.store.store import Store
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.outcome import Outcome, SweepInfo, TrialInfo
from tests.support.point import point

TABLE = parse_fleet("h100:8x8")
H100S = {"cpu": "any", "cores": 64, "memory_bytes": 1 << 40, "gpus": ["NVIDIA H100 80GB HBM3"] * 8}
# Factors of seconds that the table does not know.
FORWARD, BACKWARD, LINKS = 1.6, 2.5, 1.3


def there(**hardware: Any) -> dict[str, Any]:
    """The environment of a measurement on H100s."""
    return {**provenance.describe(), "hardware": H100S | hardware}


def real() -> Fleet:
    """The H100s of the table with other rates and links."""
    hardware = TABLE.hardware
    slower = {"forward": FORWARD, "backward": BACKWARD}
    curves = tuple(
        one.model_copy(
            update={"rates": {n: x / slower[one.direction] for n, x in one.rates.items()}}
        )
        for one in hardware.attention
    )
    links = {
        name: link.model_copy(
            update={"bandwidth": link.bandwidth / LINKS, "latency": link.latency * LINKS}
        )
        for name, link in (("inner", hardware.inner), ("outer", hardware.outer))
    }
    return replace(TABLE, hardware=hardware.model_copy(update={"attention": curves, **links}))


def config(**given: Any) -> TrialConfig:
    usual = {
        "seq_len": 64 << 10, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16",
        "ring_size": 8, "direction": "forward", "device": "cuda",
    }  # fmt: skip
    return point(**usual | given)


SOME = [
    config(seq_len=length << 10, transport=transport, direction=direction, ring_size=ranks)
    for length in (32, 128)
    for transport in ("ring", "allgather")
    for direction in ("forward", "forward+backward")
    for ranks in (1, 8, 16)
    if ranks > 1 or transport == "ring"
]
OTHERS = [
    config(seq_len=length << 10, partition=partition, ring_size=ranks, direction=direction)
    for length in (64, 256)
    for partition in ("striped", "contiguous")
    for direction in ("forward", "forward+backward")
    for ranks in (4, 32)
]


def seconds(one: TrialConfig, on: Fleet) -> float:
    return cost_model.predict(one, on).time_ms / 1e3


def measured(
    configs: list[TrialConfig] = SOME, noise: Callable[[], float] = lambda: 1.0, **hardware: Any
) -> list[MeasuredTrial]:
    on, environment = real(), there(**hardware)
    return [MeasuredTrial(one, seconds(one, on) * noise(), environment) for one in configs]


def errors(on: Fleet) -> list[float]:
    return [abs(seconds(one, on) / seconds(one, real()) - 1) for one in OTHERS]


def test_trials_of_some_points_correct_the_prediction_of_others() -> None:
    found = fitted(TABLE, measured())
    assert found.hardware.fitted == len(SOME)
    assert statistics.median(errors(TABLE)) > 0.3
    assert max(errors(found)) < 0.05
    assert found.hardware.spread < 0.05 < TABLE.hardware.spread, "what is left is little"
    assert (found.nodes, found.per_node) == (TABLE.nodes, TABLE.per_node)


def test_the_interval_holds_what_the_fit_leaves() -> None:
    draw = random.Random(2)
    found = fitted(TABLE, measured(SOME, lambda: draw.lognormvariate(0, 0.2)))
    assert 0.15 < found.hardware.spread < 0.45
    calibrated = TABLE.hardware.model_copy(update={"measured": "2026-11-23", "spread": 0.6})
    sure = fitted(replace(TABLE, hardware=calibrated), measured())
    assert sure.hardware.spread == 0.6, "measured ones are not narrowed"


def test_beyond_the_trials_the_interval_stays_as_it_was() -> None:
    """Trials of one problem say nothing of other types, head dims and directions."""
    partitions, walks = ("zigzag", "contiguous"), ("ring", "allgather", "bidirectional", "staged")
    some = [config(partition=one, transport=walk) for one in partitions for walk in walks]
    found = fitted(TABLE, measured(some))
    assert found.hardware.spread < 0.05 < TABLE.hardware.spread

    def spread(on: Fleet, **given: Any) -> float:
        cost = cost_model.predict(config(**given), on)
        return cost.high_ms / cost.time_ms - 1

    assert spread(found) == pytest.approx(found.hardware.spread)
    for others in ({"head_dim": 96}, {"dtype": "float16"}, {"direction": "forward+backward"}):
        assert spread(found, **others) == pytest.approx(spread(TABLE, **others)), others


def test_links_that_were_fitted_take_the_place_of_measured_collectives() -> None:
    slow = real()
    slow = replace(slow, hardware=slow.hardware.model_copy(update={"collectives": None}))
    some = [
        config(seq_len=length << 10, transport=transport, head_dim=64, direction=direction)
        for length in (2, 8)
        for transport in ("ring", "ulysses")
        for direction in ("forward", "forward+backward")
    ]
    on_fitted = fitted(
        TABLE, [MeasuredTrial(trial, seconds(trial, slow), there()) for trial in some]
    )
    assert on_fitted.hardware.collectives is None
    exchanged = [trial for trial in some if trial.strategy.transport == "ulysses"]
    far = [abs(seconds(trial, on_fitted) / seconds(trial, slow) - 1) for trial in exchanged]
    assert statistics.median(far) < 0.05


def test_trials_within_a_node_say_nothing_of_the_links_between_nodes() -> None:
    within = [one for one in SOME if one.ring.size <= 8]
    found = fitted(TABLE, measured(within)).hardware
    assert found.outer == TABLE.hardware.outer
    assert found.inner.bandwidth < TABLE.hardware.inner.bandwidth
    # A ring of 8 ran on one node, whatever it is planned for.
    apart = replace(TABLE, nodes=8, per_node=1)
    on = fitted(apart, measured(within))
    assert on.hardware.outer == TABLE.hardware.outer
    assert on.hardware.fitted == len(within)
    rows = {one.rates[max(one.rates)] for one in on.hardware.attention}
    assert rows == {one.rates[max(one.rates)] for one in found.attention}


CASES: dict[str, Callable[[], list[MeasuredTrial]]] = {
    "few": lambda: measured(SOME[: LEAST - 1]),
    "none": list,
    "another GPU": lambda: measured(gpus=["NVIDIA A100-SXM4-80GB"]),
    "no GPU": lambda: measured(gpus=[]),
    "other code": lambda: [
        one._replace(environment={**there(), "kernels": "other"}) for one in measured()
    ],
    "another backend": lambda: measured([one.changed(backend="cudnn") for one in SOME]),
    "decoding": lambda: [
        one._replace(config=one.config.changed(new_tokens=4)) for one in measured()
    ],
    "as predicted": lambda: [
        MeasuredTrial(one, seconds(one, TABLE), there()) for one in SOME
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_trials_that_say_nothing_of_this_hardware_change_nothing(case: str) -> None:
    assert fitted(TABLE, CASES[case]()) is TABLE


# The command line

SPEC = """
version: 1
name: {name}
kind: latency
ring: {{size: 2, device: cpu}}
problem: {{seq_len: [256, 512, 1k, 2k, 3k, 4k, 6k, 8k], heads: 4, head_dim: 64, dtype: float32}}
measure: {{repeats: {repeats}}}
"""


def planned(home: Path, repeats: int, *options: str) -> dict[str, Any]:
    (home / "now.yaml").write_text(SPEC.format(name="now", repeats=repeats))
    asked = ["plan", str(home / "now.yaml"), "--json", str(home / "plan.json"), *options]
    assert main(asked) == 0
    answer: dict[str, Any] = json.loads((home / "plan.json").read_text())
    return answer


def test_plans_are_fitted_to_what_the_store_holds(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    home.mkdir(exist_ok=True)
    before = planned(home, 5)
    assert before["fitted_trials"] == 0
    made = build(parse(SPEC.format(name="before", repeats=3)))
    info = SweepInfo(made.digest, "before", "latency", {}, "", provenance.describe())
    trials = [(t, t.predicted._asdict()) for t in made.runnable]
    with Store(home / "store.db") as store:
        store.begin(info, [TrialInfo(t.key, t.index, t.config.as_dict(), p) for t, p in trials])
        for trial, predicted in trials:
            ms = 4.0 * predicted["time_ms"]
            ended = Outcome("ok", None, {"median_ms": ms}, {"ms": [ms]})
            store.record(made.digest, trial.key, ended)
    after = planned(home, 5)
    assert after["fitted_trials"] == 8
    assert "fitted to 8 trials of the store, times within" in capsys.readouterr().out
    longer = [
        now["predicted"]["time_ms"] / was["predicted"]["time_ms"]
        for was, now in zip(before["trials"], after["trials"], strict=True)
    ]
    assert min(longer) > 1.5, "tiny ones take the time of calls, which is not fitted"
    assert longer[3:] == pytest.approx([4] * 5, rel=0.25)
