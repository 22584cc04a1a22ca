"""Sweeps that are measured again: what stands, what is measured and why; rings are stand-ins."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ringray.base import provenance
from ringray.lab.cli import main
from ringray.lab.cluster import connect
from ringray.lab.cluster.capacity import Capacity, NodeGroup
from ringray.lab.cluster.fit import Cluster
from ringray.lab.driver import trials
from ringray.lab.driver.observer import Summary
from ringray.lab.driver.run import run
from ringray.lab.driver.schedule import Schedule
from ringray.lab.plan import plan
from ringray.lab.specs import model as spec
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import Outcome

if TYPE_CHECKING:
    from pathlib import Path

SPEC = (
    "version: 1\nname: s\nkind: latency\nring: {size: 2, device: cpu}\n"
    "problem: {seq_len: [64, 128, 192], heads: 2, head_dim: 16}\n"
    "measure: {baseline: null}\ntracking: {enabled: false}\n"
)


class Rings:
    """Measures in no time; each measurement takes a millisecond longer than the one before."""

    count = 0
    most = 10**9

    def __init__(self, plan: plan.Plan, cluster: Cluster, **sweep: Any) -> None:
        self.sweep = SimpleNamespace(**sweep)

    def run(self, schedule: Schedule) -> None:
        while (work := schedule.next()) is not None:
            if Rings.count == Rings.most:
                raise KeyboardInterrupt
            Rings.count += 1
            point = work.trial.point(self.sweep.environment)
            ms, now = float(Rings.count), 1e9 + Rings.count
            outcome = Outcome("ok", None, {"median_ms": ms}, {"ms": [ms]}, point, 1, now, now + 0.5)
            self.sweep.summary.measured += 1
            self.sweep.record(work.trial, outcome)
            schedule.tell(work, outcome)

    def close(self) -> None:
        """Has nothing to close."""


class Noting:
    """An observer that keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def __getattr__(self, name: str) -> Any:
        return lambda *given: None


class World:
    """A checkout, a machine and a store on which a sweep runs again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "store.db"
        self.plan = plan.build(spec.parse(SPEC))
        self.here = copy.deepcopy(provenance.describe())
        self.checkout("a")

    def checkout(self, code: str) -> None:
        self.here |= {"kernels": code * 64, "git": {"commit": code * 40, "dirty": False}}

    def run(self, **options: Any) -> tuple[Summary, list[str]]:
        observer = Noting()
        with Store(self.path) as store:
            summary = run(self.plan, store=store, observer=observer, **options)
        return summary, [note for note in observer.notes if "connecting" not in note]

    def medians(self) -> list[float]:
        with Store(self.path) as store:
            return [row.metrics["median_ms"] for row in store.trials(self.plan.digest)]

    def earlier(self) -> list[float]:
        with Store(self.path) as store:
            rows = [kept.trial for kept in store.history(self.plan.digest)]
        return sorted(row.metrics["median_ms"] for row in rows)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    cluster = Cluster(False, Capacity((NodeGroup("node", {"CPU": 2.0}),)))
    monkeypatch.setattr(provenance, "describe", lambda: copy.deepcopy(made.here))
    monkeypatch.setattr(connect, "connect", lambda address: nullcontext(cluster))
    monkeypatch.setattr(trials, "TrialRunner", Rings)
    monkeypatch.setattr(Rings, "count", 0)
    monkeypatch.setattr(Rings, "most", 10**9)
    return made


def test_other_code_is_measured_and_the_older_measurement_stands_again(world: World) -> None:
    summary, notes = world.run()
    assert (summary.measured, notes, world.medians()) == (3, [], [1.0, 2.0, 3.0])
    world.checkout("b")
    summary, notes = world.run()
    assert (summary.measured, world.medians()) == (3, [4.0, 5.0, 6.0])
    assert notes == [
        "to be measured again: 3 trials, measured with other code in ranks at commit aaaaaaa"
    ]
    assert world.earlier() == [1.0, 2.0, 3.0]
    for code, medians in (("a", [1.0, 2.0, 3.0]), ("b", [4.0, 5.0, 6.0])):
        world.checkout(code)
        for _ in range(2):
            summary, notes = world.run()
            assert (summary.measured, world.medians()) == (0, medians)
            assert notes == [
                f"taken from before: 3 trials of commit {code * 7}, the same code in ranks"
            ]
    assert world.earlier() == [1.0, 2.0, 3.0]


def test_a_commit_that_changes_nothing_in_ranks_measures_nothing(world: World) -> None:
    world.run()
    world.here["git"] = {"commit": "c" * 40, "dirty": True}
    summary, notes = world.run()
    assert (summary.measured, world.earlier()) == (0, [])
    assert notes == ["taken from before: 3 trials of commit aaaaaaa, the same code in ranks"]


@pytest.mark.parametrize(
    ("part", "change", "why"),
    [
        ("hardware", {"cores": 99}, "measured on other hardware (cores)"),
        ("versions", {"torch": "99.0"}, "measured with other versions (torch)"),
    ],
)
def test_another_machine_is_another_measurement(
    world: World, part: str, change: dict[str, Any], why: str
) -> None:
    world.run()
    world.here[part] |= change
    summary, notes = world.run()
    assert (summary.measured, notes) == (3, [f"to be measured again: 3 trials, {why}"])
    assert world.earlier() == [1.0, 2.0, 3.0]


def test_again_measures_everything_once_more(world: World) -> None:
    world.run()
    summary, notes = world.run(again=True)
    assert (summary.measured, world.medians(), world.earlier()) == (
        3,
        [4.0, 5.0, 6.0],
        [1.0, 2.0, 3.0],
    )
    assert notes == ["to be measured again: 3 trials, --again"]
    assert world.run()[0].measured == 0
    assert world.medians() == [4.0, 5.0, 6.0], "the newest of one identity is current"


def test_again_that_is_interrupted_loses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run()
    monkeypatch.setattr(Rings, "most", 4)
    assert world.run(again=True)[0].interrupted
    assert (world.medians(), world.earlier()) == ([4.0, 2.0, 3.0], [1.0])
    assert world.run()[0].measured == 0, "every trial has a measurement that stands"
    monkeypatch.setattr(Rings, "most", 10**9)
    assert world.run(again=True)[0].measured == 3
    assert world.earlier() == [1.0, 2.0, 3.0, 4.0]


def test_the_newest_of_several_earlier_ones_becomes_current(world: World) -> None:
    for code in ("a", "b", "a"):
        world.checkout(code)
        world.run(again=True)
    world.checkout("b")
    world.run(again=True)
    world.checkout("a")
    assert world.run()[0].measured == 0
    assert world.medians() == [7.0, 8.0, 9.0]


def test_lines_of_other_code_are_not_written_again(world: World) -> None:
    path = world.folder / "a.jsonl"

    def lines() -> list[tuple[str, float]]:
        read = [json.loads(line) for line in path.read_text().splitlines()]
        return [
            (line["environment"]["git"]["commit"][0], line["metrics"]["median_ms"]) for line in read
        ]

    world.run()
    world.checkout("b")
    world.run(json_path=path)
    of_b = [("b", 4.0), ("b", 5.0), ("b", 6.0)]
    assert lines() == of_b
    world.checkout("a")
    for _ in range(2):  # a second time there is nothing to add
        world.run(json_path=path)
        assert lines() == [*of_b, ("a", 1.0), ("a", 2.0), ("a", 3.0)]
    world.run(json_path=path, again=True)
    assert lines()[6:] == [("a", 7.0), ("a", 8.0), ("a", 9.0)]
    points = [json.loads(line)["point"] for line in path.read_text().splitlines()]
    assert len(set(points)) == 6


def test_history_shows_every_measurement(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.run()
    world.checkout("b")
    world.here["git"]["dirty"] = True
    world.here["versions"] |= {"torch": "99.0"}
    world.run()
    assert main(["status", "s", "--history", "--store", str(world.path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    head = next(line for line in lines if line[:1] == ["#"])
    assert head == [
        "#",
        "length",
        "ended",
        "commit",
        "code",
        "torch",
        "status",
        "median",
        "ms",
        "current",
    ]
    rows = [line for line in lines if line[0:1] in (["1"], ["2"], ["3"]) and len(line) > 5]
    torch = provenance.versions()["torch"]
    assert [row[1:2] + row[4:] for row in rows] == [
        one
        for number in range(3)
        for one in (
            [str(64 * (number + 1)), "aaaaaaa", "aaaaaaa", torch, "ok", f"{number + 1}.00"],
            [str(64 * (number + 1)), "bbbbbbb", "dirty", "bbbbbbb", "99.0", "ok",
             f"{number + 4}.00", "yes"],
        )
    ]  # fmt: skip
    assert main(["status", "s", "--store", str(world.path)]) == 0
    assert "aaaaaaa" not in capsys.readouterr().out
