"""Train: steps of training a decoder on the ranks of a mesh.

A repeat is one step. The first one is not timed: its memory is measured, together with weights and
optimizer. With ``checkpoints`` a trial goes on from the last one of its folder: on a new ring after
a fault, when it is resumed, or on other ranks. A trained task ends with its examination.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ringray.base import private_files
from ringray.comm.batch import METER
from ringray.instruments.progress import HERE
from ringray.lab.kinds.base import RankContext
from ringray.lab.trial.config import TrialConfig, TrialTraining
from ringray.lab.trial.faults import BudgetError
from ringray.lab.trial.measurement import RankReport, peak_memory
from ringray.lab.trial.metrics import REACH, SCORE
from ringray.lab.trial.training import from_config
from ringray.models.sizes import Model
from ringray.training import mesh as meshes
from ringray.training.checkpoint import Checkpoints
from ringray.training.corpus import Corpus, RandomTokens
from ringray.training.tasks import TASKS, Task
from ringray.training.trainer import LossError, Trainer, TrainingStep, check_facts


def run(config: TrialConfig, context: RankContext) -> RankReport:
    """Trains on this rank; every rank of the ring calls it at the same time."""
    model, degrees, recipe = from_config(config)
    training = config.training
    assert training is not None
    if not dist.is_initialized():  # a ring of one
        backend = "nccl" if context.device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    mesh = meshes.make_mesh(degrees, device=context.device.type)
    with context.agreed():
        trainer = Trainer(model, mesh, recipe, corpus(training, model, recipe.seed))
    report = RankReport(rank=context.rank)
    checkpoints = None
    if training.checkpoints is not None:
        checkpoints = Checkpoints(training.checkpoints, note=report.notes.append)
    _train(config, context, trainer, checkpoints, report)
    return report


def _train(
    config: TrialConfig,
    context: RankContext,
    trainer: Trainer,
    checkpoints: Checkpoints | None,
    report: RankReport,
) -> None:
    """Takes the steps that are missing."""
    training, losses, norm = config.training, [], math.nan
    assert training is not None
    accept = partial(check_facts, model=trainer.size)
    if (
        checkpoints
        and (facts := checkpoints.load(trainer.model, trainer.optimizer, accept)) is not None
    ):
        trainer.resume(facts)
        losses, norm = [*map(float, facts.get("losses", []))], float(facts.get("norm", math.nan))
    if trainer.done > config.measure.repeats:
        raise ValueError(
            f"{training.checkpoints} holds a training of {trainer.done} steps: give as many, or "
            "another folder"
        )
    taken: list[TrainingStep] = []

    def take() -> None:
        try:
            taken.append(trainer.step())
        except LossError:
            if checkpoints is not None:
                checkpoints.wait()  # the last checkpoint is good
            raise
        losses.append(taken[-1].loss)

    while trainer.done < config.measure.repeats:
        if taken:
            HERE.tell(trainer.done, loss=taken[-1].loss, gradient_norm=taken[-1].norm)
        HERE.enter(f"step {trainer.done + 1}" + (f", loss {taken[-1].loss:.4g}" if taken else ""))
        context.barrier()
        meter = METER.snapshot()
        if not taken:
            peak = _held(trainer)
            peak += peak_memory(take, context.device)
            report.values["peak_memory_bytes"] = [float(peak)]
            with context.agreed():
                if training.budget is not None and peak > training.budget:
                    raise BudgetError(peak, training.budget)
        else:
            report.seconds.append(context.timed(take))
        used = METER.since(meter)
        report.values["sent_bytes"], report.messages = [used.sent_bytes], used.messages
        report.values.setdefault("wait_ms", []).append(used.wait_s * 1e3)
        last = trainer.done == config.measure.repeats
        if checkpoints is not None and (last or trainer.done % (training.save_every or 1) == 0):
            facts_now = {**trainer.facts(), "losses": losses, "norm": taken[-1].norm}
            checkpoints.save(trainer.done, trainer.model, trainer.optimizer, facts_now)
    if checkpoints is not None:
        checkpoints.wait()
    context.barrier()
    if taken:
        norm, report.flops = taken[-1].norm, statistics.mean(step.flops for step in taken)
    report.values["loss"], report.values["gradient_norm"] = losses[-1:], [norm]
    report.values[REACH] = [float(config.problem.seq_len)]
    report.curves = {"loss": losses}
    if training.task is not None:
        task = TASKS[training.task](trainer.recipe.seed)
        examine(task, training.examined or [config.problem.seq_len], trainer, report)


def examine(task: Task, lengths: Iterable[int], trainer: Trainer, report: RankReport) -> None:
    """Adds the scores of a task to ``report``, those of the longest sequence last."""
    for length in sorted(lengths):
        HERE.enter(f"examined at {length} tokens")
        scores = task.examine(trainer.answers, length)
        report.curves[f"{SCORE} {length}"] = scores
        report.values[SCORE] = [statistics.mean(scores)]


def corpus(training: TrialTraining, model: Model, seed: int) -> Corpus | RandomTokens | Task:
    """Returns the tokens of a trial."""
    if training.task is not None:
        return TASKS[training.task](seed)
    if training.corpus is None:
        return RandomTokens(model.vocab, seed)
    made = private_files.home() / "tokens"
    return Corpus(training.corpus, tokenizer=training.tokenizer, kept=made, seed=seed)


def _held(trainer: Trainer) -> int:
    """Returns the bytes of this rank's weights and of its optimizer's numbers."""
    numbers = (x for state in trainer.optimizer.state.values() for x in state.values())
    tensors = (x for x in (*trainer.model.parameters(), *numbers) if isinstance(x, Tensor))
    local = (x.to_local() if isinstance(x, DTensor) else x for x in tensors)
    return sum(x.numel() * x.element_size() for x in local)
