"""Train: steps of training a decoder on the ranks of a mesh.

A repeat is one step. The first one is not timed: its memory is measured, together with weights and
optimizer. With ``save_every`` a trial keeps checkpoints and goes on from the last one, on another
ring after a fault, or when it is resumed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from torch.distributed.tensor import DTensor

from ringray.base import private_files
from ringray.comm.batch import METER
from ringray.instruments.progress import HERE
from ringray.lab.kinds.base import RankContext
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.measurement import RankReport, peak_memory
from ringray.lab.trial.training import of_config
from ringray.models.sizes import Model
from ringray.training import mesh as meshes
from ringray.training.checkpoint import Checkpoints
from ringray.training.corpus import Corpus, RandomTokens
from ringray.training.trainer import Trainer, TrainingStep, check_facts


def run(config: TrialConfig, context: RankContext) -> RankReport:
    """Trains on this rank; every rank of the ring calls it at the same time."""
    model, degrees, recipe = of_config(config)
    mesh = meshes.make(degrees, context.device.type)
    with context.agreed():
        trainer = Trainer(model, mesh, recipe, corpus(config, model))
    kept = Checkpoints(folder(config)) if config.save_every is not None else None
    if kept is not None and (facts := kept.load(trainer.model, trainer.optimizer)) is not None:
        check_facts(facts, model)
        trainer.resume(facts)
    report = RankReport(rank=context.rank)
    taken: list[TrainingStep] = []

    def take() -> None:
        taken.append(trainer.step())

    while trainer.done < config.repeats:
        HERE.enter(f"step {trainer.done + 1}" + (f", loss {taken[-1].loss:.4g}" if taken else ""))
        context.barrier()
        meter = METER.snapshot()
        if not taken:
            peak = peak_memory(take, context.device)
            report.values["peak_memory_bytes"] = [float(peak + _held(trainer))]
        else:
            report.seconds.append(context.timed(take))
        used = METER.since(meter)
        report.values["sent_bytes"], report.messages = [used.sent_bytes], used.messages
        report.values.setdefault("wait_ms", []).append(used.wait_s * 1e3)
        if kept is not None and config.save_every and trainer.done % config.save_every == 0:
            kept.save(trainer.done, trainer.model, trainer.optimizer, trainer.facts())
    if kept is not None:
        kept.wait()
    context.barrier()
    if taken:
        report.values["loss"], report.values["gradient_norm"] = [taken[-1].loss], [taken[-1].norm]
        report.curves = {"loss": [step.loss for step in taken]}
    return report


def corpus(config: TrialConfig, model: Model) -> Corpus | RandomTokens:
    """Returns the tokens of a trial."""
    if config.corpus is None:
        return RandomTokens(model.vocab, config.seed)
    made = private_files.home() / "tokens"
    return Corpus(config.corpus, tokenizer=config.tokenizer, kept=made, seed=config.seed)


def folder(config: TrialConfig) -> Path:
    """Returns the place of a trial's checkpoints, by what it measures."""
    text = json.dumps(config.as_dict(), sort_keys=True)
    return private_files.home() / "checkpoints" / hashlib.sha256(text.encode()).hexdigest()[:16]


def _held(trainer: Trainer) -> int:
    """Returns the bytes of this rank's weights; the first step makes the optimizer's."""
    weights = trainer.model.parameters()
    local = (x.to_local() if isinstance(x, DTensor) else x for x in weights)
    return sum(x.numel() * x.element_size() for x in local)
