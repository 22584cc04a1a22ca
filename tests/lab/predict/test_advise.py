"""Advice: the best of all degrees, what fits, and the longest context; and ``ringray advise``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ringray.base.errors import UserError
from ringray.lab import cli
from ringray.lab.plan import plan
from ringray.lab.predict import advise, hardware
from ringray.lab.predict.advise import TrainingRequest
from ringray.lab.specs import model as spec
from ringray.models.sizes import named
from ringray.training.recipe import Degrees


def training_request(
    context: int = 1 << 17, sequences: int = 4, fleet: str = "h100:2x8", **given: int
) -> TrainingRequest:
    return TrainingRequest(
        named("8b", {}), hardware.parse_fleet(fleet), context, sequences, fixed=given
    )


def with_ports(of: TrainingRequest, ranks: int, bandwidth: float) -> TrainingRequest:
    outer = of.on.hardware.outer.model_copy(update={"ranks": ranks, "bandwidth": bandwidth})
    return replace(
        of, on=replace(of.on, hardware=of.on.hardware.model_copy(update={"outer": outer}))
    )


def test_no_degrees_are_faster_than_the_advised() -> None:
    asked = with_ports(training_request(fleet="h100:2x4"), 4, 5e9)
    found = advise.advise(asked, 3)
    every = [
        advise.advise(replace(asked, fixed=vars(degrees)), 1)[0]
        for degrees in advise.possible(asked)
        if advise.needed(asked, degrees).total <= asked.usable_bytes
    ]
    times = sorted(one.time.total for one in every)
    assert [one.time.total for one in found] == pytest.approx(times[:3])
    for one in every:
        assert advise._bound(asked, one.degrees) <= one.time.total
        assert one.memory.total <= asked.usable_bytes
    assert len({one.degrees for one in found}) == 3


def test_degrees_multiply_out() -> None:
    degrees = advise.possible(training_request())
    assert len(degrees) == len(set(degrees))
    for one in degrees:
        assert one.ranks == 16
        assert 8 % one.tp == 32 % one.pp == 4 % one.dp == 0
    assert Degrees(2, 2, 2, 2) in degrees
    assert advise.possible(training_request(tp=4, dp=2)) == [
        Degrees(2, 2, 4, 1),
        Degrees(2, 1, 4, 2),
    ]


def test_a_slow_network_is_what_limits() -> None:
    asked = with_ports(training_request(1 << 14, 16), 8, 1e9)
    best = advise.advise(replace(asked, fixed={"dp": 1, "pp": 1, "tp": 1}), 1)[0]
    assert "between nodes" in best.limit(asked.on)
    fast = with_ports(asked, 1, 1e12)
    assert advise.advise(fast, 1)[0].limit(asked.on) == "compute"


def test_a_ring_is_needed_where_nothing_else_fits() -> None:
    short = advise.smallest_ring(training_request(1 << 14, 16))
    assert short.degrees.cp == 1
    long = training_request(1 << 22, 1, dp=1, pp=1, tp=1)
    with pytest.raises(UserError):
        advise.advise(replace(long, on=hardware.parse_fleet("h100:8")), 1)
    few = advise.smallest_ring(training_request(1 << 20, 1, fleet="h100:8x8", pp=1, tp=4))
    assert few.degrees == Degrees(1, 16, 4, 1)


def test_the_longest_context_fits_and_no_longer() -> None:
    asked = training_request(1, 1, fleet="h100:4")
    reach = advise.max_context(asked)
    assert reach.memory.total <= asked.usable_bytes
    at = replace(asked, context=reach.context)
    assert advise.needed(at, reach.degrees).total <= asked.usable_bytes
    longer = replace(asked, context=int(reach.context * 1.02))
    for degrees in advise.possible(longer):
        assert advise.needed(longer, degrees).total > asked.usable_bytes
    twice = advise.max_context(training_request(1, 1, fleet="h100:8"))
    assert twice.context > 1.9 * reach.context


def test_memory_that_no_layout_has() -> None:
    with pytest.raises(UserError, match=r"fit into no layout.*DP 1 x CP 16.*more than can be used"):
        advise.advise(training_request(1 << 24, 1))
    big = TrainingRequest(named("405b", {}), hardware.parse_fleet("h100:1"), 1, 1)
    with pytest.raises(UserError, match="what helps: more ranks"):
        advise.max_context(big)


# The command line


def test_answer_json_and_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, answer = tmp_path / "spec.yaml", tmp_path / "answer.json"
    line = ["advise", "8b", "--context", "256k", "--on", "h100:2x8", "--top", "2"]
    assert cli.main([*line, "--spec", str(asked), "--json", str(answer)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(answer.read_text())
    assert len(found["proposals"]) == 2
    first = found["proposals"][0]
    assert first["step_s"] <= found["proposals"][1]["step_s"]
    assert sum(first["parts_s"].values()) == pytest.approx(first["step_s"])
    assert 0.3 < first["mfu"] < first["mfu_paper"]
    assert first["tokens_per_s"] == pytest.approx((4 << 20) / first["step_s"])
    for text in ("One rank: not enough", "Ring: ", first["transport"], first["limit"], "Memory"):
        assert text in printed
    built = plan.build(spec.load(asked), processes=2)
    (config, *_) = [trial.config for trial in built.runnable]
    assert config.ring.size == first["degrees"]["cp"]
    assert config.problem.seq_len == 256 << 10
    assert config.strategy.transport == first["transport"]
    assert config.problem.heads * first["degrees"]["tp"] == 32
    assert str(plan.build(spec.load(asked)).on).startswith("h100:")


def test_max_context(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["advise", "13b", "--max-context", "--on", "h100:8", "--json", "-"]
    assert cli.main(line) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["max_context"] > 200_000
    assert found["memory_bytes"]["total"] <= found["usable_bytes"]
    assert found["limit"] in found["memory_bytes"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["8b", "--context", "1M", "--on", "h10:8"], "did you mean 'h100'?"),
        (["8b", "--on", "h100:8"], "--context: expected the tokens"),
        (["8b", "--context", "1M", "--on", "h100:8", "--dtype", "fp8"], "--dtype: got 'fp8'"),
        (["8b", "--context", "100M", "--on", "h100:8"], "more than can be used"),
        (["8b", "--max-context", "--on", "h100:8", "--batch", "2"], "--batch: expected beside"),
        (["--layers", "2", "--context", "1M", "--on", "h100:8"], "--hidden"),
    ],
)
def test_wrong_questions_exit_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["advise", *arguments]) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert out == ""
