"""Points that their prediction rules out: they need too much memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ringray.base import provenance
from ringray.base.errors import SpecError
from ringray.lab.cli import main
from ringray.lab.plan import forecast, plan
from ringray.lab.plan.trial import Trial, trial_dict
from ringray.lab.predict.hardware import Fleet
from ringray.lab.report import words
from ringray.lab.specs import model as spec

if TYPE_CHECKING:
    from pathlib import Path

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
    assert most.predicted is not None
    assert reasons(made) == [
        "", "", "limits.rank_memory: predicted 8.84 GiB per rank, more than 1.00 GiB"
    ]  # fmt: skip
    assert cost_of(most) == most.predicted._asdict()  # it can still be read
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


def cost_of(trial: Trial) -> dict[str, Any]:
    return trial_dict(trial)["predicted"]


@pytest.mark.parametrize(
    ("given", "sure"),
    [
        ("seq_len: 64k", 1.1),
        ("seq_len: 64k, documents: 7", 1.3),
    ],
)
def test_a_prediction_that_errs_prunes_only_what_is_sure(given: str, sure: float) -> None:
    text = f"{HEAD}problem: {{{given}, heads: 8, head_dim: 64}}\nlimits: {{rank_memory: %d}}\n"
    check_margin(text, sure)


def check_margin(text: str, sure: float) -> None:
    (trial,) = build(text % (1 << 40)).trials
    assert trial.predicted is not None
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
    assert pair.predicted is not None
    assert four.predicted is not None
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
        assert room is not None
        assert (room.size, room.field) == (min(memory / 2, 1 << 30), field)


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
    said = capsys.readouterr().out
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
