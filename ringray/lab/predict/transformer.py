"""Transformers around the attention: time of a step, beside ``rank_memory``.

Attention itself comes from ``cost_model``. Degrees: DP x CP x TP x PP, the ranks of TP next to each
other, then those of CP, PP and DP. Weights, gradients and optimizer are sharded over DP x CP
(FSDP) and gathered a layer at a time, the residual stream is sharded over TP (sequence parallel),
and stages run one forward, one backward. Imports numpy only.

    model.layers x [norm, Q K V, attention, product, norm, MLP], norm, logits, loss

Layers may differ (``Model.groups``); times are those of the mean layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from ringray.lab.predict import (
    collectives,
    cost_model,
    layers,
    products,
    rank_memory,
    rates,
    ring_time,
)
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.hardware import Fleet
from ringray.lab.predict.rank_memory import Training
from ringray.lab.trial import training
from ringray.lab.trial.config import TrialConfig, default_config
from ringray.models.sizes import LayerGroup, Model, Product
from ringray.training.recipe import Degrees

OPTIMIZER_BYTES = 28  # moved per parameter by a step of Adam: seven numbers in fp32


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
    alike = {item.name for item in fields(Training)} & vars(recipe).keys()
    options: dict[str, Any] = {name: getattr(recipe, name) for name in alike}
    # A pool joins sequences into one.
    options |= {"context": recipe.seq_len * recipe.pool, "threads": config.ring.threads}
    options |= {"sequences": recipe.sequences // recipe.pool, "exchanged": exchanged(ring)}
    how = Training(**options, fused=not on.shares_cores)
    time = step(model, degrees, how, on, forward, both)
    held = rank_memory.memory(model, degrees, how, both.peak_memory_bytes)
    calls = sum(layers.attentions(model).values()) * how.sequences // how.micro_batch * degrees.tp

    def in_all(name: str) -> int:
        again = getattr(forward, name) * (recipe.kept == "input")
        return int(calls * (getattr(both, name) + again))

    return Cost(
        flops=3 * recipe.sequences * model.forward_flops(recipe.seq_len),
        peak_memory_bytes=int(held.total),
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
    return default_config(ring).exchange.fold > 1


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of training, by what the slowest rank does. ``products``: dense products,
    states and what is memory-bound beside them. ``attention``. ``again``: computed again. ``ring``,
    ``tensor``, ``experts``, ``shards``: waiting for messages of CP, TP, EP and FSDP. ``pipeline``:
    waiting for other stages. ``offload``: waiting for copies of layers' inputs. ``optimizer``.
    ``spread``: relative half width of the 80% interval."""

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
    of_vocabulary = [(1 + model.heads_ahead, rows, Product(model.hidden, model.vocab, "n"))]
    logits = 3 * _multiplied_s(of_vocabulary, degrees, how, on)
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
        called += [(here, share, product) for product in mlp.expert_products(model.hidden)]
    rate = rates.peak(on.hardware, how.dtype) * on.hardware.products * _share(on, how.threads)
    states = sum(state.flops for state in group.recurrences) / rate
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
