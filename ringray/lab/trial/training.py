"""Trials of training: the model, the degrees and the recipe that a config means. No torch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from ringray.lab.trial.config import TrialConfig, resolved
from ringray.models.sizes import Model, named
from ringray.training.recipe import Degrees, Recipe
from ringray.training.tasks import TASKS
from ringray.tuning.table import Place


def of_config(config: TrialConfig) -> tuple[Model, Degrees, Recipe]:
    """Returns what is trained, on which ranks and how.

    Raises:
        ValueError: the ranks are no multiple of those of dp, tp and pp.
    """
    sizes = {one.name for one in fields(Model)} & {one.name for one in fields(config)}
    model = named(config.model, {name: getattr(config, name) for name in sizes})
    others = Degrees(config.dp or 1, 1, config.tp or 1, config.pp or 1)
    ring, left = divmod(config.ring_size, others.ranks)
    if left:
        raise ValueError(
            f"size: got {config.ring_size} ranks, expected a multiple of dp x tp x pp = "
            f"{others.ranks}"
        )
    given: dict[str, Any] = {
        name: getattr(config, name)
        for name in ("seq_len", "dtype", "scores", "mlp_rows", "kept", "partition",
                     "transport", "learning_rate", "rope_theta",
                     "micro_batch")
    }  # fmt: skip
    recipe = Recipe(
        sequences=config.batch, steps=config.repeats, warmup=max(1, config.repeats // 10),
        documents=config.corpus is not None, seed=config.seed + config.replica, **given,
    )  # fmt: skip
    return model, replace(others, cp=ring), recipe


def settled(config: TrialConfig, place: Place) -> tuple[TrialConfig, str]:
    """Returns a config with partition and transport chosen for its rings, and the source of the
    choice ("" if both were given)."""
    if "auto" not in (config.partition, config.transport):
        return config, ""
    found, source = resolved(ring_config(config, of_config(config)[1]), place)
    return replace(config, partition=found.partition, transport=found.transport), source


def examination(config: TrialConfig) -> float:
    """Returns the steps whose FLOPs the examination of a task takes; 0 without one."""
    if config.task is None:
        return 0.0
    model, _, recipe = of_config(config)
    flops = sum(map(model.forward_flops, config.examined or [recipe.seq_len]))
    step = 3 * recipe.sequences * model.forward_flops(recipe.seq_len)
    return TASKS[config.task].passes * flops / step


def ring_config(config: TrialConfig, degrees: Degrees) -> TrialConfig:
    """Returns the attention of one layer and micro-batch on one of its rings."""
    return replace(
        config, ring_size=degrees.cp, batch=config.micro_batch or 1,
        heads=config.heads // degrees.tp, kv_heads=config.kv_heads // degrees.tp,
        direction="forward+backward", model=None,
    )  # fmt: skip
