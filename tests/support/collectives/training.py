"""Models on a mesh: sharded, offloaded and trained."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ringray
from ringray.models.sizes import named
from ringray.training import checkpoint, trainer
from ringray.training.corpus import RandomTokens
from ringray.training.recipe import Degrees, Recipe
from tests.support.collectives.collective import Calls, Collective, while_broken

TINY = named("llama-tiny", {})


def meshes() -> Collective:
    ranks = dist.get_world_size()
    run = ringray.make_mesh
    wrong: Calls = {"needs 5 ranks": partial(run, Degrees(5)), "dp: got 0": partial(run, dp=0)}
    return Collective(run, wrong, {"degrees: ": partial(run, Degrees(ranks))})


def sharded_models() -> Collective:
    whole = ringray.make_mesh()

    def run(**options: Any) -> nn.Module:
        torch.manual_seed(0)
        return ringray.parallelize(ringray.ContextParallelAttention(8, 2), whole, **options)

    tensors = Degrees(1, 1, dist.get_world_size())
    mesh = type(whole)(tensors, whole.device, whole.whole, whole.shards)
    wrong = {"only a Decoder": lambda: ringray.parallelize(nn.Linear(2, 2), mesh)}
    return Collective(run, wrong, {"dtype: ": partial(run, dtype=torch.bfloat16)})


def offloading() -> Collective:
    def run(layers: int = 2) -> None:
        some = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers))
        ringray.offload(nn.Sequential(nn.Identity(), some))

    wrong = {"no list of layers": partial(ringray.offload, nn.Linear(2, 2))}
    return Collective(run, wrong, {"layers: ": partial(run, 3)})


def steps(folder: Path) -> Collective:
    made = trainer.Trainer(TINY, ringray.make_mesh(), Recipe(seq_len=16), RandomTokens(TINY.vocab))
    checkpoints = checkpoint.Checkpoints(folder)

    def run(step: int = 1) -> None:
        made.step()
        checkpoints.save(step, made.model, made.optimizer, {})
        checkpoints.wait()
        assert checkpoints.load(made.model, made.optimizer) == {"step": step}

    def load() -> None:
        made.step()
        checkpoints.save(1, made.model, made.optimizer, {})
        checkpoints.wait()
        while_broken(checkpoint, "complete", partial(checkpoints.load, made.model, made.optimizer))

    wrong: Calls = {
        "rank is broken": partial(while_broken, made, "_read", made.step),
        "rank is": load,
    }
    return Collective(run, wrong, {"save: .*step: |a step": partial(run, 2)})
