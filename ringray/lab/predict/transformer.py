"""Transformers around the attention: parameters, FLOPs, memory of a rank and time of a step.

Attention itself comes from ``cost_model``. Degrees: DP x CP x TP x PP, the ranks of TP next to each
other, then those of CP, PP and DP. Weights, gradients and optimizer are sharded over DP x CP
(FSDP) and gathered a layer at a time, the residual stream is sharded over TP (sequence parallel),
and stages run one forward, one backward. Imports numpy
only.

    model.layers x [norm, Q K V, attention, product, norm, MLP], norm, logits, loss
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

from ringray import transport as transports
from ringray.lab.predict import cost_model, rates, ring_time
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.hardware import Fleet
from ringray.lab.trial import training
from ringray.lab.trial.config import TrialConfig, default_config
from ringray.models.sizes import Kept, Model, Scores
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
    exchange heads for rows, of which kept attention keeps what it received.
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
    both = cost_model.predict(ring, there)
    forward = cost_model.predict(ring.changed(direction="forward"), there)
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
    )
    how = replace(how, fused=not on.shares_cores, exchanged=exchanged(ring))
    time = step(model, degrees, how, on, forward, both)
    calls = model.layers * how.sequences // how.micro_batch * degrees.tp

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
    blockwise scores, its inputs and gradients included."""
    size, tp, shards = how.itemsize, degrees.tp, degrees.dp * degrees.cp
    micro, layers = how.micro_batch, model.layers // degrees.pp
    rows = -(-how.context // degrees.cp) * micro
    under_way = min(how.sequences // degrees.dp // micro, degrees.pp) * layers
    outer = model.outer_parameters // (1 if degrees.pp == 1 or model.tied else 2)
    states = how.state_bytes * (layers * model.layer_parameters + outer) / (tp * shards)
    # Weights of this layer and of the next, and this one's gradients.
    gathered = 3 * size * model.layer_parameters / tp * (shards > 1)

    stream = rows * model.hidden / tp * size  # one tensor of the residual stream
    heads = rows * model.head_dim / tp * size
    queries, keys = heads * model.heads, 2 * heads * model.kv_heads  # Q or out; K and V
    lse = rows * model.heads / tp * FP32
    scores = rows**2 / micro * model.heads / tp * size * (how.scores == "whole")
    of_mlp = (4 if model.gated else 2) * model.intermediate / tp * size  # a row, kept
    whole_mlp = rows * of_mlp if how.mlp_rows is None else 0
    attended = 3 * stream + 2 * queries + keys + lse  # input, norm, sum; Q, out; K and V
    kept_bytes = {
        # Also the result by rows instead of by heads, and each norm's before its weight.
        "all": attended + queries + (1 if how.fused else 3) * stream + scores + whole_mlp,
        "attention": stream + queries + lse + how.exchanged * (2 * queries + keys + lse),
        "input": stream,
    }[how.kept]

    whole = rows * model.hidden * size * (tp > 1)  # a norm's result, gathered for the products
    at_once = min(rows, (how.mlp_rows or rows) * micro)
    mlp = attended + 3 * stream + at_once * of_mlp * 1.75  # with gradients of all but one of four
    attention = 5 * stream + attention_bytes + SCORES_HELD * scores
    at_once = min(rows, how.loss_rows or rows)
    logits = at_once * model.vocab / tp * (size + 2 * FP32)  # logits, softmax, gradient
    loss = 3 * stream + logits + 2 * size * model.vocab * model.hidden / tp * (shards > 1)
    working = max(whole + max(mlp, attention) - kept_bytes, loss)
    return RankMemory(states, gathered, kept_bytes * under_way, working)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of training, by what the slowest rank does. ``products``: dense products
    and what is memory-bound beside them. ``attention``. ``again``: computed again. ``ring``,
    ``tensor``, ``shards``: waiting for messages of CP, TP and FSDP. ``pipeline``: waiting for
    other stages. ``optimizer``. ``spread``: relative half width of the 80% interval."""

    products: float
    attention: float
    again: float
    ring: float
    tensor: float
    shards: float
    pipeline: float
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
    """Returns the time of a step; ``forward``, ``both``: of one attention, of its ring."""
    micros = how.sequences // degrees.dp // how.micro_batch
    layers, tp, hardware = model.layers // degrees.pp, degrees.tp, on.hardware
    rows = -(-how.context // degrees.cp) * how.micro_batch
    rate = _rate(on, how.dtype, how.threads)
    dense = rows / tp * model.dense_flops / rate
    dense += rows / tp * _touched(model) * how.itemsize / hardware.memory_bandwidth
    computing = (both.time_ms - both.exposed_ms) / 1e3
    waiting = both.exposed_ms / 1e3
    again = 0.0
    if how.kept != "all":
        again = dense
    elif how.mlp_rows is not None:
        again = dense * model.intermediate * (2 + model.gated) * model.hidden / model.matrices
    if how.kept == "input":
        again += (forward.time_ms - forward.exposed_ms) / 1e3
        waiting += forward.exposed_ms / 1e3
    passes = 2 if how.kept == "all" else 3
    stream = rows * model.hidden * how.itemsize  # bytes
    inner, outer = hardware.inner.bandwidth, outer_bandwidth(on)
    # Two gathers and two reductions of the residual stream a pass.
    tensor = passes * 4 * (stream * (tp - 1) / tp / inner + hardware.inner.latency * (tp > 1))
    busy = 3 * dense + computing + again + waiting + tensor
    weights = 3 * how.itemsize * model.layer_parameters / tp  # gathered twice, reduced once
    near, far = _sharded(weights, degrees, on)
    ring = [sent / degrees.cp for sent in (both.inner_bytes, both.outer_bytes)]
    shards = max(busy, near + ring[0] / inner + tensor, far + ring[1] / outer) - busy
    logits = 3 * rows / tp * model.logits_flops / rate
    stage = layers * (busy + shards) + logits
    hop = 0.0
    if degrees.pp > 1:
        hop = stream / tp / (outer if degrees.pp * degrees.cp * tp > on.per_node else inner)
    each = layers * micros
    return StepTime(
        products=each * 3 * dense + micros * logits,
        attention=each * computing,
        again=each * again,
        ring=each * waiting,
        tensor=each * tensor,
        shards=each * shards,
        pipeline=(degrees.pp - 1) * stage + 2 * hop * (micros + degrees.pp - 1),
        optimizer=model.parameters / degrees.ranks * OPTIMIZER_BYTES / hardware.memory_bandwidth,
        spread=both.high_ms / both.time_ms - 1,
    )


def _rate(on: Fleet, dtype: str, threads: int) -> float:
    """Returns FLOP/s of dense products of one rank."""
    hardware = on.hardware
    flops = rates.peak(hardware, dtype) * hardware.products
    if hardware.cores is None:
        return flops
    shared = min(1.0, hardware.cores / (on.per_node * min(threads, hardware.cores)))
    return flops * ring_time.speedup(on, threads, on.per_node) * shared


def outer_bandwidth(on: Fleet) -> float:
    """Returns bytes/s of a rank between nodes, while all ranks of its node send."""
    return on.hardware.outer.bandwidth / min(on.hardware.outer.ranks, on.per_node)


def _touched(model: Model) -> float:
    """Returns elements per token that a layer reads and writes beside its products, forward: two
    norms, two sums, rotation of Q and K, and the MLP's activation."""
    rotated = 2 * (model.heads + model.kv_heads) * model.head_dim
    return 10 * model.hidden + rotated + (2 + model.gated) * model.intermediate


def _sharded(moved: float, degrees: Degrees, on: Fleet) -> tuple[float, float]:
    """Returns seconds in which the links within a node and between nodes carry ``moved`` bytes of
    gathers and reductions over DP x CP."""
    shards = degrees.dp * degrees.cp
    if shards == 1:
        return 0.0, 0.0
    stages = max(1, min(degrees.pp, on.per_node // (degrees.tp * degrees.cp)))
    together = min(shards, max(1, on.per_node // (degrees.tp * stages)))  # on one node
    within = moved * (1 - 1 / shards) / on.hardware.inner.bandwidth * (together > 1)
    between = moved * (1 - together / shards) / together / outer_bandwidth(on)
    return within, between
