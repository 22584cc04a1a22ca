"""``Trainer``: steps of training a ``Decoder`` on a mesh.

A step takes ``sequences`` of ``seq_len`` tokens; each replica (DP) takes its share of them one
after another (micro-batches), its ring (CP) the rows of each, its stages (PP) the layers. The loss
is per token of the whole step. A thread reads the rows of the next step, and deals them where the
partition depends on them.
"""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from ringray.attention.agreement import AgreedCall, agree, refusing
from ringray.attention.call import whole
from ringray.attention.deal import deal
from ringray.attention.documents import boundaries
from ringray.attention.sharding import local_positions
from ringray.comm.ring import connect
from ringray.models.decoder import Decoder
from ringray.models.sizes import Model
from ringray.partition import BALANCED, Partitioning, padded_length
from ringray.training.checkpoint import CheckpointError
from ringray.training.corpus import NO_LABEL, Corpus, CorpusError, Ints, RandomTokens, SequenceRows
from ringray.training.gradients import clip_grad_norm
from ringray.training.mesh import Mesh
from ringray.training.parallelize import parallelize
from ringray.training.recipe import Recipe, check
from ringray.training.tasks import Task
from ringray_kernels.dtypes import torch_dtype

# Fields of a recipe that are options of the model.
_DECODER = "scores", "mlp_rows", "loss_rows", "kept", "partition", "transport", "rope_theta"


@dataclass(frozen=True)
class TrainingStep:
    """Result of one step. ``number``: from 1. ``norm``: of the gradients before they are clipped.
    ``tokens``, ``flops``: of all ranks, the latter by visible pairs, without what is computed
    again."""

    number: int
    loss: float
    norm: float
    tokens: int
    flops: float


class LossError(ArithmeticError):
    """A loss or gradients that are not finite. The step was not taken: weights are those of the one
    before."""


class Trainer:
    """A model, its optimizer and its place in the data; every rank of the mesh has one.

    Raises:
        ValueError: sizes, degrees or lengths that do not fit (``check`` tells before ranks exist).
    """

    def __init__(
        self, model: Model, mesh: Mesh, recipe: Recipe, corpus: Corpus | RandomTokens | Task
    ) -> None:
        check(model, mesh.degrees, recipe)
        if corpus.vocabulary > model.vocab:
            raise ValueError(
                f"vocab: got {model.vocab}, expected at least {corpus.vocabulary}, as the corpus"
            )
        self.size, self.mesh, self.recipe, self.corpus = model, mesh, recipe, corpus
        self.done = 0  # steps
        self._before = 0  # sequences that others took, with as many steps
        stages, stage = mesh.degrees.pp, mesh.place("pp")
        self._first, self._last = stage == 0, stage == stages - 1
        first, last = (number * model.layers // stages for number in (stage, stage + 1))
        options = {name: getattr(recipe, name) for name in _DECODER}
        self.model = Decoder(model, first=first, last=last, device=mesh.device, **options)
        self.model.reset(recipe.seed)
        parallelize(self.model, mesh, dtype=torch_dtype(recipe.dtype), offload=recipe.offload)
        matrices = [weight for weight in self.model.parameters() if weight.dim() > 1]
        others = [weight for weight in self.model.parameters() if weight.dim() <= 1]
        decaying = {"params": matrices, "weight_decay": recipe.weight_decay}
        groups = [decaying, {"params": others, "weight_decay": 0.0}]
        fused = mesh.device == "cuda" or None  # one pass over memory in place of several
        self.optimizer = torch.optim.AdamW(groups, recipe.learning_rate, (0.9, 0.95), fused=fused)
        self._make_moments()
        self._place = mesh.place("cp")
        self._share = recipe.sequences // mesh.degrees.dp  # sequences of this replica in a step
        self._reader = ThreadPoolExecutor(1, "rows")
        self._ahead: dict[int, Future[list[SequenceRows]]] = {}  # by their first sequence
        self._schedule = self._pipeline() if stages > 1 else None

    def _make_moments(self) -> None:
        """Makes the optimizer's numbers, which it would make at the end of the first step: what
        runs out of memory in the second step does so in the first."""
        for group in self.optimizer.param_groups:
            for weight in group["params"]:
                # Fused Adam counts on the device, the others on the host, as PyTorch makes it.
                steps = torch.zeros(
                    (), dtype=torch.float32, device=weight.device if group["fused"] else "cpu"
                )
                first, second = torch.zeros_like(weight), torch.zeros_like(weight)
                self.optimizer.state[weight] = {
                    "step": steps,
                    "exp_avg": first,
                    "exp_avg_sq": second,
                }

    def step(self) -> TrainingStep:
        """Takes one step.

        Raises:
            LossError: the loss or a gradient is not finite; nothing was changed.
            CorpusError: of a rank that cannot read its rows; the others raise a ``RefusedError``.
        """
        recipe, first, comm = self.recipe, self._first_sequence(), connect(None)
        with refusing(comm):
            rows = self._rows(first + self.mesh.place("dp") * self._share)
            pairs = sum(int((n * (n + 1) // 2).sum()) for n in (np.diff(row.ends) for row in rows))
            labelled = [float((row.labels != NO_LABEL).sum()) for row in rows]
            counts = torch.tensor([*labelled, pairs], dtype=torch.float64, device="cpu")
            counts = counts.to(self.mesh.device)
            agree(comm, AgreedCall("a step", number=self.done + 1, first=first, recipe=recipe))
        dist.all_reduce(counts, group=self.mesh.shards.get_group())
        *_, everywhere = counts.tolist()
        weights = counts[:-1] / counts[:-1].sum().clamp(min=1)
        run = self._piped if self._schedule is not None else self._alone
        loss = float(run(rows, weights))
        norm = self._clip() if math.isfinite(loss) else loss
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            what = "norm of the gradients" if math.isfinite(loss) else "loss"
            raise LossError(f"step {self.done + 1}: the {what} is {norm}")
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        tokens = recipe.sequences * recipe.seq_len
        attention = self.size.attention_flops(everywhere / self.mesh.degrees.cp)
        flops = 3 * (self.size.token_flops * tokens + attention)
        return TrainingStep(self.done, loss, norm, tokens, flops)

    def answers(self, tokens: Ints, places: Ints, among: range) -> Ints:
        """Returns the likeliest of some tokens after places ``at`` (N,) of sequences (B, S), as a
        ``tasks.Answer``; every rank asks the same. Without stages."""
        comm = connect(None)
        with refusing(comm):
            seq_len, size = tokens.shape[1], (len(tokens), len(places))
            likeliest_tokens = torch.zeros(size, dtype=torch.int64, device="cpu")
            _, mine = self._dealt(seq_len)
            which, row = np.nonzero(places[:, None] == mine)
            rows = torch.from_numpy(tokens[:, np.minimum(mine, seq_len - 1)])
            agree(comm, AgreedCall("answers", shape=tokens.shape, places=places, among=among))
        at_once = self.recipe.micro_batch
        for some, answers in zip(rows.split(at_once), likeliest_tokens.split(at_once), strict=True):
            with torch.no_grad():
                logits = self.model(some.to(self.mesh.device), seq_len=seq_len)
            likeliest = logits[:, row, among.start : among.stop].argmax(-1).cpu()
            answers[:, which] = among.start + likeliest
        likeliest_tokens = likeliest_tokens.to(self.mesh.device)
        dist.all_reduce(likeliest_tokens, group=self.mesh.ring)
        return cast("Ints", likeliest_tokens.cpu().numpy())

    def facts(self) -> dict[str, Any]:
        """Returns what a checkpoint must agree on, and the place in the data."""
        tokens = self._first_sequence() * self.recipe.seq_len
        return {"model": self.size.plain, "tokens": tokens}

    def resume(self, facts: dict[str, Any]) -> None:
        """Goes on behind a checkpoint that was loaded into model and optimizer, behind the tokens
        that it has seen."""
        self.done = int(facts["step"])
        seen = -(-int(facts["tokens"]) // self.recipe.seq_len)
        self._before = seen - self.done * self.recipe.sequences

    def _first_sequence(self) -> int:
        return self._before + self.done * self.recipe.sequences

    def _alone(self, rows: list[SequenceRows], weights: Tensor) -> Tensor:
        """Computes loss and gradients, all layers on this rank."""
        total = torch.zeros((), dtype=torch.float32, device=self.mesh.device)
        width = self.recipe.micro_batch
        for i in range(0, len(rows), width):
            some, weight = rows[i : i + width], weights[i : i + width].sum()
            tokens, labels = self._tensor(some, "tokens"), self._tensor(some, "labels")
            loss = self.model(tokens, labels=labels, **self._where(some[0]))
            (loss * weight).backward()
            total += loss.detach() * weight
        return total

    def _piped(self, rows: list[SequenceRows], weights: Tensor) -> Tensor:
        """Computes loss and gradients of this rank's stage; every stage learns the loss."""
        assert self._schedule is not None
        where = self._where(rows[0])
        if "cu_seqlens" in where:
            where["cu_seqlens"] = boundaries([row.ends.tolist() for row in rows])
        inputs = (self._tensor(rows, "tokens"),) if self._first else ()
        target = weights[:, None] if self._last else None
        if self._last:
            where["labels"] = self._tensor(rows, "labels")
        losses: list[Tensor] = []
        self._schedule.step(*inputs, target=target, losses=losses, **where)
        total = torch.zeros((), dtype=torch.float32, device=self.mesh.device)
        if self._last:
            total += torch.stack([loss.detach() for loss in losses]).sum()
        group = self.mesh.group("pp")
        last = dist.get_global_rank(group, self.mesh.degrees.pp - 1)
        dist.broadcast(total, last, group=group)
        return total

    def _pipeline(self) -> Schedule1F1B:
        """Makes the stage of this rank and the schedule of its micro-batches."""
        degrees, recipe = self.mesh.degrees, self.recipe
        rows = padded_length(recipe.partition, recipe.seq_len, degrees.cp) // degrees.cp
        shape, dtype = (1, rows // degrees.tp, self.size.hidden), torch_dtype(recipe.dtype)
        stream = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        ids = torch.empty(1, rows, dtype=torch.int64, device="meta")
        loss = torch.empty(1, dtype=torch.float32, device="meta", requires_grad=True)
        # Schedules join what micro-batches return, which a scalar does not allow.
        self.model.register_forward_hook(
            lambda _, __, out: out.reshape(1) if out.dim() == 0 else out
        )
        # Stages that are no neighbours have no first message together.
        group, device = self.mesh.group("pp"), torch.device(self.mesh.device)
        connect(group).open(device)
        taken, made = (ids if self._first else stream,), (loss if self._last else stream,)
        place = self.mesh.place("pp")
        stage = PipelineStage(self.model, place, degrees.pp, device, taken, made, group=group)

        def weighted(loss: Tensor, weight: Tensor) -> Tensor:
            return (loss * weight.flatten()).sum()

        return Schedule1F1B(stage, self._share, loss_fn=weighted, scale_grads=False)

    def _rows(self, first: int) -> list[SequenceRows]:
        """Returns this rank's rows of the step whose first sequence here is ``first``; those of the
        next step are read meanwhile, whose errors are raised there."""
        ahead = self._ahead.pop(first, None) or self._reader.submit(self._read_all, first)
        rows, after = ahead.result(), first + self.recipe.sequences
        self._ahead = {}
        if self.done + 1 < self.recipe.steps:
            self._ahead[after] = self._reader.submit(self._read_all, after)
        return rows

    def _read_all(self, first: int) -> list[SequenceRows]:
        """Returns this rank's rows of the sequences of a step, those of a pool joined."""
        return [self._joined(first + i) for i in range(0, self._share, self.recipe.pool)]

    def _joined(self, number: int) -> SequenceRows:
        """Returns this rank's rows of a pool of sequences."""
        seq_len, pool = self.recipe.seq_len, self.recipe.pool
        ends = np.arange(pool + 1) * seq_len
        if self.recipe.documents and isinstance(self.corpus, Corpus):
            ends = self.corpus.ends(number, seq_len, pool)
        partition, positions = self._dealt(pool * seq_len, ends)
        # The last one has the padding of all.
        which = np.minimum(positions // seq_len, pool - 1)
        each = [
            self._read(number + i, positions[which == i] - i * seq_len)
            for i in np.unique(which).tolist()
        ]
        tokens, labels = (
            np.concatenate([getattr(rows, name) for rows in each]) for name in ("tokens", "labels")
        )
        return SequenceRows(tokens, labels, ends, partition)

    def _read(self, number: int, positions: Ints) -> SequenceRows:
        """Returns rows of a sequence; raises CorpusError for a token that the model does not know.
        Files are looked at in part before."""
        rows = self.corpus.rows(number, self.recipe.seq_len, positions)
        low, high = int(rows.tokens.min()), max(int(rows.tokens.max()), int(rows.labels.max()))
        if low < 0 or high >= self.size.vocab:
            raise CorpusError(
                f"corpus: token {low if low < 0 else high} in sequence {number}, expected 0 to "
                f"{self.size.vocab - 1}, the vocabulary of the model"
            )
        return rows

    def _dealt(self, seq_len: int, ends: Ints | None = None) -> tuple[Partitioning, Ints]:
        """Returns the partition of a sequence, and the positions of this rank's rows."""
        partition: Partitioning = self.recipe.partition
        ranks = self.mesh.degrees.cp
        if partition == BALANCED:
            partition = deal(seq_len, ranks, **self._documents(ends))
        positions = local_positions(partition, seq_len, ranks, self._place)
        return partition, cast("Ints", positions.numpy())

    def _documents(self, ends: Ints | None) -> dict[str, Any]:
        """Returns boundaries as arguments, where there are several documents."""
        if ends is None or not (self.recipe.documents or self.recipe.pool > 1):
            return {}
        return {"cu_seqlens": torch.from_numpy(ends)}

    def _where(self, rows: SequenceRows) -> dict[str, Any]:
        where: dict[str, Any] = {"seq_len": int(rows.ends[-1]), "partition": rows.partition}
        if self._last:
            where |= {"shards": self.mesh.shards.get_group(), "gradients": "mean"}
        return where | self._documents(rows.ends)

    def _tensor(self, rows: list[SequenceRows], name: str) -> Tensor:
        """Returns tokens or labels of sequences, (B, S), on this rank's device."""
        values = np.stack([getattr(row, name) for row in rows])
        return torch.from_numpy(values).to(self.mesh.device)

    def _clip(self) -> float:
        """Clips the gradients; returns their norm over all ranks."""
        return float(clip_grad_norm(self.model.parameters(), self.recipe.clip, self.mesh))

    def _rate(self) -> float:
        """Returns the learning rate of the next step."""
        recipe = self.recipe
        if self.done < recipe.warmup:
            return recipe.learning_rate * (self.done + 1) / recipe.warmup
        part = (self.done - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
        return recipe.learning_rate * (0.55 + 0.45 * math.cos(math.pi * min(1.0, part)))


def check_facts(facts: dict[str, Any], model: Model) -> None:
    """Raises CheckpointError if a checkpoint is not of a training of ``model``."""
    recorded = facts.get("model")
    if not isinstance(recorded, dict):
        raise CheckpointError("the checkpoint is not of a Trainer: its facts name no model")
    expected = {name: size for name, size in model.plain.items() if name != "name"}
    different = [name for name, size in expected.items() if recorded.get(name) != size]
    if different:
        here, there = (
            ", ".join(f"{name} {sizes.get(name)}" for name in different)
            for sizes in (expected, recorded)
        )
        raise CheckpointError(f"the checkpoint is of another model: {there}, expected {here}")
    if not whole(facts.get("tokens"), 0):
        raise CheckpointError("the checkpoint does not say how many tokens it has seen")
