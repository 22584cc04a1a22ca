"""Memory of the rank that holds most in a step of training a transformer.

Weights, gradients and optimizer are sharded over DP x CP (FSDP) and gathered a layer at a time,
the residual stream is sharded over TP (sequence parallel), and stages of PP keep activations of the
micro-batches that are under way. What attention needs comes from ``cost_model``.

    model.layers x [norm, Q K V, attention, product, norm, MLP], norm, logits, loss
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from ringray.base import units
from ringray.lab.predict import layers
from ringray.lab.predict.hardware import Fleet
from ringray.models.sizes import Kept, LayerGroup, Mlp, Model, Scores
from ringray.traffic.walk import FP32
from ringray.training.recipe import Degrees
from ringray_kernels.dtypes import DTYPES

STATE_BYTES = 16  # of a parameter: weight and gradient in 2 bytes, or 4; Adam in 12, or 8
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

    @property
    def largest(self) -> str:
        """Returns the name of the largest part."""
        return max(vars(self), key=vars(self).__getitem__)

    def __str__(self) -> str:
        return ", ".join(f"{name} {units.memory(held)}" for name, held in vars(self).items())

    def as_dict(self) -> dict[str, float]:
        """Returns the bytes by name, the total last."""
        return {**vars(self), "total": self.total}


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
    first_states = 0.0
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
        # Each sequence's state at the rank's first row comes from the rank before. The backward
        # pass starts from it, whatever else is computed again.
        first_states += micro * state.state / tp * FP32 * (degrees.cp > 1)
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
    in_mlp = attended + 3 * stream + at_once * of_mlp * 1.75  # gradients of all but one of four
    held += first_states
    return held, first_states + whole + max(in_mlp, 5 * stream + computing)
