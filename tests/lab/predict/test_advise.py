"""Advice and ``ringray advise``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ringray.base import units
from ringray.base.errors import UserError
from ringray.lab import cli
from ringray.lab.plan import plan
from ringray.lab.predict import advise, cost_model, hardware, layouts, pooling
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.layouts import TrainingRequest
from ringray.lab.specs import model as spec
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.lengths import drawn
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
        for degrees in layouts.possible(asked)
        if layouts.least(asked, degrees).memory.total <= asked.usable_bytes
    ]
    times = sorted(one.time.total for one in every)
    # Of each of these degrees there may be a slower way with more room.
    assert all(
        one.time.total <= (1 + advise.EQUAL) * max(time, times[0])
        for one, time in zip(found, times, strict=False)
    )
    for one in every:
        assert advise._bound(asked, one.degrees) <= one.time.total
        assert one.memory.total <= asked.usable_bytes
    assert len({one.degrees for one in found}) == 3


@pytest.mark.parametrize("fleet", ["h100:2x8", "h100:8x8"])
def test_of_equally_fast_proposals_the_roomiest_is_first(fleet: str) -> None:
    asked = training_request(1 << 20, 4, fleet)
    ranked = advise.advise(asked, 8)
    least = ranked[0].time.total / (1 + ranked[0].slower)
    equal = [proposal for proposal in ranked if proposal.slower <= advise.EQUAL]
    assert all(
        proposal.time.total == pytest.approx(least * (1 + proposal.slower)) for proposal in ranked
    )
    assert len(equal) > 1
    assert ranked[: len(equal)] == sorted(equal, key=lambda proposal: -proposal.room)
    assert ranked[len(equal) :] == sorted(
        ranked[len(equal) :], key=lambda proposal: proposal.time.total
    )
    for proposal in ranked:
        assert proposal.room == asked.usable_bytes - proposal.memory.total > 0
    # Among the ways to keep activations, too.
    alike = advise._fitting(asked, ranked[0].degrees, ranked[0].config)
    ways = [proposal for proposal in alike if proposal.time.total <= (1 + advise.EQUAL) * least]
    assert ranked[0].room == max(proposal.room for proposal in ways)


def test_no_long_ring_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated, predict = [], cost_model.predict

    def counted(config: TrialConfig, on: hardware.Fleet) -> Cost:
        simulated.append(config.ring.size // config.exchange.fold)
        return predict(config, on)

    monkeypatch.setattr(cost_model, "predict", counted)
    first = advise.advise(training_request(1 << 20, 4, "h100:512x8", tp=2, dp=4), 3)[0]
    assert first.degrees.cp == 512
    assert max(simulated) <= 128
    assert len(simulated) < 150


def test_degrees_multiply_out() -> None:
    degrees = layouts.possible(training_request())
    assert len(degrees) == len(set(degrees))
    for one in degrees:
        assert one.ranks == 16
        assert 8 % one.tp == 32 % one.pp == 4 % one.dp == 0
    assert Degrees(2, 2, 2, 2) in degrees
    assert layouts.possible(training_request(tp=4, dp=2)) == [
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
    reach = layouts.max_context(asked)
    assert reach.memory.total <= asked.usable_bytes
    longest = replace(asked, context=reach.training.context)
    assert layouts.least(longest, reach.degrees).memory.total <= asked.usable_bytes
    longer = replace(asked, context=int(reach.training.context * 1.02))
    for degrees in layouts.possible(longer):
        assert layouts.least(longer, degrees).memory.total > asked.usable_bytes
    twice = layouts.max_context(training_request(1, 1, fleet="h100:8"))
    assert twice.training.context > 1.9 * reach.training.context


def test_memory_that_no_layout_has() -> None:
    with pytest.raises(UserError, match=r"fit into no layout.*DP 1 x CP 16.*more than can be used"):
        advise.advise(training_request(1 << 24, 1))
    big = TrainingRequest(named("405b", {}), hardware.parse_fleet("h100:1"), 1, 1)
    with pytest.raises(UserError, match="what helps: more ranks"):
        layouts.max_context(big)


@pytest.mark.parametrize("fleet", ["h100:8", "cpu:8"])
def test_one_pool_is_compared_with_the_slowest_of_the_rings(
    fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling, "_BATCHES", 2)
    table = ((500, 4000, 4), (9000, 30000, 1))
    asked = training_request(1 << 15, 4, fleet, dp=2, tp=1, pp=1)
    best = advise.advise(asked, 1)[0]
    result = pooling.pooled(asked, best, table)
    ring = best.config.changed(backward="planned")
    pool = ring.changed(ring_size=8, seq_len=1 << 16, partition="balanced")
    slowest, together = [], {"direct": [], best.config.strategy.transport: []}
    for seeds in ((0, 1), (2, 3)):
        batch = [drawn(table, 1 << 15, seed) for seed in seeds]
        costs = [asked.cost(best.degrees, ring.changed(documents=lengths)) for lengths in batch]
        slowest.append(max(cost.time_ms for cost in costs))
        for name, times in together.items():
            packed = pool.changed(documents=batch[0] + batch[1], transport=name)
            times.append(asked.cost(Degrees(1, 8), packed).time_ms)
    assert result.rings == pytest.approx(sum(slowest) / 2)
    assert result.pool == pytest.approx(min(sum(times) / 2 for times in together.values()))
    assert result.pool == pytest.approx(sum(together[result.transport]) / 2)
    assert result.ranks == 8
    monkeypatch.setattr(pooling, "_LARGEST_POOL", 7)
    with pytest.raises(UserError, match="--lengths: got 8 ranks of DP x CP, at most 7"):
        pooling.pooled(asked, best, table)


# The command line


def test_answer_json_and_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, answer = tmp_path / "spec.yaml", tmp_path / "answer.json"
    line = ["advise", "8b", "--context", "256k", "--on", "h100:2x8", "--top", "2"]
    assert cli.main([*line, "--spec", str(asked), "--json", str(answer)]) == 0
    printed = capsys.readouterr().out
    advice = json.loads(answer.read_text())
    assert len(advice["proposals"]) == 2
    first = advice["proposals"][0]
    assert first["step_s"] <= 1.03 * advice["proposals"][1]["step_s"]
    room = advice["usable_bytes"] - first["memory_bytes"]["total"]
    assert first["room_bytes"] == pytest.approx(room)
    assert first["price_per_step"] is first["price_per_million_tokens"] is None
    assert "price" not in printed
    assert sum(first["parts_s"].values()) == pytest.approx(first["step_s"])
    assert 0.3 < first["mfu"] < first["mfu_paper"]
    assert first["tokens_per_s"] == pytest.approx((4 << 20) / first["step_s"])
    whole = units.memory((256 << 10) / first["degrees"]["cp"] * 128256 * 10)  # bf16 and two fp32
    assert f"Left out: whole logits, {whole} more" not in printed  # less the chunks of the loss
    assert "Left out: whole logits, " in printed
    assert 'loss_type="chunked_nll"' in printed
    for text in ("One rank: not enough", "Ring: ", first["transport"], first["limit"], "Memory"):
        assert text in printed
    built = plan.build(spec.load(asked), processes=2)
    (config, *_) = [trial.config for trial in built.runnable]
    assert config.ring.size == first["degrees"]["cp"]
    assert config.problem.seq_len == 256 << 10
    assert config.strategy.transport == first["transport"]
    assert config.problem.heads * first["degrees"]["tp"] == 32
    assert str(plan.build(spec.load(asked)).on).startswith("h100:")


@pytest.mark.parametrize(("context", "sequences"), [("17", 246723), ("1k", 4096), ("4k", 1024)])
def test_short_contexts_have_four_million_tokens_a_step(
    context: str, sequences: int, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["advise", "tiny", "--context", context, "--on", "h100:1", "--json", "-"]
    assert cli.main(line) == 0
    assert json.loads(capsys.readouterr().out)["sequences"] == sequences


def test_specs_of_models_whose_folders_have_odd_names(tmp_path: Path) -> None:
    config = tmp_path / "übung: x #1\n[y]" / "config.json"
    config.parent.mkdir()
    same = ("num_attention_heads", "head_dim", "num_hidden_layers", "vocab_size")
    sizes = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64}
    sizes |= dict.fromkeys(same, 8)
    config.write_text(json.dumps(sizes))
    line = ["advise", str(config), "--context", "64k", "--on", "h100:8"]
    assert cli.main([*line, "--spec", str(tmp_path / "spec.yaml")]) == 0
    assert spec.load(tmp_path / "spec.yaml").name.startswith("bung-x-1-y--65536-cp")


def test_a_table_of_lengths_is_answered_with_the_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text("shortest,longest,documents\n100,9000,1\n")
    line = ["advise", "8b", "--on", "h100:8", "--context", "16k", "--dp", "2", "--cp", "4"]
    line += ["--lengths", str(tmp_path / "t.csv")]
    assert cli.main(line) == 0
    printed = capsys.readouterr().out
    assert "attention of a layer takes " in printed
    assert " in rings of DP 2 x CP 4 (zigzag, " in printed
    assert cli.main([*line, "--json", "-"]) == 0
    pool = json.loads(capsys.readouterr().out)["pool"]
    assert pool["ranks"] == 8
    assert f"in one pool of 8 (balanced, {pool['transport']}): " in printed
    assert f"{pool['pool'] / pool['rings']:.2f} x" in printed


def test_max_context(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["advise", "13b", "--max-context", "--on", "h100:8", "--json", "-"]
    assert cli.main(line) == 0
    advice = json.loads(capsys.readouterr().out)
    assert advice["max_context"] > 200_000
    assert advice["memory_bytes"]["total"] <= advice["usable_bytes"]
    assert advice["limit"] in advice["memory_bytes"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["8b", "--context", "1M", "--on", "h10:8"], "did you mean 'h100'?"),
        (["8b", "--context", "1M"], "--on: expected a fleet"),
        (["8b", "--context", "1M", "--on", "h100:8", "--compare", "h100:8"], "--on: expected a"),
        (["8b", "--context", "1M", "--top", "2", "--compare", "h100:8"], "--top: expected beside"),
        (["8b", "--context", "1M", "--compare", "h100:8=x"], "expected a number above 0"),
        (["8b", "--context", "1M", "--compare", "h100:8=inf"], "expected a number above 0"),
        (["8b", "--context", "1k", "--compare", "h100:8=2", "h100:1x8=3"], "got h100:8 2 times"),
        (["8b", "--context", "1k", "--compare", "cpu", "h100:8"], "got 'cpu', expected the ranks"),
        (["8b", "--context", "1_000", "--on", "h100:8"], "--context: got '1_000', expected an"),
        (["8b", "--context", "8k", "--on", "h100:8", "--layers", "1" * 30], "--layers: got '111"),
        (["8b", "--context", "8k", "--on", "h100:8", "--lengths", ""], "expected a CSV file"),
        (["8b", "--context", "8k", "--on", "h100:8", "--price", "-1"], "expected a number above 0"),
        (["8b", "--context", "8k", "--on", "h100:8", "--ep", "2"], "llama3-8b has no experts"),
        (["8b", "--max-context", "--on", "h100:8", "--ep", "2"], "--ep 2: cannot be, as llama3-8b"),
        (["qwen3-30b-a3b", "--context", "8k", "--on", "h100:8", "--ep", "3"], "EP experts and DP"),
        (["8b", "--context", "8k", "--on", "h100:8", "--price", "1e10"], "from 1e-9 to 1e9"),
        (["8b", "--context", "8k", "--compare", "h100:8=1e-10"], "from 1e-9 to 1e9"),
        (["8b", "--on", "h100:8"], "--context: expected the tokens"),
        (["8b", "--on", "h100:8", "--context", "8k", "--max-context"], "--max-context, not both"),
        (["405b", "--on", "h100:1", "--max-context"], "error: --max-context: 64 tokens"),
        (["8b", "--context", "1M", "--on", "h100:8", "--dtype", "fp8"], "--dtype: got 'fp8'"),
        (["8b", "--context", "100M", "--on", "h100:8"], "more than can be used"),
        (["8b", "--max-context", "--on", "h100:8", "--batch", "2"], "--batch: expected beside"),
        (["8b", "--max-context", "--on", "h100:8", "--lengths", "x"], "--lengths: expected beside"),
        (["8b", "--context", "8k", "--on", "h100:8", "--lengths", "x"], "x: no such file"),
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


def test_no_output_is_an_input_or_another_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    (tmp_path / "mine.yaml").write_text("{}")
    for line, says in (
        (["mine", "--on", "h100:8", "--json", "mine/config.json"], "is an input"),
        (["8b", "--compare", "mine.yaml:8=2", "--json", "mine.yaml"], "is an input"),
        (["8b", "--on", "h100:8", "--json", "x", "--spec", "./x"], "--spec ./x: is for --json"),
        (["8b", "--on", "h100:8", "--json", "-", "--spec", "-"], "--spec -: is for --json"),
    ):
        assert cli.main(["advise", *line, "--context", "8k"]) == 2
        out, err = capsys.readouterr()
        assert says in err
        assert out == ""


def test_a_price_is_of_a_rank_and_hour(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["advise", "8b", "--context", "64k", "--on", "h100:8", "--price", "2.5"]
    assert cli.main([*line, "--json", "-"]) == 0
    first = json.loads(capsys.readouterr().out)["proposals"][0]
    assert first["price_per_step"] == pytest.approx(8 * 2.5 * first["step_s"] / 3600)
    per_million = first["price_per_step"] / (4 << 20) * 1e6
    assert first["price_per_million_tokens"] == pytest.approx(per_million)
    assert cli.main(line) == 0
    assert "price/1M tokens" in capsys.readouterr().out


def test_fleets_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["advise", "8b", "--context", "1M", "--price", "2", "--compare"]
    line += ["h100:2x8", "h100:4x8=1.5", "h200:2x8=1.1", "h100:1"]
    assert cli.main(line) == 0
    printed = capsys.readouterr().out
    assert "Fastest: h100:4x8\nCheapest: h200:2x8\n" in printed
    assert "h100:1 is left out: --context: 1,048,576 tokens of llama3-8b fit into no" in printed
    assert cli.main([*line, "--json", "-"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["fastest"], answer["cheapest"]) == ("h100:4x8", "h200:2x8")
    assert [fleet["price"] for fleet in answer["fleets"]] == [2, 1.5, 1.1, 2]
    *fitting, last = answer["fleets"]
    assert last["proposal"] is None
    assert "fit into no layout" in last["reason"]
    asked = training_request(1 << 20, 4, "h100:4x8")
    assert fitting[1]["proposal"]["step_s"] == advise.advise(asked, 1)[0].time.total
    prices = [fleet["proposal"]["price_per_million_tokens"] for fleet in fitting]
    assert min(prices) == prices[2]
    assert cli.main(["advise", "8b", "--context", "64k", "--compare", "h100:8", "h200:8"]) == 0
    printed = capsys.readouterr().out
    assert "Fastest: h" in printed
    assert "Cheapest: no price is known" in printed
    assert cli.main(["advise", "8b", "--context", "64k", "--compare", "h100:8=2", "h200:8"]) == 0
    printed = capsys.readouterr().out
    assert "Cheapest: h100:8\nNot compared by price: h200:8; give FLEET=P" in printed


def test_assumptions_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["advise", "qwen3-30b-a3b", "--context", "128k", "--on", "h100:8x8"]
    assert cli.main(line) == 0
    printed = capsys.readouterr().out
    assert cli.main([*line, "--json", "-"]) == 0
    answer = json.loads(capsys.readouterr().out)
    lines = answer["assumptions"]
    assert set(named("qwen3-30b-a3b", {}).assumptions) <= set(lines)
    assert any("to their experts" in text for text in lines)
    assert all(f"Assumed: {text}\n" in printed for text in lines)
    assert answer["proposals"][0]["degrees"]["ep"] >= 1
    assert "  EP  " in printed
    long = training_request(1 << 20, 4, "h100:32x8", cp=256)
    (best,) = advise.advise(long, 1)
    for transport, lines in (("hybrid:8", 0), ("ring", 1)):
        some = best._replace(config=best.config.changed(transport=transport))
        assert len(advise.assumptions(long, some)) == lines


def test_a_context_beyond_the_positions_of_a_config_is_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8}
    sizes |= {"num_hidden_layers": 8, "vocab_size": 8, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    for asked, beyond in (
        (["--context", "4k"], False), (["--context", "8k"], True), (["--max-context"], True)
    ):  # fmt: skip
        assert cli.main(["advise", str(tmp_path), "--on", "h100:1", *asked]) == 0
        printed = capsys.readouterr().out
        assert ("Assumed: the config's positions end at 4,096\n" in printed) == beyond


# Transformers around the attention
