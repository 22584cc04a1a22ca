"""One process of a verification: a rank, or the one process that ranks are compared with.

``main``, with CONNECTION PARENT RANK DEVICE as its arguments, answers requests of the
parent, ``(name, arguments)``, with ``("ok", result)`` or ``("error", text, traceback)``. Requests
are the public methods of ``TargetProcess``; results hold NumPy arrays only.
"""

from __future__ import annotations

import copy
import faulthandler
import hashlib
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringray.verification.double import in_double
from ringray.verification.observation import (
    Array,
    Observation,
    as_array,
    of_logits,
    plain_name,
    recording,
)
from ringray.verification.target import CONSTANTS, LEAST_VOCABULARY, TargetError, load

_BASE = 1 << 24  # of the numbers that stand for rows where a batch is dealt to learn how
_WEIGHTS_SEED = 0
_LR, _MOMENTUM = 0.01, 0.9  # of the steps of a resumed training
_SMALL_VOCABULARY = 32
_GROUP_TIMEOUT = timedelta(minutes=30)  # the parent ends what hangs


class TargetProcess:
    """The models of one process and the requests that it answers.

    ``exact`` is the model in fp64, which the process that runs alone has: its ``rank`` is below 0.
    """

    target: SimpleNamespace
    model: nn.Module
    exact: nn.Module

    def __init__(self, rank: int, device: str) -> None:
        self.rank, self.device = rank, device

    def join_group(self, port: int, start: str) -> None:
        """Forms the group of all ranks; the process that runs alone has one of its own, for code
        that asks for its rank."""
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if self.device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if self.device == "cuda" else "gloo",
            store=dist.PrefixStore(f"{start}-{ranks}", dist.TCPStore("127.0.0.1", port)),  # type: ignore[attr-defined]
            rank=rank,
            world_size=ranks,
            timeout=_GROUP_TIMEOUT,
        )
        # A target that forms the group itself, as a training does, has it already.
        dist.init_process_group = lambda *args, **options: None

    def import_target(self, text: str, adapter: str | None) -> None:
        """Imports the target."""
        self.target = load(text, adapter, alone=self.rank < 0)

    def build(self) -> dict[str, Any]:
        """Builds the model, and returns facts by which ranks and the parent see what it is.

        Buffers that the state dict holds are a part of the weights; others are often tables, of
        which a rank may have its own part.
        """
        self.model = self._built()
        weights = {
            name: hashlib.sha256(as_array(x).tobytes()).hexdigest()
            for name, x in self.model.state_dict().items()
            if isinstance(x, Tensor) and x.is_floating_point()
        }
        for name, weight in self.model.named_parameters():
            if not weight.isfinite().all():
                raise TargetError(f"the weight {name} that build() makes is not finite")
        # Positions have an embedding, too: ids below the least size are right for both. Smaller
        # ones are those of kinds of tokens.
        sizes = [x.num_embeddings for x in self.model.modules() if isinstance(x, nn.Embedding)]
        least = min((x for x in sizes if x >= _SMALL_VOCABULARY), default=max(sizes, default=0))
        config = getattr(self.model, "config", None)
        named = getattr(config, "vocab_size", None)
        constants = {name: getattr(self.target, name, None) for name in CONSTANTS}
        vocabulary = constants["VOCABULARY"] or named or least
        if vocabulary < LEAST_VOCABULARY:
            raise TargetError(
                f"the model has {vocabulary} tokens by config.vocab_size or its nn.Embedding, "
                f"expected {LEAST_VOCABULARY} or more: set VOCABULARY"
            )
        if self.rank < 0:
            self.exact = self._built().double()
        self.model = self.target.prepare(self.model)
        return {
            "weights": weights,
            "vocabulary": vocabulary,
            "positions": getattr(config, "max_position_embeddings", None),
            "generates": hasattr(self.target, "generate"),
            "own_reference": hasattr(self.target, "reference"),
            "own_shard": self.target.own_shard,
            "constants": constants,
        }

    def _built(self) -> nn.Module:
        torch.manual_seed(_WEIGHTS_SEED)
        model = self.target.build()
        if isinstance(model, tuple) and len(model) == 2 and callable(model[1]):
            model, shard = model
            self.target.own_shard = True
            if self.rank >= 0:
                self.target.shard = shard
        if not isinstance(model, nn.Module):
            raise TargetError(
                f"build() returned {type(model).__name__}, expected a torch.nn.Module or (model, "
                "shard)"
            )
        return model.to(self.device)

    def shard(self, batch: dict[str, Array]) -> Array:
        """Returns the places (B, R) of this process's tokens in a batch; -1 is padding."""
        return self._dealt(batch)[1]

    def step(
        self,
        batch: dict[str, Array],
        *,
        model: nn.Module | None = None,
        exact: bool = False,
        backward: bool = True,
        training: bool = False,
        layers: bool = False,
        padding: int | None = None,
    ) -> Observation:
        """Runs a forward, and a backward, of a batch that every process holds; ``padding``: a token
        that padded rows hold in place of the target's."""
        model = model or (self.exact if exact else self.model)
        mine, rows = self._dealt(batch)
        if padding is not None:
            mine["input_ids"][torch.from_numpy(rows < 0)] = padding
        model.train(training)
        model.zero_grad()
        torch.manual_seed(max(self.rank, 0))
        result = Observation(rows)
        # A training changes running means, which are not those of the next batch.
        buffers = [(x, x.clone()) for x in model.buffers()] if training else []
        with in_double() if exact else nullcontext(), self.target.context():
            with torch.set_grad_enabled(backward), recording(model, result, layers):
                out = self.target.step(model, mine)
            if not isinstance(out, dict) or not any(isinstance(x, Tensor) for x in out.values()):
                raise TargetError(
                    f"step() returned {type(out).__name__}, expected a dict with a tensor logits, "
                    "a tensor loss, or both"
                )
            logits, loss, result.note = out.get("logits"), out.get("loss"), out.get("note", "")
            if isinstance(logits, Tensor):
                if logits.shape[:-1] != rows.shape:
                    raise TargetError(
                        f"logits {tuple(logits.shape)} of step(): expected (B, R, V) of the token "
                        f"ids (B, R), {rows.shape}"
                    )
                result.logits = of_logits(logits)
            if isinstance(loss, Tensor):
                result.loss = float(as_array(loss))
                if backward:
                    loss.backward()
        if backward and isinstance(loss, Tensor):
            self.target.reduce(model)
            # Copies: the target's grad_norm may clip.
            result.gradients = {
                plain_name(name): as_array(weight.grad).copy()
                for name, weight in model.named_parameters()
                if weight.grad is not None
            }
            result.norm = float(self.target.grad_norm(model))
        for buffer, before in buffers:
            buffer.copy_(before)
        return result

    def resume(self, batches: list[dict[str, Array]], exact: bool = False) -> list[float | None]:
        """Trains for a step on each batch but the last; returns the losses of the last two, first
        of a run without a stop, then of one that stops after its first step: its state is saved,
        and loaded into a model and an optimizer that are new."""

        def new() -> tuple[nn.Module, torch.optim.Optimizer]:
            model = self.target.prepare(self._built())
            model = model.double() if exact else model
            return model, torch.optim.SGD(model.parameters(), lr=_LR, momentum=_MOMENTUM)

        def train(batch: dict[str, Array]) -> float | None:
            model, optimizer = run
            loss = self.step(batch, model=model, exact=exact).loss
            optimizer.step()
            return loss

        run = new()
        train(batches[0])
        state = copy.deepcopy(self.target.save(*run))  # a copy: the run goes on
        losses = [train(batch) for batch in batches[1:]]
        run = new()
        self.target.load(*run, state)
        return losses + [train(batch) for batch in batches[1:]]

    def generate(self, ids: Array, new: int) -> Array:
        """Returns what the target's own function generates after ``ids``, (B, S + new)."""
        self.model.eval()
        with torch.no_grad():
            tokens = self.target.generate(self.model, torch.from_numpy(ids).to(self.device), new)
        return as_array(tokens)

    def _dealt(self, batch: dict[str, Array]) -> tuple[dict[str, Tensor], Array]:
        """Returns this process's part of a batch, and the places of its tokens in the batch: those
        numbers are dealt in place of token ids."""
        whole = {name: torch.from_numpy(x).to(self.device) for name, x in batch.items()}
        ids = whole["input_ids"]
        numbers = torch.arange(ids.numel(), dtype=ids.dtype, device=ids.device).view_as(ids)
        rows = self.target.shard(whole | {"input_ids": numbers + _BASE})["input_ids"]
        return self.target.shard(whole), as_array((rows - _BASE).clamp(min=-1))


def serve(connection: Connection[Any, Any], process: TargetProcess) -> None:
    """Answers requests until the parent ends them."""
    while True:
        name, arguments = connection.recv()
        try:
            answer: tuple[Any, ...] = "ok", getattr(process, name)(**arguments)
        except TargetError as error:
            answer = "error", str(error), ""
        except Exception as error:
            where = traceback.format_exc(limit=-3)
            answer = "error", f"{type(error).__name__}: {error}", where
        connection.send(answer)


def main() -> None:
    connection, parent, rank, device = sys.argv[1:]
    sys.argv = ["verify"]  # a target that reads its command line finds no words of ours
    # The stacks of a process that crashes, and of one that hangs when the parent asks for them.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_follow, args=(int(parent),), daemon=True).start()
    torch.set_num_threads(1)
    requests: Connection[Any, Any] = Connection(int(connection))
    with requests:
        serve(requests, TargetProcess(int(rank), device))


def _follow(parent: int) -> None:
    """Ends this process, and those that the target has started, after a parent that was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)
