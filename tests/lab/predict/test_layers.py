"""Models whose layers differ: their attention on rings, memory and time of their steps, experts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringray.lab.cli import advise as command
from ringray.lab.plan import plan
from ringray.lab.predict import (
    advise,
    collectives,
    cost_model,
    hardware,
    layers,
    layouts,
    rank_memory,
    transformer,
)
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.layouts import TrainingRequest
from ringray.lab.predict.rank_memory import Training
from ringray.lab.specs import model as spec
from ringray.models.sizes import Attention, Kept, LayerGroup, Mlp, Model, Recurrence, named
from ringray.training.recipe import Degrees

FULL = Attention(16, 4, 128, 128)
BAND = replace(FULL, window=1023)
DENSE = Mlp(4096)
EXPERTS = Mlp(0, experts=32, active=4, expert_intermediate=1024)
STATE = Recurrence("delta", (2048, 2048, 4096), 4096, 8192, 4, 16 * 128 * 256, 8)
ON = hardware.parse_fleet("h100:2x8")


def model(*groups: LayerGroup, ahead: int = 0) -> Model:
    count = sum(group.count for group in groups)
    return Model("it", count, 2048, 16, 4, 128, 4096, 50000, mixed=groups, heads_ahead=ahead)


def cost(ms: float, exposed: float = 0.0) -> Cost:
    return Cost(0, 0, 0, 0, ms, 1.0, ms / 1.1, ms * 1.1, exposed, 0, 0)


def step(some: Model, degrees: Degrees, ms: float = 40.0, **how: object) -> transformer.StepTime:
    training = Training(1 << 16, 4, **{"kept": "all", "mlp_rows": None, **how})  # type: ignore[arg-type]
    return transformer.step(some, degrees, training, ON, cost(ms / 4), cost(ms))


def test_groups_of_one_kind_are_a_plain_model() -> None:
    plain = replace(model(LayerGroup(8, FULL, DENSE)), mixed=())
    parts = model(LayerGroup(3, FULL, DENSE), LayerGroup(5, FULL, DENSE))
    for degrees in (Degrees(2, 4), Degrees(1, 2, 2, 4)):
        for kept in ("all", "attention", "input"):
            expected = step(plain, degrees, kept=kept, mlp_rows=4096)
            assert step(parts, degrees, kept=kept, mlp_rows=4096).parts == pytest.approx(
                expected.parts
            )
            how = Training(1 << 16, 4, kept=kept)
            expected_bytes = rank_memory.memory(plain, degrees, how, 1e9).as_dict()
            got = rank_memory.memory(parts, degrees, how, 1e9).as_dict()
            assert got == pytest.approx(expected_bytes)


def test_each_kind_of_attention_has_its_own_ring() -> None:
    some = model(LayerGroup(6, BAND, DENSE), LayerGroup(2, FULL, DENSE))
    asked = TrainingRequest(some, ON, 1 << 17, 2)
    degrees = Degrees(2, 8)
    ring = asked.attention(degrees)
    assert ring.problem.window is None  # that with most FLOPs
    means = asked.cost(degrees, ring)
    full, band = (
        cost_model.predict(ring.changed(window=window), ON) for window in (None, BAND.window)
    )
    assert band.time_ms < full.time_ms / 10
    assert means.time_ms == pytest.approx((6 * band.time_ms + 2 * full.time_ms) / 8)
    assert means.peak_memory_bytes == max(full.peak_memory_bytes, band.peak_memory_bytes)
    wide = replace(FULL, head_dim=192)
    ((_, latent),) = layers.rings(model(LayerGroup(1, wide, DENSE)), ring, 2)
    assert (latent.problem.head_dim, latent.problem.value_dim, latent.problem.heads) == (
        192,
        128,
        8,
    )


def test_layers_that_do_not_attend_wait_for_no_ring() -> None:
    whole = step(model(LayerGroup(8, FULL, DENSE)), Degrees(1, 16))
    half = step(model(LayerGroup(4, FULL, DENSE), LayerGroup(4, STATE, DENSE)), Degrees(1, 16))
    assert half.attention == pytest.approx(whole.attention / 2)
    assert half.products > 0
    none = step(model(LayerGroup(8, STATE, DENSE)), Degrees(1, 16))
    assert none.attention == none.ring == 0
    # A state is computed from what its products make, of which more is kept.
    how = Training(1 << 16, kept="all", mlp_rows=None)
    less, greater = (
        rank_memory.memory(model(LayerGroup(1, some, DENSE)), Degrees(), how, 0).kept
        for some in (replace(STATE, channels=0), STATE)
    )
    assert greater - less == (1 << 16) * 8192 * 2


@pytest.mark.parametrize("kept", ["all", "attention", "input"])
@pytest.mark.parametrize(
    ("degrees", "micro_batch", "expected"),
    [
        # 16 x 128 x 256 elements in fp32 are 2 MiB, in 5 of 7 layers.
        (Degrees(1, 8), 1, 10 << 20),
        (Degrees(1, 8), 2, 20 << 20),  # one of each sequence
        (Degrees(1, 4, tp=2), 2, 10 << 20),  # TP divides the heads
        (Degrees(8, 1), 1, 0),  # a whole sequence begins without a state
    ],
)
def test_ranks_keep_the_states_that_others_hand_them(
    kept: Kept, degrees: Degrees, micro_batch: int, expected: int
) -> None:
    def memory(state: Recurrence) -> rank_memory.RankMemory:
        groups = (
            LayerGroup(3, state, DENSE),
            LayerGroup(2, FULL, DENSE, beside=state),
            LayerGroup(2, FULL, DENSE),
        )
        how = Training(1 << 16, 8, kept=kept, micro_batch=micro_batch)
        return rank_memory.memory(model(*groups), degrees, how, 0)

    # Large ones, beside which neither MLP nor loss needs more.
    several = [memory(replace(STATE, state=times * STATE.state)) for times in (0, 8, 9)]
    assert [of.kept - several[0].kept for of in several] == [0, 8 * expected, 9 * expected]
    # While a layer computes: a state of each 64 rows, and its gradient, in 2 bytes.
    chunks = micro_batch * (1 << 16) // degrees.cp // 64
    computing = 2 * 2 * chunks * STATE.state / degrees.tp
    assert several[2].working - several[1].working == pytest.approx(computing)


def test_heads_for_further_tokens_are_layers_and_logits() -> None:
    group = LayerGroup(8, FULL, DENSE)
    plain, ahead = model(group), model(group, ahead=2)
    longer = model(replace(group, count=10))
    degrees, how = Degrees(1, 16), Training(1 << 16, 4, kept="input")
    parts = [step(some, degrees) for some in (plain, ahead, longer)]
    assert parts[1].attention == pytest.approx(parts[2].attention)
    logits = 3 * 4 * 4096 * 2 * plain.hidden * plain.vocab / (ON.hardware.peak["bfloat16"] * 4)
    assert parts[1].products - parts[2].products > logits / 4
    memory = [rank_memory.memory(some, degrees, how, 0) for some in (plain, ahead, longer)]
    assert memory[1] == memory[2]
    assert memory[1].states > memory[0].states


def test_experts_are_dealt_and_their_tokens_sent() -> None:
    some = model(LayerGroup(8, FULL, EXPERTS))
    elements = 3 * 2048 * 1024 * 32
    how = Training(1 << 16, 4, kept="all", mlp_rows=None)
    memory = [rank_memory.memory(some, Degrees(2, 8, ep=ep), how, 0) for ep in (1, 4, 16)]
    assert memory[0].states == memory[1].states == memory[2].states
    assert memory[0].kept == memory[2].kept
    assert memory[0].gathered - memory[1].gathered == pytest.approx(6 * elements * 3 / 4)
    # Dealt among all ranks they lie whole on one.
    assert memory[1].gathered - memory[2].gathered == pytest.approx(6 * elements / 4)
    rows = (1 << 16) / 8
    for ep in (1, 8, 16):
        there = collectives.seconds(ON, "alltoall", ep, rows * 4 * 2048 * 2)
        assert step(some, Degrees(2, 8, ep=ep)).experts == pytest.approx(2 * 8 * 4 * there)
        again = step(some, Degrees(2, 8, ep=ep), kept="input").experts
        assert again == pytest.approx(3 * 8 * 4 * there)
    # Of 32 experts a token takes 4: as many FLOPs, with copies and smaller products.
    dense = step(model(LayerGroup(8, FULL, Mlp(4096))), Degrees(2, 8)).products
    assert dense < step(some, Degrees(2, 8)).products < 2 * dense


def test_experts_are_dealt_to_divisors() -> None:
    asked = TrainingRequest(
        named("qwen3-30b-a3b", {}), hardware.parse_fleet("h100:3x8"), 1 << 16, 6
    )
    assert asked.expert_ranks(Degrees(6, 4)) == [1, 2, 4, 8]
    assert replace(asked, fixed={"ep": 4}).expert_ranks(Degrees(6, 4)) == [4]
    ranked = advise.advise(asked, 3)
    for proposal in ranked:
        assert proposal.degrees.dp * proposal.degrees.cp % proposal.degrees.ep == 0
    assert len({(d := proposal.degrees).dp + d.cp * 10 + d.tp * 100 for proposal in ranked}) == len(
        ranked
    )
    fixed = advise.advise(replace(asked, fixed={"ep": 8}), 1)[0]
    assert fixed.degrees.ep == 8
    assert "EP 8" in str(fixed.degrees)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b", "qwen3-next-80b-a3b"])
def test_no_proposal_is_faster_than_its_bound(name: str) -> None:
    asked = TrainingRequest(named(name, {}), hardware.parse_fleet("b200:2x4"), 1 << 16, 8)
    for degrees in layouts.possible(asked):
        if proposal := advise._carried(asked, degrees):
            assert advise._bound(asked, degrees) <= proposal.time.total


def test_the_spec_has_the_attention_with_most_flops() -> None:
    latent = replace(FULL, kv_heads=16, head_dim=192, window=8191)
    asked = TrainingRequest(model(LayerGroup(8, latent, DENSE)), ON, 1 << 16, 2)
    text = command.spec(asked, advise.advise(asked, 1)[0])
    (trial, *_) = plan.build(spec.parse(text)).trials
    problem = trial.config.problem
    assert (problem.head_dim, problem.value_dim, problem.window) == (192, 128, 8191)
