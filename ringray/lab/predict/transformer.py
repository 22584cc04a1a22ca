"""Transformers around the attention: parameters, FLOPs, memory of a rank and time of a step.

Attention itself comes from ``cost_model``. Degrees: DP x CP x TP x PP, the ranks of TP next to each
other, then those of CP, PP and DP. Weights, gradients and optimizer are sharded over DP x CP
(FSDP) and gathered a layer at a time, the residual stream is sharded over TP (sequence parallel),
and stages run one forward, one backward. Imports numpy
only.

    model.layers x [norm, Q K V, attention, product, norm, MLP], norm, logits, loss

Layers may differ (``Model.groups``); times are those of the mean layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import get_args

from ringray import transport as transports
from ringray.base import units
from ringray.lab.predict import collectives, cost_model, layers, products, rates, ring_time
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.hardware import Fleet
from ringray.lab.trial import training
from ringray.lab.trial.config import TrialConfig, default_config
from ringray.models.sizes import Kept, LayerGroup, Mlp, Model, Product, Scores
from ringray.traffic.walk import FP32
from ringray.training.recipe import Degrees
from ringray_kernels.dtypes import DTYPES

STATE_BYTES = 16  # of a parameter: weight and gradient in 2 bytes, or 4; Adam in 12, or 8
OPTIMIZER_BYTES = 28  # moved per parameter by a step of Adam: seven numbers in fp32
KEPT: tuple[Kept, ...] = get_args(Kept)
SCORES_HELD = 4  # matrices of scores in a backward pass: weights, their gradient, both of scores


@dataclass(frozen=True)
class Training:
    """The training to predict. ``context``: tokens of a sequence; ``sequences``: of a step,
    ``micro_batch`` of which a replica computes at once.

    ``mlp_rows``, ``loss_rows``: rows of MLP and logits at once; None: all. ``scores``: whole where
    attention keeps the matrix of its scores. ``state_bytes``: of a parameter's weight, gradient
    and optimizer. ``threads``: of a rank. ``fused``: norms are, as on GPUs. ``exchanged``: ranks
    exchange heads for rows, of which kept attention keeps what it received. ``offload``: inputs of
    layers leave the device until their backward pass.
    """

    context: int
    sequences: int = 1
    dtype: str = "bfloat16"
    kept: Kept = "input"
    mlp_rows: int | None = 4096
    loss_rows: int | None = 2048
    scores: Scores = "blockwise"
    state_bytes: int = STATE_BYTES
    micro_batch: int = 1
    threads: int = 1
    fused: bool = True
    exchanged: bool = False
    offload: bool = False

    @property
    def tokens(self) -> int:
        """Returns the tokens of a step."""
        return self.context * self.sequences

    @property
    def itemsize(self) -> int:
        """Returns bytes of an element of activations."""
        return DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank that holds most. ``states``: weights, gradients and optimizer, in shards.
    ``gathered``: whole weights and gradients of layers. ``kept``: activations that layers keep.
    ``working``: of the layer, or the loss, that computes, the ring's buffers included."""

    states: float
    gathered: float
    kept: float
    working: float

    @property
    def total(self) -> float:
        """Returns the bytes of all together."""
        return self.states + self.gathered + self.kept + self.working

    def as_dict(self) -> dict[str, float]:
        """Returns the bytes by name, the total last."""
        return {**vars(self), "total": self.total}


def predict(config: TrialConfig, on: Fleet) -> Cost:
    """Returns the cost of one step of a training: FLOPs of the model's visible pairs, bytes and
    messages of its rings, and ``memory`` and ``step``."""
    model, degrees, recipe = training.from_config(config)
    if on.shares_cores:
        on = replace(on, per_node=min(on.per_node, config.ring.size))
    ring = training.ring_config(config, degrees)
    there = around(on, degrees)

    def of_layer(direction: str) -> Cost:
        some = layers.rings(model, ring.changed(direction=direction), degrees.tp)
        return layers.mean_cost((count, cost_model.predict(kind, there)) for count, kind in some)

    both, forward = of_layer("forward+backward"), of_layer("forward")
    how = Training(
        recipe.seq_len * recipe.pool,
        recipe.sequences // recipe.pool,
        recipe.dtype,
        recipe.kept,
        recipe.mlp_rows,
        recipe.loss_rows,
        recipe.scores,
        micro_batch=recipe.micro_batch,
        threads=config.ring.threads,
        offload=recipe.offload,
    )
    how = replace(how, fused=not on.shares_cores, exchanged=exchanged(ring))
    time = step(model, degrees, how, on, forward, both)
    calls = sum(layers.attentions(model).values()) * how.sequences // how.micro_batch * degrees.tp

    def in_all(name: str) -> int:
        again = getattr(forward, name) * (recipe.kept == "input")
        return int(calls * (getattr(both, name) + again))

    return Cost(
        flops=3 * recipe.sequences * model.forward_flops(recipe.seq_len),
        peak_memory_bytes=int(memory(model, degrees, how, both.peak_memory_bytes).total),
        **cost_model.times(time.total, time.spread),
        exposed_ms=1e3 * (time.ring + time.tensor + time.shards + time.pipeline),
        balance=both.balance,
        **{name: in_all(name) for name in ("sent_bytes", "messages", "inner_bytes", "outer_bytes")},
    )


def around(on: Fleet, degrees: Degrees) -> Fleet:
    """Returns ``on`` as one ring sees it: of every ``tp``-th rank, beside those of other replicas
    and stages on its nodes."""
    rings = max(1, on.per_node // (degrees.cp * degrees.tp)) if on.shares_cores else 1
    return replace(on, stride=on.stride * degrees.tp, rings=rings)


def exchanged(ring: TrialConfig) -> bool:
    """Returns whether the ranks of a ring exchange heads for rows."""
    transport = default_config(ring).strategy.transport
    return (
        transports.plan(transport, ring.ring.size, ring.problem.heads, ring.problem.kv_heads).fold
        > 1
    )


def memory(model: Model, degrees: Degrees, how: Training, attention_bytes: float) -> RankMemory:
    """Returns the memory of a rank; ``attention_bytes``: peak of both passes of one attention with
    blockwise scores, its inputs and gradients included, the largest of all layers."""
    size, tp, shards, hidden = how.itemsize, degrees.tp, degrees.dp * degrees.cp, model.hidden
    rows, groups = -(-how.context // degrees.cp) * how.micro_batch, layers.every(model)
    under_way = _under_way(degrees, how)
    outer = model.outer_parameters // (1 if degrees.pp == 1 or model.tied else 2)
    of_layers = sum(group.count * group.parameters(hidden) for group in groups)
    states = how.state_bytes * (of_layers / degrees.pp + outer) / (tp * shards)
    # Weights of this layer and of the next, and this one's gradients.
    gathered = 3 * size * max(_gathered(group, hidden, degrees) for group in groups) / tp

    kept_bytes = working = 0.0
    for group in groups:
        held, computing = _activations(group, model, degrees, how, rows, attention_bytes)
        kept_bytes += group.count * held
        working = max(working, computing - held)
    stream = rows * hidden / tp * size
    at_once = min(rows, how.loss_rows or rows)
    logits = at_once * model.vocab / tp * (size + 2 * FP32)  # logits, softmax, gradient
    loss = 3 * stream + logits + 2 * size * model.vocab * hidden / tp * (shards > 1)
    kept_bytes *= under_way
    if how.offload:  # but for the layer that computes and the next, none of which the loss meets
        here = min(2 * stream, away := away_bytes(model, degrees, how))
        kept_bytes, loss = kept_bytes - away + here, loss - here
    return RankMemory(states, gathered, kept_bytes, max(working, loss))


def away_bytes(model: Model, degrees: Degrees, how: Training) -> float:
    """Returns the bytes of a rank's inputs of layers, which wait elsewhere with ``offload``."""
    rows = -(-how.context // degrees.cp) * how.micro_batch
    number = sum(group.count for group in layers.every(model)) * _under_way(degrees, how)
    return number * rows * model.hidden / degrees.tp * how.itemsize


def host_bytes(model: Model, degrees: Degrees, how: Training, on: Fleet) -> float:
    """Returns the bytes of a host in which a rank's inputs of layers wait: on GPUs in pinned blocks
    of PyTorch, whose bytes are a power of two."""
    away = away_bytes(model, degrees, how)
    if on.shares_cores:
        return away
    each = -(-how.context // degrees.cp) * how.micro_batch * model.hidden / degrees.tp
    block = 1 << (math.ceil(each * how.itemsize) - 1).bit_length()
    return away / (each * how.itemsize) * block


def waiting(model: Model, degrees: Degrees, how: Training, on: Fleet) -> list[str]:
    """Returns where inputs of layers wait, as sentences: one if they leave the device."""
    if not how.offload:
        return []
    away, node = on.per_node * host_bytes(model, degrees, how, on), on.hardware.host_memory
    amount = f"of {units.memory(node)}" if node else "of an unknown amount"
    rate = f"{units.digits(on.hardware.host / 1e9)} GB/s a rank, behind its layers"
    return [f"inputs of layers wait in {units.memory(away)} of a node's memory, {amount}; {rate}"]


def _under_way(degrees: Degrees, how: Training) -> float:
    """Returns the share of the layers of a model whose activations a rank keeps, by micro-batch."""
    return min(how.sequences // degrees.dp // how.micro_batch, degrees.pp) / degrees.pp


def _gathered(group: LayerGroup, hidden: int, degrees: Degrees) -> float:
    """Returns the parameters of a layer that are gathered before it computes: all but those of
    experts that lie whole on a rank, or on others."""
    shards, experts = degrees.dp * degrees.cp, group.expert_parameters(hidden)
    dense = (group.parameters(hidden) - experts) * (shards > 1)
    return dense + experts / degrees.ep * (shards > degrees.ep)


def _activations(
    group: LayerGroup, model: Model, degrees: Degrees, how: Training, rows: int, attending: float
) -> tuple[float, float]:
    """Returns bytes that a layer keeps, and those while it computes; ``attending``: of its
    attention."""
    size, tp, micro, mlp = how.itemsize, degrees.tp, how.micro_batch, group.mlp or Mlp(0)
    stream = rows * model.hidden / tp * size  # one tensor of the residual stream
    feature = rows / tp * size
    attended, out, lse, received, scores, computing = 3 * stream, 0.0, 0.0, 0.0, 0.0, 0.0
    if of := group.attention:
        queries, out = feature * of.heads * of.head_dim, feature * of.heads * of.value_dim
        keys = feature * of.kv_heads * (of.head_dim + of.value_dim)
        lse = rows * of.heads / tp * FP32
        # Input, norm, sum; Q, out; K and V; ranks of MLA; a gate and what comes through it.
        between = rows * of.latent_width * size + 2 * out * of.gated
        attended += queries + out + keys + lse + between
        received = queries + keys + out + lse
        scores = rows**2 / micro * of.heads / tp * size * (how.scores == "whole")
        computing = attending + SCORES_HELD * scores
    for state in group.recurrences:
        attended += feature * state.width
        # Gradients of all that it keeps; each chunk's state, and its gradient.
        computing += 2 * feature * (state.width + state.state / layers.CHUNK)
    # Of a row, kept: the MLP's features; the copies for experts, what these return, their scores.
    of_mlp = (4 if mlp.gated else 2) * mlp.width / tp * size
    of_mlp += 2 * mlp.active * model.hidden * size + mlp.experts / tp * FP32
    whole_mlp = rows * of_mlp if how.mlp_rows is None else 0
    held = {
        # Also the result by rows instead of by heads, and each norm's before its weight.
        "all": attended + out + (1 if how.fused else 3) * stream + scores + whole_mlp,
        "attention": stream + out + lse + how.exchanged * received,
        "input": stream,
    }[how.kept]
    whole = rows * model.hidden * size * (tp > 1)  # a norm's result, gathered for the products
    at_once = min(rows, (how.mlp_rows or rows) * micro)
    in_mlp = (
        attended + 3 * stream + at_once * of_mlp * 1.75
    )  # with gradients of all but one of four
    return held, whole + max(in_mlp, 5 * stream + computing)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of training, by what the slowest rank does. ``products``: dense products,
    states and what is memory-bound beside them. ``attention``. ``again``: computed again. ``ring``,
    ``tensor``, ``experts``, ``shards``: waiting for messages of CP, TP, EP and FSDP. ``pipeline``:
    waiting for other stages. ``offload``: waiting for copies of layers' inputs. ``optimizer``.
    ``spread``: relative half width of the 80%
    interval."""

    products: float
    attention: float
    again: float
    ring: float
    tensor: float
    experts: float
    shards: float
    pipeline: float
    offload: float
    optimizer: float
    spread: float

    @property
    def parts(self) -> dict[str, float]:
        """Returns the seconds by name, which add up to the step."""
        return {name: value for name, value in vars(self).items() if name != "spread"}

    @property
    def total(self) -> float:
        """Returns seconds of the step."""
        return sum(self.parts.values())


def step(
    model: Model, degrees: Degrees, how: Training, on: Fleet, forward: Cost, both: Cost
) -> StepTime:
    """Returns the time of a step; ``forward``, ``both``: of one attention on its ring, in the mean
    of the layers that attend."""
    micros = how.sequences // degrees.dp // how.micro_batch
    groups, tp, hardware = layers.every(model), degrees.tp, on.hardware
    number = sum(group.count for group in groups)
    rows = -(-how.context // degrees.cp) * how.micro_batch

    def in_mean(value_of: Callable[[LayerGroup], float]) -> float:
        return sum(group.count * value_of(group) for group in groups) / number

    attends = in_mean(lambda group: group.attention is not None)
    dense = in_mean(lambda group: _dense_s(group, model, degrees, how, on, rows))
    computing = attends * (both.time_ms - both.exposed_ms) / 1e3
    waiting = attends * both.exposed_ms / 1e3
    again = 0.0
    if how.kept != "all":
        again = dense
    elif how.mlp_rows is not None:

        def mlp_s(group: LayerGroup) -> float:
            mlp = replace(group, mixer=None, beside=None).active_matrices(model.hidden)
            share = mlp / group.active_matrices(model.hidden)
            return share * _dense_s(group, model, degrees, how, on, rows)

        again = in_mean(mlp_s)
    if how.kept == "input":
        again += attends * (forward.time_ms - forward.exposed_ms) / 1e3
        waiting += attends * forward.exposed_ms / 1e3
    passes = 2 if how.kept == "all" else 3
    stream = rows * model.hidden * how.itemsize  # bytes
    inner, outer = hardware.inner.bandwidth, outer_bandwidth(on)
    # Two gathers and two reductions of the residual stream a pass.
    tensor = passes * 2 * _gathered_s(on, tp, stream, gathers=1)
    # Rows go to their experts and come back, in a pass.
    copies = in_mean(lambda group: group.mlp.active if group.mlp else 0)
    among = replace(on, stride=on.stride * tp)
    there = collectives.seconds(among, "alltoall", degrees.ep, copies * stream / tp)
    routed = (passes + (how.kept == "all" and how.mlp_rows is not None)) * 2 * there
    busy = 3 * dense + computing + again + waiting + tensor + routed
    near, far = _sharded(model, degrees, how, on)
    ring = [attends * sent / degrees.cp for sent in (both.inner_bytes, both.outer_bytes)]
    shards = max(busy, near + ring[0] / inner + tensor, far + ring[1] / outer) - busy
    logits = (
        3
        * (1 + model.heads_ahead)
        * _multiplied_s([(1, rows, Product(model.hidden, model.vocab, "n"))], degrees, how, on)
    )
    # Copies hide behind a layer, of which the forward is a part; but the first of a backward pass.
    copied = how.offload * stream / tp / hardware.host
    ahead = dense + attends * forward.time_ms / 1e3
    exposed = max(0.0, copied - ahead) + max(0.0, copied - (busy - ahead))
    stage = number / degrees.pp * (busy + shards + exposed) + logits + copied
    hop = 0.0
    if degrees.pp > 1:
        hop = stream / tp / (outer if degrees.pp * degrees.cp * tp > on.per_node else inner)
    each = number / degrees.pp * micros
    parameters = sum(group.count * group.parameters(model.hidden) for group in groups)
    moved = OPTIMIZER_BYTES * (parameters + model.outer_parameters) / degrees.ranks
    return StepTime(
        products=each * 3 * dense + micros * logits,
        attention=each * computing,
        again=each * again,
        ring=each * waiting,
        tensor=each * tensor,
        experts=each * routed,
        shards=each * shards,
        pipeline=(degrees.pp - 1) * stage + 2 * hop * (micros + degrees.pp - 1),
        offload=each * exposed + micros * copied,
        optimizer=moved / hardware.memory_bandwidth,
        spread=both.high_ms / both.time_ms - 1 if both.time_ms else hardware.spread,
    )


def _dense_s(
    group: LayerGroup, model: Model, degrees: Degrees, how: Training, on: Fleet, rows: int
) -> float:
    """Returns seconds of one layer but its attention, forward: products, states, and what is
    memory-bound beside them."""
    called = [(1, rows, product) for product in group.products(model.hidden)]
    if group.mlp and group.mlp.experts:
        mlp, ep = group.mlp, degrees.ep
        # Each expert of a rank has its share of the rows of all ranks among which they are dealt.
        here, share = mlp.experts // ep, -(-rows * ep * mlp.active // mlp.experts)
        called += [(here, share, product) for product in group.expert_products(model.hidden)]
    states = sum(state.flops for state in group.recurrences) / _rate(on, how.dtype, how.threads)
    beside = layers.touched(group, model.hidden) * how.itemsize / on.hardware.memory_bandwidth
    return _multiplied_s(called, degrees, how, on) + rows / degrees.tp * (states + beside)


def _multiplied_s(
    called: Iterable[tuple[int, int, Product]], degrees: Degrees, how: Training, on: Fleet
) -> float:
    """Returns seconds of products on a rank, each so many times and of so many rows. TP divides a
    side of the matrix, or else the rows."""
    total, tp = 0.0, degrees.tp
    for times, rows, (k, n, split) in called:
        shape = {"m": rows, "k": k, "n": n}
        shape[split or "m"] = -(-shape[split or "m"] // tp)
        total += times * products.seconds(on.hardware, how.dtype, **shape)
    return total / _share(on, how.threads)


def _rate(on: Fleet, dtype: str, threads: int) -> float:
    """Returns FLOP/s of dense products of one rank."""
    return rates.peak(on.hardware, dtype) * on.hardware.products * _share(on, threads)


def _share(on: Fleet, threads: int) -> float:
    """Returns the rate of a rank beside the others of its node over that of one thread alone."""
    hardware = on.hardware
    if hardware.cores is None:
        return 1.0
    shared = min(1.0, hardware.cores / (on.per_node * min(threads, hardware.cores)))
    return ring_time.speedup(on, threads, on.per_node) * shared


def outer_bandwidth(on: Fleet) -> float:
    """Returns bytes/s of a rank between nodes, while all ranks of its node send."""
    return on.hardware.outer.bandwidth / min(on.hardware.outer.ranks, on.per_node)


def _sharded(model: Model, degrees: Degrees, how: Training, on: Fleet) -> tuple[float, float]:
    """Returns seconds in which the links within a node and between nodes carry the weights of a
    layer, in the mean: gathered twice and reduced once over DP x CP, those of experts over every
    ``ep``-th rank of it."""
    ranks, hidden, groups = degrees.dp * degrees.cp, model.hidden, layers.every(model)
    stages = max(1, min(degrees.pp, on.per_node // (degrees.tp * degrees.cp)))
    near = min(ranks, max(1, on.per_node // (degrees.tp * stages)))  # on one node
    number = sum(group.count for group in groups)
    experts = sum(group.count * group.expert_parameters(hidden) for group in groups)
    dense = sum(group.count * group.parameters(hidden) for group in groups) - experts
    within = between = 0.0
    for elements, every in ((dense, 1), (experts / degrees.ep, degrees.ep)):
        size = how.itemsize * elements / number / degrees.tp
        shards, together = ranks // every, max(1, near // every)
        there = replace(on, stride=on.stride * degrees.tp * every)
        within += _gathered_s(there, together, size, gathers=2)
        if shards > together:
            between += 3 * size * (1 - together / shards) / together / outer_bandwidth(on)
    return within, between


def _gathered_s(on: Fleet, ranks: int, size: float, gathers: int) -> float:
    """Returns seconds of some gathers of ``size`` bytes and of one reduction."""
    reducing = collectives.seconds(on, "reduce_scatter", ranks, size)
    return gathers * collectives.seconds(on, "all_gather", ranks, size) + reducing
