"""Points that their prediction rules out: too much memory, or surely slower than another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringray.base import provenance
from ringray.base.errors import SpecError
from ringray.lab.cli import main
from ringray.lab.driver.resume import Resume
from ringray.lab.plan import forecast, plan
from ringray.lab.plan.forecast import BEATEN, beaten
from ringray.lab.plan.problems import defaults, studies
from ringray.lab.plan.trial import trial_dict
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.hardware import Fleet, cpu
from ringray.lab.report import words
from ringray.lab.specs import model as spec
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import Outcome, SweepInfo
from tests.lab.driver.test_schedule import Machine

MIB = 1 << 20
HEAD = "version: 1\nname: f\nkind: latency\nring: {size: 2, device: cpu}\n"
LENGTHS = f"{HEAD}problem: {{seq_len: [1k, 64k, 1M], heads: 8, head_dim: 64}}\n"
LIMIT = f"{LENGTHS}limits: {{rank_memory: 1GiB}}\n"


def build(text: str, on: Fleet | None = None, **given: Any) -> plan.Plan:
    return plan.build(spec.parse(text, "f.yaml"), on, **given)


def reasons(made: plan.Plan) -> list[str]:
    return [str(trial.pruned or "") for trial in made.trials]


# Memory


def test_points_beyond_the_limit_of_a_rank_are_pruned_with_the_reason() -> None:
    made = build(LIMIT)
    most = made.trials[-1]
    assert reasons(made) == [
        "", "", "limits.rank_memory: predicted 8.84 GiB per rank, more than 1.00 GiB"
    ]  # fmt: skip
    assert trial_dict(most)["predicted"] == most.predicted._asdict()  # it can still be read
    assert (
        made.spec.limits.trial_timeout
        == build(LENGTHS.replace(", 1M", "")).spec.limits.trial_timeout
    )
    (line,) = words.pruned(made)
    assert line.startswith("1 point pruned: limits.rank_memory: predicted")
    assert line.endswith("; --all measures also what a prediction rules out")
    forced = build(LIMIT, everything=True)
    assert reasons(forced) == ["", "", ""]
    assert forced.digest == made.digest


@pytest.mark.parametrize(
    ("problem", "sure"),
    [
        ("seq_len: 64k", 1.1),
        ("seq_len: 64k, documents: 7", 1.3),
    ],
)
def test_a_prediction_that_errs_prunes_only_what_is_sure(problem: str, sure: float) -> None:
    text = f"{HEAD}problem: {{{problem}, heads: 8, head_dim: 64}}\nlimits: {{rank_memory: %d}}\n"
    (trial,) = build(text % (1 << 40)).trials
    peak = trial.predicted.peak_memory_bytes

    def planned(share: float) -> tuple[bool, list[str]]:
        made = build(text % int(peak / share), **extra)
        return made.trials[0].pruned is None, words.warnings(made)

    extra: dict[str, Any] = {}
    assert planned(0.999) == (True, [])
    stays, (warned,) = planned(sure - 0.005)
    assert stays
    assert warned.startswith("warning: 1 point may run out of memory: up to ")
    with pytest.raises(SpecError, match=r"limits\.rank_memory: predicted .* per rank, more than"):
        planned(sure + 0.005)
    extra["everything"] = True
    assert planned(3.0) == (True, [])


def test_ranks_share_the_memory_of_their_machine() -> None:
    text = LENGTHS.replace("size: 2", "size: [2, 4]").replace("[1k, 64k, 1M]", "64k")
    pair, four = build(text).trials
    needs = 4 * four.predicted.peak_memory_bytes
    assert 2 * pair.predicted.peak_memory_bytes < needs / 1.2
    assert reasons(build(text, machine=needs)) == ["", ""]
    made = build(text, machine=int(needs / 1.2))
    assert reasons(made)[0] == ""
    assert reasons(made)[1].startswith("problem.seq_len: predicted 410 MiB per rank, more than ")
    assert reasons(made)[1].endswith(" of this machine for each of 4 ranks")
    # The smaller one of both counts.
    low = build(f"{text}limits: {{rank_memory: 1GiB}}\n")
    for memory, field in ((needs, "problem.seq_len"), (4 << 30, "limits.rank_memory")):
        room = forecast.memory_budget(low.spec, low.trials[0].config, forecast.host(None, memory))
        assert (room.size, room.field) == (min(memory / 2, 1 << 30), field)


# Time

SEARCH = (
    "version: 1\nname: f\nkind: strategy-tune\nring: {{size: 4, device: cpu}}\n"
    "problem: {{seq_len: [512, 4k], heads: 4, direction: forward}}\n"
    "strategy: {{partition: auto, transport: auto}}\n"
    "measure: {{warmup: 1, repeats: 15}}\nsearch: {search}\n"
)


def cost(ms: float, error: float = 0.2) -> Cost:
    return Cost(1, 1, 1, 1, ms, 1.0, ms * (1 - error), ms * (1 + error), 0.0, 1, 0)


def test_only_points_beyond_both_errors_are_beaten() -> None:
    # The best takes at most 12 ms; 18 ms at least is no more than 1.5 times that.
    costs = [cost(ms) for ms in (30.0, 10.0, 11.0, 12.0, 22.4, 22.6)]
    assert beaten(costs) == [5, 0]
    assert beaten(costs, keep=[0]) == [5]
    assert beaten([cost(ms) for ms in (1.0, 50.0, 100.0)]) == []  # too few to leave one out
    assert beaten([cost(ms) for ms in (1.0, 50.0, 100.0, 101.0)]) == [3]
    assert beaten([]) == []
    # The one that is predicted best may be the less sure one.
    unsure = [cost(10.0, error=0.9), cost(11.0, error=0.01), cost(12.0), cost(17.0, error=0.01)]
    assert beaten(unsure) == [3]


def predicted(made: plan.Plan, error: float = 0.1) -> plan.Plan:
    """The plan with the times of a machine, and those that they rule out."""
    machine = Machine()
    trials = tuple(
        replace(one, predicted=cost(machine.cost(one.config), error)) for one in made.trials
    )
    return replace(made, trials=forecast.without_beaten(made.spec, trials, None))


def test_a_search_leaves_out_what_another_point_surely_beats() -> None:
    made = predicted(build(SEARCH.format(search="{method: halving}")))
    lost = [trial for trial in made.trials if trial.pruned]
    assert {trial.pruned for trial in lost} == {BEATEN}
    assert len(lost) > len(made.trials) / 4
    slowest_kept = max(trial.predicted.time_ms for trial in made.runnable if trial.predicted)
    fastest_lost = min(trial.predicted.time_ms for trial in lost if trial.predicted)
    assert slowest_kept <= fastest_lost
    (line,) = words.pruned(made)
    assert "predicted to be slower than another point of its problem" in line


def test_without_a_calibration_nothing_is_beaten(monkeypatch: pytest.MonkeyPatch) -> None:
    text = SEARCH.format(search="{method: halving}").replace("transport: auto", "transport: ring")
    sure = cpu(8).hardware.model_copy(update={"spread": 0.0})
    table, measured = (
        replace(cpu(8), hardware=sure.model_copy(update={"measured": when}))
        for when in (None, "2026-11-23")
    )
    assert not any(reasons(build(text, table)))
    assert str(BEATEN) in reasons(build(text, measured))
    assert not any(reasons(build(text, measured, everything=True)))
    # On another cluster the hardware of this machine is a guess.
    monkeypatch.setattr(plan, "local_fleet", lambda device: measured)
    assert not any(reasons(build(text)))
    assert str(BEATEN) in reasons(build(text, machine=1 << 40))


def test_the_default_is_measured_whatever_was_predicted() -> None:
    made = build(SEARCH.format(search="{method: halving}"))
    usual = {trial.key for group in studies(made.trials) for trial in defaults(group)}
    assert len(usual) == 2
    slow = tuple(
        replace(one, predicted=cost(99.0 if one.key in usual else 1.0 + one.index / 4, 0.1))
        for one in made.trials
    )
    left = forecast.without_beaten(made.spec, slow, 4)
    assert usual <= {trial.key for trial in left if trial.pruned is None}
    assert any(trial.pruned for trial in left)
    # Three cores are too few for four ranks to keep pace.
    assert forecast.without_beaten(made.spec, slow, 3) == slow


def test_a_search_that_is_over_stays_so_after_a_calibration(tmp_path: Path) -> None:
    made = build(SEARCH.format(search="{method: halving}"))
    pruned = predicted(made)
    with Store(tmp_path / "s.db") as store:
        environment = provenance.describe()
        info = SweepInfo(made.digest, "f", "strategy-tune", made.spec.canonical(), "", environment)
        store.begin(info, Resume.of(pruned, store, environment).infos())
        for trial in pruned.runnable:
            ended = Outcome("ok", None, {"median_ms": 1.0}, {"ms": [1.0] * 15})
            outcome = replace(ended, point=trial.point(environment))
            store.record(made.digest, trial.key, outcome)
        store.finish(made.digest, "complete")
        assert not Resume.of(pruned, store, environment).to_do
        assert not Resume.of(made, store, environment).to_do
        # ... but not for a user that wants them all.
        assert Resume.of(replace(made, everything=True), store, environment).to_do


# The command line


def test_the_commands_know_what_is_ruled_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "f.yaml", tmp_path / "plan.json"
    path.write_text(LIMIT)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["plan", str(path), "--json", str(out), "--price", "2.5"]) == 0
    made = json.loads(out.read_text())
    totals = made["totals"]
    assert (totals["trials"], totals["pruned"]) == (2, 1)
    hours = 2 * sum(trial["measuring_s"] for trial in made["trials"]) / 3600
    assert totals["rank_hours"] == pytest.approx(hours)
    assert totals["cost"] == pytest.approx(2.5 * hours)
    assert main(["plan", str(path), "--price", "1e10"]) == 2
    said, refused = capsys.readouterr()
    assert "--price: got '1e10', expected a number above 0, from 1e-9 to 1e9" in refused
    assert f"rank-hours for {2.5 * hours:,.2f} at 2.5 each" in said
    assert "1 point pruned: limits.rank_memory" in said
    monkeypatch.setattr(provenance, "memory_bytes", lambda: 2 * MIB)
    assert main(["plan", str(path)]) == 2  # without --all nothing of it fits this machine
    assert "problem.seq_len: predicted" in capsys.readouterr().err
    assert main(["validate", str(path)]) == 0  # it may be meant for another one
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert main(["plan", str(path)]) == 0
    monkeypatch.delenv("RAY_ADDRESS")
    assert main(["run", str(path), "--no-tracking"]) == 2
    capsys.readouterr()
    assert main(["plan", str(path), "--all"]) == 0
    assert "3 trials; predicted" in capsys.readouterr().out
