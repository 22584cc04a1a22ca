"""Trials of training: the model, the degrees and the recipe that a config means. No torch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from ringray.lab.trial.config import TrialConfig, resolved
from ringray.models.sizes import Model, named
from ringray.training.recipe import Degrees, Recipe
from ringray.training.tasks import TASKS
from ringray.tuning.table import Place


def from_config(config: TrialConfig) -> tuple[Model, Degrees, Recipe]:
    """Returns what is trained, on which ranks and how.

    Raises:
        ValueError: the ranks are no multiple of those of dp, tp and pp.
    """
    measure, training = config.measure, config.training
    assert training is not None
    flat = config.flat()
    sizes = {item.name for item in fields(Model)} & flat.keys()
    model = named(flat["model"], {name: flat[name] for name in sizes})
    others = Degrees(training.dp or 1, 1, training.tp or 1, training.pp or 1)
    pool = training.joined
    ring, rest = divmod(config.ring.size, others.ranks)
    if rest:
        raise ValueError(
            f"size: got {config.ring.size} ranks, expected a multiple of dp x tp x pp = "
            f"{others.ranks}"
        )
    # Most fields of a recipe have a config's name; the others follow from what a config measures.
    options: dict[str, Any] = {
        item.name: flat[item.name] for item in fields(Recipe) if item.name in flat
    }
    options |= {
        "sequences": config.problem.batch,
        "steps": measure.repeats,
        "warmup": max(1, measure.repeats // 10),
        "documents": training.corpus is not None,
        "pool": pool,
        "offload": bool(training.offload),
        "seed": measure.seed + measure.replica,
    }
    recipe = Recipe(**options)
    return model, replace(others, dp=others.dp // pool, cp=ring * pool), recipe


def settled(config: TrialConfig, place: Place) -> tuple[TrialConfig, str]:
    """Returns a config with partition and transport chosen for its rings, and the source of the
    choice ("" if both were given)."""
    if "auto" not in (config.strategy.partition, config.strategy.transport):
        return config, ""
    ring, source = resolved(ring_config(config, from_config(config)[1]), place)
    partition, transport = ring.strategy.partition, ring.strategy.transport
    return config.changed(partition=partition, transport=transport), source


def examination(config: TrialConfig) -> float:
    """Returns the steps whose FLOPs the examination of a task takes; 0 without one."""
    training = config.training
    if training is None or training.task is None:
        return 0.0
    model, _, recipe = from_config(config)
    flops = sum(map(model.forward_flops, training.examined or [recipe.seq_len]))
    step = 3 * recipe.sequences * model.forward_flops(recipe.seq_len)
    return TASKS[training.task].passes * flops / step


def ring_config(config: TrialConfig, degrees: Degrees) -> TrialConfig:
    """Returns the attention of one layer and micro-batch on one of its rings, where each sequence
    is a document."""
    training, problem = config.training, config.problem
    assert training is not None
    ring = config.changed(
        ring_size=degrees.cp,
        order="topology",
        batch=training.micro_batch or 1,
        heads=problem.heads // degrees.tp,
        kv_heads=problem.kv_heads // degrees.tp,
        direction="forward+backward",
    )
    if (pool := training.joined) > 1:
        ring = ring.changed(seq_len=pool * problem.seq_len, documents=(problem.seq_len,) * pool)
    return replace(ring, training=None)
