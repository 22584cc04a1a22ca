"""Advice, ``ringray advise``, and transformers: counts, memory against torch, times by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ringray.base import units
from ringray.base.errors import UserError
from ringray.lab import cli
from ringray.lab.plan import plan
from ringray.lab.predict import advise, collectives, cost_model, hardware, pooling, transformer
from ringray.lab.predict.advise import TrainingRequest
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.transformer import Training
from ringray.lab.specs import model as spec
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.lengths import drawn
from ringray.models.decoder import Decoder
from ringray.models.sizes import Model, named
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
        (["8b", "--context", "8k", "--on", "h100:8", "--price", "-1"], "expected a number above 0"),
        (["8b", "--context", "8k", "--on", "h100:8", "--ep", "2"], "--ep 2: cannot be"),
        (["qwen3-30b-a3b", "--context", "8k", "--on", "h100:8", "--ep", "3"], "EP experts and DP"),
        (["8b", "--on", "h100:8"], "--context: expected the tokens"),
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


# Transformers around the attention

TINY = Model("tiny", 4, 96, 6, 2, 16, 160, 512)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("LLaMA-65B", 65_285_660_672),
        ("8b", 8_030_261_248),
        ("405b", 405_853_388_800),
    ],
)
def test_parameters_are_those_of_the_published_weights(name: str, parameters: int) -> None:
    assert named(name, {}).parameters == parameters


def test_flops_are_two_per_weight_and_four_head_dims_per_pair() -> None:
    context = 37
    pairs = sum(range(1, context + 1))
    weights = 96 * (6 + 2 + 2) * 16 + 6 * 16 * 96 + 3 * 96 * 160
    expected = context * (4 * 2 * weights + 2 * 96 * 512) + 4 * 4 * 16 * 6 * pairs
    assert TINY.forward_flops(context) == expected
    assert TINY.forward_flops(context, causal=False) > expected


def saved_bytes(m: Model, rows: int) -> int:
    """Bytes that autograd keeps of one layer, its input included."""
    made: dict[int, torch.Tensor] = {}
    decoder = Decoder(replace(m, layers=2))
    layer = decoder.layers["1"]
    own = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}

    def keep(one: torch.Tensor) -> torch.Tensor:
        made[one.untyped_storage().data_ptr()] = one  # held, so that no address comes twice
        return one

    x = torch.randn(1, rows, m.hidden, requires_grad=True)
    layer(x, seq_len=rows)  # makes the angles of its rows, which layers share
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        assert layer(x, seq_len=rows).shape == x.shape
    return sum(
        tensor.untyped_storage().nbytes() for address, tensor in made.items() if address not in own
    )


@pytest.mark.parametrize("kv_heads", [TINY.heads, TINY.kv_heads])
def test_what_a_layer_keeps_is_what_autograd_keeps(kv_heads: int) -> None:
    rows, model = 256, replace(TINY, kv_heads=kv_heads)
    how = Training(rows, 1, "float32", kept="all", mlp_rows=None, loss_rows=1, fused=False)
    per_layer = transformer.memory(model, Degrees(), how, 0).kept / model.layers
    assert per_layer == pytest.approx(saved_bytes(model, rows), rel=0.02)


def test_degrees_divide_memory() -> None:
    model, how = named("8b", {}), Training(1 << 16, 4)
    alone = transformer.memory(model, Degrees(), how, 0)
    assert alone.states == 16 * model.parameters
    assert alone.gathered == 0
    assert alone.kept == 32 * (1 << 16) * 4096 * 2
    for degrees in (Degrees(dp=4), Degrees(cp=4), Degrees(tp=4)):
        held = transformer.memory(model, degrees, how, 0)
        assert held.states == alone.states / 4
        assert held.kept == alone.kept / (1 if degrees.dp == 4 else 4)
    # One forward, one backward: the first stage keeps as many micro-batches as there are stages.
    assert transformer.memory(model, Degrees(pp=4), how, 0).kept == alone.kept
    assert transformer.memory(model, Degrees(dp=4, pp=4), how, 0).kept == alone.kept / 4


def test_less_is_kept_the_more_is_computed_again() -> None:
    model = named("8b", {})
    ways: list[Training] = [
        Training(1 << 16, kept="all", mlp_rows=None),
        Training(1 << 16, kept="all"),
        Training(1 << 16, kept="attention"),
        Training(1 << 16, kept="input"),
    ]
    held = [transformer.memory(model, Degrees(cp=8), way, 0).kept for way in ways]
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == len(held)
    on = hardware.gpus("h100")
    again = [
        transformer.step(model, Degrees(cp=8), way, on, cost(30.0), cost(100.0)).again
        for way in ways
    ]
    assert again == sorted(again)
    assert again[0] == 0
    assert again[3] - again[2] == pytest.approx(32 * 0.03)


def cost(ms: float, exposed: float = 0.0, inner: int = 0, outer: int = 0) -> Cost:
    return Cost(0, 0, 0, 0, ms, 1.0, ms / 1.1, ms * 1.1, exposed, inner, outer)


def test_messages_within_a_node_take_what_collectives_take() -> None:
    model, on = named("8b", {}), hardware.parse_fleet("h100:8")
    free = cost(0.0)

    def s(operation: collectives.Operation, ranks: int, size: float) -> float:
        return collectives.seconds(on, operation, ranks, size)

    sharing = transformer.step(model, Degrees(tp=8), Training(8192), on, free, free)
    stream = 8192 * model.hidden * 2
    # Gathered and reduced twice in each of three passes.
    each = 6 * (s("all_gather", 8, stream) + s("reduce_scatter", 8, stream))
    assert sharing.tensor == pytest.approx(model.layers * each)
    assert sharing.shards == 0
    # So few tokens hide no message: a layer's weights are gathered twice and reduced once.
    few = Training(8, 8, kept="all")
    sharded = transformer.step(model, Degrees(dp=8), few, on, free, free)
    weights = 2 * model.layer_parameters
    gathered = 2 * s("all_gather", 8, weights) + s("reduce_scatter", 8, weights)
    hidden = sharded.products + sharded.attention + sharded.again
    assert sharded.shards == pytest.approx(model.layers * gathered - hidden, rel=0.1)


def test_a_step_by_hand() -> None:
    """Two micro-batches on two stages of ranks without TP: compute, a bubble as long as one of
    them, waits of the ring as they come."""
    model, on = named("8b", {}), hardware.parse_fleet("h100:1x8")
    on = replace(on, hardware=on.hardware.model_copy(update={"tables": None}))
    degrees, how = Degrees(dp=1, cp=4, pp=2), Training(1 << 16, 2, kept="attention")
    time = transformer.step(model, degrees, how, on, cost(10, 1), cost(40, 4))
    assert time.attention == pytest.approx(2 * 16 * 0.036)
    assert time.ring == pytest.approx(2 * 16 * 0.004)
    assert time.tensor == 0
    rate = on.hardware.peak["bfloat16"] * on.hardware.products
    rows = (1 << 16) / 4
    matrices = rows * (16 * model.dense_flops + model.logits_flops) / rate
    assert 2 * 3 * matrices < time.products < 2 * 3 * matrices * 1.25  # and memory-bound parts
    stages = time.total - time.pipeline - time.optimizer
    assert time.pipeline == pytest.approx(stages / 2, rel=0.02)  # and three small transfers
    assert time.spread == pytest.approx(0.1)


def test_a_training_lies_on_the_nodes_of_its_fleet() -> None:
    text = "version: 1\nname: it\nkind: train\nring: {size: 8, device: cpu}\n"
    text += "problem: {seq_len: 4096, dtype: float32}\ntraining: {model: llama-tiny, steps: 1}\n"
    here = hardware.cpu(2)
    apart = replace(here, nodes=2, per_node=4)
    sent = []
    for on in (here, apart):
        cost = plan.build(spec.parse(text), on).trials[0].predicted
        sent.append(cost.outer_bytes)
    assert sent[0] == 0 < sent[1]


def test_a_training_is_slowed_by_its_own_ranks_only() -> None:
    """They share the cores of their node; places that stay empty do not."""
    model, degrees = named("llama-tiny", {}), Degrees(cp=8)
    how = Training(1 << 12, dtype="float32", fused=False)

    def products_s(per_node: int) -> float:
        on = replace(hardware.cpu(4), per_node=per_node)
        return transformer.step(model, degrees, how, on, cost(10), cost(40)).products

    assert products_s(16) > 1.5 * products_s(8) > 2 * products_s(4)
    text = "version: 1\nname: it\nkind: train\nring: {size: 8, device: cpu}\n"
    text += "problem: {seq_len: 4096, dtype: float32}\ntraining: {model: llama-tiny, steps: 1}\n"
    config = plan.build(spec.parse(text)).trials[0].config
    costs = [transformer.predict(config, replace(hardware.cpu(4), per_node=n)) for n in (8, 64)]
    assert costs[0] == costs[1]
