"""Transformers: counts, memory of a rank against torch, times of a step by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ringray.lab.plan import plan
from ringray.lab.predict import collectives, hardware, rank_memory, transformer
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.rank_memory import Training
from ringray.lab.specs import model as spec
from ringray.models.decoder import Decoder
from ringray.models.sizes import Model, named
from ringray.training.recipe import Degrees

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
    per_layer = rank_memory.memory(model, Degrees(), how, 0).kept / model.layers
    assert per_layer == pytest.approx(saved_bytes(model, rows), rel=0.02)


def test_degrees_divide_memory() -> None:
    model, how = named("8b", {}), Training(1 << 16, 4)
    alone = rank_memory.memory(model, Degrees(), how, 0)
    assert alone.states == 16 * model.parameters
    assert alone.gathered == 0
    assert alone.kept == 32 * (1 << 16) * 4096 * 2
    for degrees in (Degrees(dp=4), Degrees(cp=4), Degrees(tp=4)):
        held = rank_memory.memory(model, degrees, how, 0)
        assert held.states == alone.states / 4
        assert held.kept == alone.kept / (1 if degrees.dp == 4 else 4)
    # One forward, one backward: the first stage keeps as many micro-batches as there are stages.
    assert rank_memory.memory(model, Degrees(pp=4), how, 0).kept == alone.kept
    assert rank_memory.memory(model, Degrees(dp=4, pp=4), how, 0).kept == alone.kept / 4


def test_less_is_kept_the_more_is_computed_again() -> None:
    model = named("8b", {})
    ways: list[Training] = [
        Training(1 << 16, kept="all", mlp_rows=None),
        Training(1 << 16, kept="all"),
        Training(1 << 16, kept="attention"),
        Training(1 << 16, kept="input"),
    ]
    held = [rank_memory.memory(model, Degrees(cp=8), way, 0).kept for way in ways]
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
    weights = 2 * model.groups[0].parameters(model.hidden)
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
    logits = 2 * model.hidden * model.vocab
    matrices = rows * ((model.token_flops - logits) / 2 + logits) / rate  # of half the layers
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
