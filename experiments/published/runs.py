"""Trainings that others measured: seconds, memory and order, published and predicted.

    python experiments/published/runs.py

Attention is predicted as these systems compute it (``theirs``), products and links by the entry of
the hardware, operations of PyTorch by the bytes that they move, memory by the tensors that are
alive. Facts, sources and assumptions stand in ``runs.yaml``; nothing is set by a figure of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import theirs
import yaml

from ringray.lab.predict import hardware, products, rank_memory, transformer
from ringray.lab.predict.hardware import Direction, Hardware
from ringray.lab.predict.layouts import TrainingRequest
from ringray.lab.predict.rank_memory import Training
from ringray.models.layers import LayerGroup, Model, Product
from ringray.models.sizes import named
from ringray.training.recipe import Degrees

FACTS = Path(__file__).with_name("runs.yaml")
DTYPE, FP32 = "bfloat16", "float32"
PASSES = 4  # of products and operations: forward, again, and twice as much backward
LENGTHS = {1 << 20: "1M", 1 << 21: "2M", 1 << 22: "4M"}


class Widths(NamedTuple):
    """Features of a token in a layer: of the residual stream, of Q, of K, inside the MLP, and of
    all its experts' inputs and insides."""

    stream: int
    queries: int
    keys: int
    inside: int
    routed: int
    expert: int

    @classmethod
    def of(cls, model: Model, group: LayerGroup) -> Widths:
        """Returns the widths of a layer of full attention and an MLP."""
        attention, mlp = group.attention, group.mlp
        assert attention
        assert mlp
        return cls(
            model.hidden,
            attention.heads * attention.head_dim,
            attention.kv_heads * attention.head_dim,
            mlp.intermediate + mlp.shared_intermediate,
            mlp.active * model.hidden,
            mlp.active * mlp.expert_intermediate,
        )

    @property
    def saved(self) -> int:
        """Returns bytes of a row that a layer of transformers 5.23 (models/qwen3) keeps for its
        backward pass, as it is computed again: its input; of each norm the fp32 input, the
        normalized and the result; rotated Q and K, V; the output by heads and by rows; of the MLP
        gate, its activation, up and their product; of experts also their inputs and outputs."""
        norms, rotated, output = 2 * 8 * self.stream, 2 * (self.queries + self.keys), 4
        of_heads = 6 * (self.queries + self.keys) + 2 * self.keys + output * self.queries
        of_experts = 4 * self.routed + 8 * self.expert
        return 2 * self.stream + norms + rotated + of_heads + 8 * self.inside + of_experts

    @property
    def computing_mlp(self) -> int:
        """Returns bytes of a row more where the MLP's backward pass is at its peak: the gradient of
        the layer's result, those of the product and its factors less the product; of experts those
        of weighted, ordered and other outputs."""
        return 2 * self.stream + 4 * self.inside + 6 * self.routed

    def attending(self, ranks: int) -> int:
        """Returns bytes of a row where the ring's backward pass is at its peak: what is saved
        before it; gradients of the residual and of the output; fp32 sums of gradients; all keys
        and values, gathered; a step's gradients; cuDNN's fp32 sum of dQ; sums of dK and dV, joined
        and received."""
        saved = 2 * self.stream + 8 * self.stream + 10 * self.queries + 10 * self.keys
        gradients = 2 * self.stream + 2 * self.queries
        sums, gathered = 4 * self.queries + 8 * self.keys, 4 * self.keys * (ranks + 1)
        step, workspace, messages = 2 * self.queries + 4 * self.keys, 4 * self.queries, 16
        return saved + gradients + sums + gathered + step + workspace + messages * self.keys

    @property
    def touched(self) -> int:
        """Returns bytes of a row that the operations beside products and attention read and write
        in one pass forward: norms, rotation, the output by rows, sums, the MLP's activation."""
        norm, rotation = 34, 20
        of_heads = (norm + rotation) * (self.queries + self.keys) + 4 * self.queries
        of_experts = 10 * self.expert + 14 * self.routed
        return 2 * norm * self.stream + 12 * self.stream + of_heads + 10 * self.inside + of_experts


class Figures(NamedTuple):
    """Seconds of a step and gigabytes of a GPU, None where there is nothing published."""

    seconds: float | None
    gigabytes: float | None


def trained(run: Mapping[str, Any], facts: Mapping[str, Any]) -> Figures:
    """Returns the predicted figures of a run of TRL."""
    on, model = hardware.table()[facts["hardware"]], named(run["model"], {})
    ranks, context = run["gpus"], run["context"]
    rows = context // ranks
    how = theirs.Implementation.read(facts["implementation"])
    seconds = _logits(model, rows, on)
    for group in model.groups:
        attention, widths = group.attention, Widths.of(model, group)
        assert attention
        ring = {
            "ring_size": ranks, "seq_len": context, "batch": 1, "heads": attention.heads,
            "kv_heads": attention.kv_heads, "head_dim": attention.head_dim, "transport": "ring",
            "partition": "zigzag", "causal": True,
        }  # fmt: skip
        ways: tuple[Direction, ...] = ("forward", "forward", "backward")  # the second: again
        layer = sum(theirs.seconds(ring, way, on, how) for way in ways)
        layer += PASSES * _products(model, group, rows, on)
        layer += PASSES * rows * widths.touched / (theirs.STREAMED * on.memory_bandwidth)
        if run.get("offload"):  # there and back, one after the other
            layer += 2 * 2 * rows * model.hidden / on.host
        seconds += group.count * layer
    return Figures(seconds, _memory(model, run, rows) / 1e9)


def _products(model: Model, group: LayerGroup, rows: int, on: Hardware) -> float:
    """Returns seconds of a layer's products, forward; experts' rows are spread evenly."""
    dense = sum(_product(each, rows, on) for each in group.products(model.hidden))
    if not (group.mlp and group.mlp.experts):
        return dense
    of_each = rows * group.mlp.active // group.mlp.experts
    expert = sum(_product(each, of_each, on) for each in group.mlp.expert_products(model.hidden))
    return dense + group.mlp.experts * expert


def _product(product: Product, rows: int, on: Hardware) -> float:
    return products.seconds(on, DTYPE, rows, product.k, product.n)


def _logits(model: Model, rows: int, on: Hardware) -> float:
    """Returns seconds of the loss, whose products are in fp32: forward, again and backward."""
    return PASSES * products.seconds(on, FP32, rows, model.hidden, model.vocab)


def _memory(model: Model, run: Mapping[str, Any], rows: int) -> float:
    """Returns the bytes of a GPU."""
    ranks = run["gpus"]
    layer = max(group.parameters(model.hidden) for group in model.groups)
    states = 0 if run.get("states") == "host" else 16 * model.parameters / ranks
    # This layer's weights, the next one's, gradients and what is reduced of them; the outer weights
    # whole, with gradients of the logits, until the end.
    gathered = 8 * layer + 2 * model.outer_parameters + 2 * model.hidden * model.vocab
    widths = max((Widths.of(model, group) for group in model.groups), key=lambda w: w.saved)
    in_mlp = widths.saved + widths.computing_mlp
    if "tile" in run:  # all tiles are saved, one computes
        in_mlp -= 4 * widths.inside * (rows - run["tile"]) // rows
    peak = rows * max(in_mlp, widths.attending(ranks))
    # What the layer that computes has saved contains its own input.
    inputs = 0 if run.get("offload") else (model.layers - 1) * 2 * rows * model.hidden
    return states + gathered + peak + inputs


def own(run: Mapping[str, Any], facts: Mapping[str, Any]) -> Figures:
    """Returns the predicted figures of ringray's own training of the same on the same GPUs: inputs
    of layers kept, or offloaded, all other options as they are without a word."""
    model, context, ranks = named(run["model"], {}), run["context"], run["gpus"]
    device = hardware.table()[facts["hardware"]]
    nodes = ranks // device.ranks_per_node
    on = hardware.parse_fleet(f"{facts['hardware']}:{nodes}x{device.ranks_per_node}")
    request, degrees = TrainingRequest(model, on, context, 1), Degrees(1, ranks, 1, 1)
    config = request.attention(degrees, partition="zigzag", transport="ring")
    both = request.cost(degrees, config)
    forward = request.cost(degrees, config.changed(direction="forward"))
    how = Training(context, offload=bool(run.get("offload")))
    step = transformer.step(model, degrees, how, on, forward, both)
    memory = rank_memory.memory(model, degrees, how, both.peak_memory_bytes)
    return Figures(step.total, memory.total / 1e9)


class Shown(NamedTuple):
    """One run of TRL: what it is, published and predicted figures, and those of ringray's own
    training; published seconds are the middle of several."""

    model: str
    context: str
    gpus: int
    offload: bool
    published: Figures
    predicted: Figures
    own: Figures

    @property
    def errors(self) -> Figures:
        """Returns relative errors, None where nothing is published."""
        pairs = zip(self.predicted, self.published, strict=True)
        return Figures(*(mine / real - 1 if mine and real else None for mine, real in pairs))


def trl() -> list[Shown]:
    """Returns all runs of TRL."""
    facts = read()["trl"]
    shown = []
    for run in facts["runs"]:
        times = run.get("seconds")
        published = Figures(sum(times) / len(times) if times else None, run.get("gigabytes"))
        name = run["model"], LENGTHS[run["context"]], run["gpus"], bool(run.get("offload"))
        shown.append(Shown(*name, published, trained(run, facts), own(run, facts)))
    return shown


class Rated(NamedTuple):
    """One run of prime-rl: tokens a second over those without context parallelism, and gibibytes of
    a GPU, of which only what depends on its rows is predicted."""

    cp: int
    style: str
    published: float
    predicted: float
    published_gibibytes: float
    rows_gibibytes: float


def prime() -> list[Rated]:
    """Returns all runs of prime-rl, the one without context parallelism first."""
    facts = read()["prime-rl"]
    runs, context = facts["runs"], facts["context"]
    model, on = named(facts["model"], {}), hardware.table()[facts["hardware"]]
    how = theirs.Implementation.read(facts["implementation"])
    rates = [1 / (run["cp"] * _layers(model, context, run, on, how)) for run in runs]
    # Logits whole: bf16, fp32 and their gradient; inputs of layers.
    of_row = 10 * model.vocab + 2 * model.hidden * model.layers
    return [
        Rated(
            run["cp"], run["style"], run["tokens"] / runs[0]["tokens"], rate / rates[0],
            run["gibibytes"], of_row * context / run["cp"] / (1 << 30),
        )
        for run, rate in zip(runs, rates, strict=True)
    ]  # fmt: skip


def _layers(
    model: Model,
    context: int,
    run: Mapping[str, Any],
    on: Hardware,
    how: theirs.Implementation,
) -> float:
    """Returns seconds of all layers for one sequence over ``cp`` devices."""
    ranks, total = run["cp"], 0.0
    ways: tuple[Direction, ...] = ("forward", "forward", "backward")
    for group in model.groups:
        attention = group.attention
        assert attention
        ring = {
            "ring_size": ranks, "seq_len": context, "batch": 1, "heads": attention.heads,
            "kv_heads": attention.kv_heads, "head_dim": attention.head_dim, "causal": True,
            "transport": {"ring": "by head"}.get(run["style"], "ulysses"),
        }  # fmt: skip
        each = sum(theirs.seconds(ring, way, on, how) for way in ways)
        rows = context // ranks
        each += PASSES * _products(model, group, rows, on)
        touched = Widths.of(model, group).touched
        each += PASSES * rows * touched / (theirs.STREAMED * on.memory_bandwidth)
        total += group.count * each
    return total


def read() -> dict[str, Any]:
    """Returns all facts."""
    return dict(yaml.safe_load(FACTS.read_text(encoding="utf-8")))


def lines() -> list[str]:
    """Returns a line for each run: what it is; published, predicted and error of seconds and
    gigabytes of TRL, and both of ringray's own; of prime-rl the rate over its first, and gibibytes,
    of rows alone."""
    shown = []
    for run in trl():
        cells = [f"{run.model}, {run.context} on {run.gpus}{', offloaded' * run.offload}"]
        for real, mine, error in zip(run.published, run.predicted, run.errors, strict=True):
            figures = "" if error is None else f"{real:.1f} {mine:.1f} {error:+.1%}"
            cells.append(figures or f"{mine:.1f}")
        cells.append(f"{run.own.seconds:.1f} {run.own.gigabytes:.1f}")
        shown.append(" | ".join(cells))
    for rated in prime():
        rates = f"{rated.published:.2f} {rated.predicted:.2f}"
        memory = f"{rated.published_gibibytes:.1f} {rated.rows_gibibytes:.1f}"
        shown.append(f"CP {rated.cp}, {rated.style} | {rates} | {memory}")
    return shown


def main() -> None:
    """Prints all runs."""
    print("\n".join(lines()))


if __name__ == "__main__":
    main()
