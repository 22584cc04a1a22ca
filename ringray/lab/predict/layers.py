"""The layers of a model as predictions see them: kinds that differ, their attention on a ring.

Imports numpy only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from operator import mul

from ringray.lab.predict.cost_model import Cost
from ringray.lab.trial.config import TrialConfig
from ringray.models.sizes import Attention, LayerGroup, Model
from ringray.training.recipe import Degrees

CHUNK = 64  # tokens for each of which a state is kept while a layer computes, as fla does
_LONG = 1 << 20  # tokens, in which kinds of attention are compared
_NOTHING = Cost(0, 0, 0, 0, 0.0, 1.0, 0.0, 0.0, 0.0, 0, 0)  # of layers that do not attend


def every(model: Model) -> tuple[LayerGroup, ...]:
    """Returns the groups of layers; a head for a further token has one as the last."""
    if not model.heads_ahead:
        return model.groups
    return (*model.groups, replace(model.groups[-1], count=model.heads_ahead))


def attentions(model: Model) -> dict[Attention, int]:
    """Returns the layers of each kind of attention, that with most FLOPs a layer first."""
    layers: Counter[Attention] = Counter()
    for group in every(model):
        if group.attention:
            layers[group.attention] += group.count
    return dict(sorted(layers.items(), key=lambda item: -item[0].flops(item[0].pairs(_LONG))))


def rings(model: Model, ring: TrialConfig, tp: int) -> list[tuple[int, TrialConfig]]:
    """Returns the attention on a ring of each kind that a model has, after its number of layers;
    ``ring``: the strategy, and the attention of a model of plain layers."""
    if not model.mixed:
        return [(model.layers + model.heads_ahead, ring)]
    return [
        (
            count,
            ring.changed(
                heads=of.heads // tp,
                kv_heads=of.kv_heads // tp,
                head_dim=of.head_dim,
                value_head_dim=None if of.value_dim == of.head_dim else of.value_dim,
                window=of.window,
                chunk=of.chunk,
            ),
        )
        for of, count in attentions(model).items()
    ]


def mean_cost(costs: Iterable[tuple[int, Cost]]) -> Cost:
    """Returns the mean cost of the layers that attend, and the largest memory; each cost comes
    after its number of layers."""
    counted = [*costs]
    if len(counted) < 2:
        return counted[0][1] if counted else _NOTHING
    layers, by_kind = zip(*counted, strict=True)
    means = (sum(map(mul, layers, values)) / sum(layers) for values in zip(*by_kind, strict=True))
    return Cost(*means)._replace(peak_memory_bytes=max(cost.peak_memory_bytes for cost in by_kind))


def touched(group: LayerGroup, hidden: int) -> float:
    """Returns elements per token that a layer reads and writes beside its products, forward: two
    norms, two sums, rotation of Q and K, a gate, the MLP's activation, copies for experts and their
    sum, and what states are computed from."""
    elements = 5.0 * hidden * ((group.mixer is not None) + (group.mlp is not None))
    if of := group.attention:
        elements += 2 * (of.heads + of.kv_heads) * of.head_dim
        elements += 3 * of.heads * of.value_dim * of.gated
    if mlp := group.mlp:
        elements += (2 + mlp.gated) * mlp.width + 4 * mlp.active * hidden
    return elements + sum(2 * (some.width + some.state / CHUNK) for some in group.recurrences)


def assumptions(model: Model, degrees: Degrees) -> list[str]:
    """Returns what predictions of a model on such ranks take for granted, as sentences."""
    groups, lines = every(model), [*model.assumptions]
    if any(group.mlp and group.mlp.experts for group in groups):
        lines.append("nothing hides the messages of tokens to their experts and back")
    if any(group.recurrences for group in groups):
        lines.append(
            f"layers with a state compute at the rate of products, keep a state per {CHUNK} tokens "
            "meanwhile, and hand it in no time to the next rank, which keeps it for its backward "
            "pass"
        )
    if model.heads_ahead:
        lines.append("each head for a further token is trained: a layer as the last, and logits")
    if degrees.pp > 1 and len(groups) > 1:
        lines.append("each stage of the pipeline has an even part of each kind of layer")
    return lines
