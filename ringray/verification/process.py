"""One process of a verification: a rank, or the one process that ranks are compared with.

``main``, with CONNECTION PARENT FOLDER RANK RANKS DEVICE as its arguments, answers requests of the
parent, ``(name, arguments)``, with ``("ok", result)`` or ``("error", text, traceback)``. Results
hold NumPy arrays only. The first requests are ``join``, ``load`` and ``build``.
"""

from __future__ import annotations

import copy
import faulthandler
import hashlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from ringray.verification.double import in_double
from ringray.verification.target import TargetError, VerifiedTarget, load

Array = NDArray[Any]
BASE = 1 << 24  # of the numbers that stand for rows where a batch is dealt to learn how
WEIGHTS_SEED = 0
inside = False  # this process is one of a verification
# Columns of logits that are told one by one; those of a larger vocabulary become one.
COLUMNS = 4096
_LR, _MOMENTUM = 0.01, 0.9  # of the steps of a resumed training
_GROUP_TIMEOUT = timedelta(minutes=30)  # the parent ends what hangs
# What wrappers put in front of the names of modules and parameters.
_WRAPPED = "module.", "_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module."


@dataclass
class Observation:
    """What one process computes of a batch (B, S).

    Attributes:
        rows: (B', R) the place of each row in the flattened batch; -1 is padding.
        logits: (B', R, V), fp64; of a large vocabulary the first COLUMNS, and the logarithm of the
            sum of the exponentials of the others.
        loss: of this process, None if the target has none.
        gradients: name -> whole gradient, fp64, after the reduction.
        norm: of the gradients, as the target computes it.
        layers: the name and the output (B', R, ...) of each module with one row per token, in the
            order in which they ran.
        dropped: name -> which elements (B', R, ...) a dropout module set to zero.
    """

    rows: Array
    logits: Array | None = None
    loss: float | None = None
    gradients: dict[str, Array] = field(default_factory=dict)
    norm: float | None = None
    layers: list[tuple[str, Array]] = field(default_factory=list)
    dropped: dict[str, Array] = field(default_factory=dict)


def plain_name(name: str) -> str:
    """Returns the name of a module or a parameter without those of wrappers around it."""
    for wrapper in _WRAPPED:
        name = name.replace(wrapper, "") if wrapper != "module." else name.removeprefix(wrapper)
    return name


def as_array(x: Tensor) -> Array:
    """Returns a tensor's numbers, floating-point ones in fp64; a sharded one whole."""
    x = x.detach()
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    x = x.double() if x.is_floating_point() else x
    array: Array = x.cpu().numpy()
    return array


class Process:
    """The models of one process and the requests that it answers.

    ``exact`` is the model in fp64, which the process that runs alone has.
    """

    target: VerifiedTarget

    def __init__(self, rank: int, ranks: int, device: str) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        self.model: nn.Module = nn.Identity()
        self.exact: nn.Module | None = None

    def join(self, store: str) -> None:
        """Forms the group of all ranks; the process that runs alone has one of its own, for code
        that asks for its rank."""
        if self.device == "cuda":
            torch.cuda.set_device(max(0, self.rank))
        rank, ranks = (0, 1) if self.rank < 0 else (self.rank, self.ranks)
        dist.init_process_group(
            "nccl" if self.device == "cuda" else "gloo",
            store=dist.FileStore(store, ranks),  # type: ignore[attr-defined]
            rank=rank,
            world_size=ranks,
            timeout=_GROUP_TIMEOUT,
        )
        # A target that forms the group itself, as a training does, has it already.
        dist.init_process_group = lambda *args, **options: None

    def load(self, text: str, adapter: str | None) -> None:
        """Imports the target."""
        self.target = load(text, adapter)

    def build(self) -> dict[str, Any]:
        """Builds the model, and returns facts by which ranks and the parent see what it is."""
        self.model = self._built("build" if self.rank >= 0 else "reference")
        weights = {
            name: hashlib.sha256(as_array(x).tobytes()).hexdigest()
            for name, x in self.model.named_parameters()
        }
        # Tokens come first; positions may be more than the vocabulary.
        sizes = [x.num_embeddings for x in self.model.modules() if isinstance(x, nn.Embedding)]
        config = getattr(self.model, "config", None)
        named = getattr(config, "vocab_size", None)
        facts = {
            "weights": weights,
            "vocabulary": self.target.constants.get("VOCABULARY") or named or next(iter(sizes), 0),
            "dtype": str(next((x.dtype for x in self.model.parameters()), torch.float32)),
            "positions": getattr(config, "max_position_embeddings", None),
            "generates": "generate" in self.target.functions,
            "own_reference": "reference" in self.target.functions,
            "constants": {k: v for k, v in self.target.constants.items() if v is not None},
        }
        if self.rank < 0:
            self.exact = self._built("reference").double()
        else:
            self.model = self.target.call("prepare", self.model)
        return facts

    def _built(self, function: str) -> nn.Module:
        torch.manual_seed(WEIGHTS_SEED)
        if function == "reference" and "reference" in self.target.functions:
            model: nn.Module = self.target.call("reference")
        else:
            model = self.target.model()
        return model.to(self.device)

    def observe(
        self,
        batch: dict[str, Array],
        *,
        exact: bool = False,
        backward: bool = True,
        training: bool = False,
        layers: bool = False,
        seed: int = 0,
        padding: int | None = None,
    ) -> Observation:
        """Runs a forward, and a backward, of a batch that every process holds; ``padding``: a token
        that padded rows hold in place of the target's."""
        model = self.exact if exact else self.model
        assert model is not None, "only the process that runs alone has it"
        whole = {name: torch.from_numpy(x).to(self.device) for name, x in batch.items()}
        mine, rows = self._dealt(whole)
        if padding is not None:
            mine["input_ids"][torch.from_numpy(rows < 0)] = padding
        model.train(training)
        model.zero_grad()
        torch.manual_seed(seed if self.rank < 0 else seed + self.rank)
        result = Observation(rows)
        around = self.target.context() if self.rank >= 0 else nullcontext()
        with in_double() if exact else nullcontext(), around:
            with torch.set_grad_enabled(backward), _recording(model, result, layers):
                out = self._step(model, mine)
            logits, loss = out.get("logits"), out.get("loss")
            if isinstance(logits, Tensor):
                result.logits = as_array(_columns(logits))
            if isinstance(loss, Tensor):
                result.loss = float(as_array(loss))
                if backward:
                    loss.backward()
        if backward and isinstance(loss, Tensor):
            self._collect(model, result)
        return result

    def resume(self, batches: list[dict[str, Array]], exact: bool = False) -> list[float]:
        """Trains for a step on each batch but the last; returns the losses of the last two, first
        of a run without a stop, then of one that stops after its first step: its state is saved,
        and loaded into a model and an optimizer that are new."""
        run = self._training(exact)
        self._train(*run, batches[0], exact)
        # A copy: the run goes on.
        state = copy.deepcopy(self.target.call("save", *run))
        losses = [self._train(*run, batch, exact) for batch in batches[1:]]
        run = self._training(exact)
        self.target.call("load", *run, state)
        return losses + [self._train(*run, batch, exact) for batch in batches[1:]]

    def _training(self, exact: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = self._built("build" if self.rank >= 0 else "reference")
        model = self.target.call("prepare", model) if self.rank >= 0 else model
        model = model.double() if exact else model
        return model, torch.optim.SGD(model.parameters(), lr=_LR, momentum=_MOMENTUM)

    def _train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: dict[str, Array],
        exact: bool,
    ) -> float:
        model.eval()  # no dropout
        model.zero_grad()
        whole = {name: torch.from_numpy(x).to(self.device) for name, x in batch.items()}
        mine = self._dealt(whole)[0]
        around = self.target.context() if self.rank >= 0 else nullcontext()
        with in_double() if exact else nullcontext(), around:
            loss: Tensor = self._step(model, mine)["loss"]
            loss.backward()
        if self.rank >= 0:
            self.target.call("reduce", model)
        optimizer.step()
        return float(as_array(loss))

    def generate(self, ids: Array, new: int) -> Array:
        """Returns what the target's own function generates after ``ids``, (B, S + new)."""
        self.model.eval()
        with torch.no_grad():
            tokens = self.target.call(
                "generate", self.model, torch.from_numpy(ids).to(self.device), new
            )
        return as_array(tokens)

    def _step(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        out = self.target.call("step", model, batch)
        if not isinstance(out, dict) or not any(isinstance(x, Tensor) for x in out.values()):
            raise TargetError(
                f"step() returned no tensor, expected a dict with logits, loss or both; got "
                f"{type(out).__name__}"
            )
        return out

    def _collect(self, model: nn.Module, result: Observation) -> None:
        if self.rank >= 0:
            self.target.call("reduce", model)
        result.norm = float(self.target.call("grad_norm", model))
        result.gradients = {
            plain_name(name): as_array(weight.grad)
            for name, weight in model.named_parameters()
            if weight.grad is not None
        }

    def _dealt(self, whole: dict[str, Tensor]) -> tuple[dict[str, Tensor], Array]:
        """Returns this process's part of a batch, and the places of its rows in the batch: those
        numbers are dealt in place of token ids."""
        ids = whole["input_ids"]
        numbers = torch.arange(ids.numel(), dtype=ids.dtype, device=ids.device).view_as(ids)
        if self.rank < 0:
            return whole, as_array(numbers)
        rows = self.target.call("shard", whole | {"input_ids": numbers + BASE})["input_ids"]
        return self.target.call("shard", whole), as_array((rows - BASE).clamp(min=-1))


def _columns(logits: Tensor) -> Tensor:
    if logits.shape[-1] <= COLUMNS:
        return logits
    # The mean cross entropy of labels below COLUMNS is as before.
    rest = logits[..., COLUMNS:].detach().double().logsumexp(-1, keepdim=True)
    return torch.cat([logits[..., :COLUMNS].detach().double(), rest], -1)


@contextmanager
def _recording(model: nn.Module, result: Observation, layers: bool) -> Iterator[None]:
    """Records outputs of modules with a row per token, and what dropout modules drop."""
    shape = result.rows.shape
    calls: dict[str, int] = {}

    def record(name: str, module: nn.Module, args: Any, out: Any) -> None:
        first = out[0] if isinstance(out, tuple) and out else out
        if not isinstance(first, Tensor) or tuple(first.shape[:2]) != shape:
            return
        # A module that runs several times in a forward counts its calls.
        calls[name] = calls.get(name, 0) + 1
        label = name if calls[name] == 1 else f"{name}#{calls[name]}"
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            result.dropped[label] = as_array((first == 0) & (args[0] != 0))
        if layers and first.is_floating_point():
            result.layers.append((label, as_array(first)))

    hooks = [
        module.register_forward_hook(partial(record, plain_name(name)))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def serve(connection: Connection[Any, Any], process: Process) -> None:
    """Answers requests until the parent ends them."""
    while (request := connection.recv()) is not None:
        name, arguments = request
        try:
            answer: tuple[Any, ...] = "ok", getattr(process, name)(**arguments)
        except TargetError as error:
            answer = "error", str(error), ""
        except Exception as error:
            where = traceback.format_exc(limit=-3)
            answer = "error", f"{type(error).__name__}: {error}", where
        connection.send(answer)


def main() -> None:
    global inside
    inside = True
    connection, parent, folder, place, size, device = sys.argv[1:]
    sys.argv = ["verify"]  # a target that reads its command line finds no words of ours
    # The stacks of a process that crashes, and of one that hangs when the parent asks for them.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_follow, args=(int(parent), folder), daemon=True).start()
    torch.set_num_threads(1)
    requests: Connection[Any, Any] = Connection(int(connection))
    with requests:
        serve(requests, Process(int(place), int(size), device))


def _follow(parent: int, folder: str) -> None:
    """Ends this process, and those that the target has started, after a parent that was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
